"""A process that has torch, transformers and TRL loaded, and runs pytest in a fork of itself for each request.

Run by `tests.mutation` with a copy of the repository as working directory and first in PYTHONPATH, so that the forks
and whatever they launch import `basis_rl` from there. Requests and results are lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any, TextIO

PRELOADED = (
    "torch",
    "numpy",
    "pyarrow.parquet",
    "datasets",
    "accelerate",
    "accelerate.commands.launch",
    "transformers",
    "trl",
    "peft",
    "math_verify",
    "deepspeed",
    "psutil",
    "pytest",
    "yaml",
    "sklearn.cluster",
    "torch.distributed.fsdp",
    "torch.utils.cpp_extension",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "safetensors.torch",
    "trl.trainer.grpo_trainer",
    "matplotlib.pyplot",
    "huggingface_hub",
    "jinja2",
    "tensorboard",
)


class FirstFailure:
    """A plugin of pytest: which test failed first, or which file could not be collected."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid


def run_tests(arguments: list[str], log: str, pipe: int) -> None:
    """In the fork: run pytest and write the result into the pipe. Does not return."""
    os.setsid()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    plugin = FirstFailure()
    try:
        code = int(pytest.main(arguments, plugins=[plugin]))
    except BaseException as error:
        print(f"pytest ended by {error!r}", flush=True)
        code = 3
    os.write(pipe, json.dumps({"code": code, "test": plugin.test}).encode())
    os._exit(0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request in a fork: ``passed``, ``failed`` (and by which test), ``timeout`` or ``died``."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run_tests(request["arguments"], request["log"], writing)
    os.close(writing)
    ended = False
    while not ended and time.monotonic() - began < request["timeout"]:
        ended = os.waitpid(child, os.WNOHANG)[0] != 0
        time.sleep(0.05)
    if not ended:
        _end(child)
    with open(reading, "rb") as pipe:
        said = pipe.read() if ended else b""
    seconds = round(time.monotonic() - began, 1)
    if not said:
        return {"outcome": "died" if ended else "timeout", "test": "", "seconds": seconds}
    found = json.loads(said)
    outcome = {0: "passed", 5: "passed"}.get(found["code"], "failed" if found["test"] else "died")
    return {"outcome": outcome, "test": found["test"], "seconds": seconds}


def _end(child: int) -> None:
    """End a fork and all that it launched, sessions of their own included."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def serve(requests: TextIO, results: TextIO) -> None:
    """Answer every line."""
    for line in requests:
        results.write(json.dumps(answer(json.loads(line))) + "\n")
        results.flush()


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for a result
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "basis_rl" not in sys.modules, "the mutants would not be seen"
    out.write("ready\n")
    out.flush()
    serve(sys.stdin, out)
