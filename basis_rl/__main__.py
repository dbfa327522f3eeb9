"""``python -m basis_rl``, and so ``accelerate launch -m basis_rl``."""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process as it is, the interpreter not torn down.

    For a rank: a worker thread of gloo can still hold the tensors of the last collective. Freed while the interpreter
    is torn down, they end the rank by SIGABRT (pytorch issue 190489), and its launcher then ends the others. A script
    of one's own that runs on several CPU ranks may end by it too.
    """
    for stream in (sys.stdout, sys.stderr):
        # The launcher may be gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run() -> int:
    """`main`, at the end of which one of several ranks leaves, after all that other modules want done at exit."""
    # The code that Python gives an uncaught exception.
    code = 1
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # What is registered first is called last.
        atexit.register(lambda: leave(code))
    from basis_rl.cli.main import main

    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        code = 130
        raise
    return code


if __name__ == "__main__":
    sys.exit(run())
