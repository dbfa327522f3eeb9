"""``python -m basis_rl``, and so ``accelerate launch -m basis_rl``."""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process at once, without tearing the interpreter down.

    A worker thread of gloo can still hold the tensors of the last collective. Freed while the interpreter is torn down,
    they end the rank by SIGABRT (pytorch issue 190489), and its launcher then ends the other ranks. Your own script may
    end with this as well if it runs on several CPU ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        # The launcher may be gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run() -> int:
    """Call `main`. One of several ranks then ends by `leave`, after the exit handlers of all other modules."""
    # The code that Python gives an uncaught exception.
    code = 1
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Registered before the other modules are imported, because the first handler is called last.
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
