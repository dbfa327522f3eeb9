"""Commands that are not trusted, with as little as the kernel lets us take away. See docs/security.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from basis_rl.sandbox.folders import remove_folder
    from basis_rl.sandbox.policy import Isolation, Policy, environment, isolation, python_paths, sandboxed

__all__ = ["Isolation", "Policy", "environment", "isolation", "python_paths", "remove_folder", "sandboxed"]


def __getattr__(name: str) -> Any:
    # The launcher imports its modules from here, for every sandbox again: dataclasses and pathlib would cost it as much
    # as all the rest.
    if name in __all__:
        module = "folders" if name == "remove_folder" else "policy"
        return getattr(importlib.import_module(f"basis_rl.sandbox.{module}"), name)
    raise AttributeError(f"module 'basis_rl.sandbox' has no attribute '{name}'")
