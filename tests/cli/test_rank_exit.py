"""How `python -m basis_rl` ends where it is one of several ranks."""

import os
import subprocess
import sys

import pytest

# Runs the package as `python -m` does. What is said at exit is said last by an object that only a torn down
# interpreter deletes, before it by a handler that something imported later has registered.
SCRIPT = """
import atexit, os, runpy, sys, types
class Held:
    def __del__(self, write=os.write):
        write(1, b"torn down\\n")
sys.modules["held"] = types.ModuleType("held")
sys.modules["held"].it = Held()
sys.argv = ["basis_rl", *sys.argv[1:]]
import basis_rl.cli.main
{patch}
runpy.run_module("basis_rl", run_name="__main__", alter_sys=True)
"""
AT_EXIT = (
    "basis_rl.cli.main.USAGE = type('U', (), {'format': lambda *a, **k: atexit.register(print, 'handler') and ''})()"
)


@pytest.mark.parametrize(("ranks", "ends"), [("1", ["handler", "torn down"]), ("2", ["handler"])])
def test_a_rank_does_what_is_to_be_done_at_exit_and_leaves(ranks, ends):
    done = run(ranks, AT_EXIT, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[1:-1] == ends


def fails(what):
    return f"basis_rl.cli.main.fail = lambda *a: {what}"


@pytest.mark.parametrize(
    ("patch", "code", "ranks"),
    [
        (fails("75"), 75, "12"),
        (fails("sys.exit(69)"), 69, "12"),
        (fails("sys.exit('a message')"), 1, "12"),
        (fails("sys.exit()"), 0, "12"),
        (fails("1 // 0"), 1, "12"),
        (fails("[print('to nobody'), os.close(1)] and 75"), 75, "2"),  # without its launcher
        ("def fail(*a): raise KeyboardInterrupt\nbasis_rl.cli.main.fail = fail", 130, "2"),
    ],
)
def test_its_exit_code_is_that_of_one_process(patch, code, ranks):
    for each in ranks:
        done = run(each, patch, "no-such-command")
        assert done.returncode == code, f"{each}: {done.stderr}"
        assert ("ZeroDivisionError" in done.stderr) == ("//" in patch)
        assert ("a message" in done.stderr) == ("message" in patch)


def run(ranks, patch, *arguments):
    command = [sys.executable, "-c", SCRIPT.format(patch=patch), *arguments]
    environment = {**os.environ, "WORLD_SIZE": ranks}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
