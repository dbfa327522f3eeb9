"""Runs inside the sandbox: a program from standard input, with the value of its last line printed as in a console.

Nothing of this package is imported here.
"""

import ast
import io
import linecache
import sys
import traceback

NAME = "<program>"


def main() -> int:
    source = sys.stdin.buffer.read().decode("utf-8", "replace")
    sys.stdin = open("/dev/null")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="replace")
    sys.stdout.write(sys.argv[1])
    sys.stdout.flush()
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    try:
        tree = ast.parse(source, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # Not the module of this file: pickle looks for a program's classes there.
        sys.modules["__main__"] = type(sys)("__main__")
        scope = vars(sys.modules["__main__"])
        exec(compile(tree, NAME, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NAME, "eval"), scope)
            if value is not None:
                print(repr(value))
        sys.stdout.flush()
    except SystemExit as error:
        sys.stdout.flush()
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        # Of the model's program, and shown to it.
        sys.stdout.flush()
        steps = error.__traceback__
        while steps is not None and steps.tb_frame.f_code.co_filename != NAME:
            steps = steps.tb_next
        traceback.print_exception(type(error), error, steps, chain=False, limit=-5)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
