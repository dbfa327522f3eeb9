"""``python -m basis_rl``, and so ``accelerate launch -m basis_rl``."""

import sys

from basis_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
