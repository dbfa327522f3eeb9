"""`BasisTrainer` and `BasisConfig`: with `basis_rl.engine` the only files that touch TRL's private methods."""

import logging
import warnings

from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.trainer import BasisTrainer

# DeepSpeed says so where it is installed and not used; TRL has an old name of a setting that no user of ours wrote.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)

__all__ = ["BasisConfig", "BasisTrainer"]
