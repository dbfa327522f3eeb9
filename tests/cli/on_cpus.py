"""``python -m basis_rl``, with FSDP on CPUs, where accelerate shards only by GPUs. Run by `test_machines.py`."""

import sys
from unittest.mock import patch

from basis_rl.__main__ import leave
from basis_rl.cli.main import main
from tests.trainer.sharded import OnCpus

if __name__ == "__main__":
    with patch("basis_rl.recipe.build.BasisTrainer", OnCpus):
        code = main(sys.argv[1:])
    leave(code)
