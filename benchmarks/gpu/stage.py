"""What a stage receives, and the process that it runs in."""

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

REASON = 1_500  # maximum number of characters of a reason: the end of a traceback or of a log


class Skipped(Exception):
    """A stage that cannot run here; the message says what is missing."""


class Findings:
    """The findings of a stage, which are written to disk at once, so that they survive when the stage is killed.

    Attributes:
        device: ``cuda`` or ``cpu``.
        folder: a temporary folder for the stage's own files.
        figures: the measured values.
        faults: the checks that failed.
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
        """Record a measured value: a number or text, or a list or dictionary of them."""
        self.figures[name] = value
        print(f"{name}: {value}", flush=True)
        self.write("running")

    def check(self, name: str, holds: bool, said: str = "") -> None:
        """Record whether a property holds that must hold. The stage continues if it does not: GPU time is scarce."""
        self.checks += 1
        if not holds:
            self.faults.append(f"{name}: {said}" if said else name)
            print(f"DOES NOT HOLD: {self.faults[-1]}", flush=True)
        self.write("running")

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        """Within this context, an error is a fault of this part, and the stage continues with the next part."""
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
        """Write all findings in one atomic step."""
        found = {"status": status, "reason": reason, "checks": self.checks, "figures": self.figures}
        write_json(self.path, found)


def write_json(path: Path, content: Any) -> None:
    """Replace the content of a file in one atomic step."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content, indent=1, default=str) + "\n")
    fresh.replace(path)


def work(module: str, device: str, path: str) -> None:
    """Run ``module.run`` in this process, which belongs to the stage, and write the verdict to `path`."""
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
    os._exit(0)  # threads of libraries that do not end must not block the stage
