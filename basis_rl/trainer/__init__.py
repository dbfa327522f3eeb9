"""`BasisTrainer` and `BasisConfig`: the only files that touch TRL's private methods."""

from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.quiet import quieten
from basis_rl.trainer.trainer import BasisTrainer

quieten()

__all__ = ["BasisConfig", "BasisTrainer"]
