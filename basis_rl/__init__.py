"""basis_rl: reinforcement learning with verifiable rewards, with pluggable advantage baselines, on top of TRL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from basis_rl.trainer import BasisConfig, BasisTrainer

__all__ = ["BasisConfig", "BasisTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    # TRL takes seconds to import; `import basis_rl.baselines` and the reward workers must not pay for it.
    if name in ("BasisConfig", "BasisTrainer"):
        return getattr(importlib.import_module("basis_rl.trainer"), name)
    raise AttributeError(f"module 'basis_rl' has no attribute '{name}'")
