"""What a stage is given, and the process that it runs in."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

REASON = 1_500  # characters of a reason that are kept: the end of a traceback or of a log


class Skipped(Exception):
    """A stage that cannot run here; the message says what is missing."""


class Findings:
    """What a stage finds out, on disk as soon as it is known: a stage that is killed keeps its figures.

    Attributes:
        device: ``cuda`` or ``cpu``.
        folder: empty, for files of the stage's own; removed after it.
        figures: what was measured.
        faults: the checks that did not hold.
    """

    def __init__(self, path: Path, device: str, folder: Path) -> None:
        self.path, self.device, self.folder = path, device, folder
        self.figures: dict[str, Any] = {}
        self.faults: list[str] = []
        self.checks = 0

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def figure(self, name: str, value: Any) -> None:
        """Keep a measured value: numbers, texts, lists and dictionaries of them."""
        self.figures[name] = value
        print(f"{name}: {value}", flush=True)
        self.write("running")

    def check(self, name: str, holds: bool, said: str = "") -> None:
        """A property that must hold. The stage goes on where it does not: GPU time is scarce."""
        self.checks += 1
        if not holds:
            self.faults.append(f"{name}: {said}" if said else name)
            print(f"DOES NOT HOLD: {self.faults[-1]}", flush=True)
        self.write("running")

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        """Within it, an error is a fault of this part, and the stage goes on with the next."""
        began = time.perf_counter()
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}"[-REASON:])
        self.figures.setdefault("seconds", {})[name] = round(time.perf_counter() - began, 2)
        self.write("running")

    def write(self, status: str, reason: str = "") -> None:
        """All of it, whole or not at all."""
        found = {"status": status, "reason": reason, "checks": self.checks, "figures": self.figures}
        write_json(self.path, found)


def write_json(path: Path, content: Any) -> None:
    """Replace a file by one with that content, whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content, indent=1, default=str) + "\n")
    fresh.replace(path)


def work(module: str, device: str, path: str) -> None:
    """Run ``module.run`` in this process, which is the stage's own, and leave the verdict at `path`."""
    with tempfile.TemporaryDirectory(prefix="basis-gpu-") as folder:
        found = Findings(Path(path), device, Path(folder))
        try:
            importlib.import_module(module).run(found)
        except Skipped as skipped:
            found.write("skipped", str(skipped))
        except Exception:
            found.faults.append(traceback.format_exc())
            traceback.print_exc()
            found.write("failed", "; ".join(found.faults)[-REASON:])
        else:
            found.write("failed" if found.faults else "passed", "; ".join(found.faults)[-REASON:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries that do not end are no fault of the stage
