"""basis_rl: reinforcement learning with verifiable rewards, with pluggable advantage baselines, on top of TRL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from basis_rl.baselines import Baseline
    from basis_rl.trainer import BasisConfig, BasisTrainer
    from basis_rl.types import Advantages, RolloutBatch

__all__ = ["Advantages", "Baseline", "BasisConfig", "BasisTrainer", "RolloutBatch", "__version__"]

# Torch and TRL take seconds to import; `import basis_rl.names` and the reward workers must not pay for them.
_MODULES = {
    "Advantages": "basis_rl.types",
    "Baseline": "basis_rl.baselines",
    "BasisConfig": "basis_rl.trainer",
    "BasisTrainer": "basis_rl.trainer",
    "RolloutBatch": "basis_rl.types",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'basis_rl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
