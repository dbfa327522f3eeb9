"""What a stage receives, and the process that it runs in."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

REASON = 1_500  # maximum number of characters of a reason: the end of a traceback or of a log


class Skipped(Exception):
    """A stage, or a part of one, that cannot run here; the message says what is missing."""


def need(*modules: str) -> None:
    """Skip what follows where a module is not installed.

    Raises:
        Skipped: names all that are missing.
    """
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        raise Skipped(f"not installed: {', '.join(missing)}")


class Findings:
    """The findings of a stage, which are written to disk at once, so that they survive when the stage is killed.

    Attributes:
        device: ``cuda`` or ``cpu``.
        folder: a temporary folder for the stage's own files.
        figures: the measured values. Those of an earlier run that did not pass are there from the start.
        parts: for each part its status (``passed``, ``failed`` or ``skipped``), its number of checks, and its seconds.
        faults: the checks that failed.
        missing: the parts that could not run here, and why. The stage has not passed with one.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        folder: Path,
        limit: float = math.inf,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            path: file of the findings.
            device: ``cuda`` or ``cpu``.
            folder: a temporary folder.
            limit: seconds after which the stage is killed.
            before: what an earlier run of this stage found; its parts that passed are not run again.
        """
        before = before or {}
        self.path, self.device, self.folder = path, device, folder
        self.deadline = time.monotonic() + limit
        self.figures: dict[str, Any] = dict(before.get("figures", {}))
        earlier = before.get("parts", {})
        self.parts: dict[str, dict[str, Any]] = {
            name: part for name, part in earlier.items() if part["status"] == "passed"
        }
        self.faults: list[str] = []
        self.missing: list[str] = []
        self.checks = sum(part["checks"] for part in self.parts.values())

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def left(self) -> float:
        """Seconds until the stage is killed."""
        return self.deadline - time.monotonic()

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
    def part(self, name: str) -> Iterator[None]:
        """Within this context, an error is a fault of this part, and the stage continues with the next part.

        A part that is `Skipped` is missing.
        """
        began, faults, checks, skipped = time.perf_counter(), len(self.faults), self.checks, False
        try:
            yield
        except Skipped as reason:
            skipped = True
            self.missing.append(f"{name}: {reason}")
            print(f"NOT RUN: {self.missing[-1]}", flush=True)
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {error}"[-REASON:])
        self.parts[name] = {
            "status": "failed" if len(self.faults) > faults else "skipped" if skipped else "passed",
            "checks": self.checks - checks,
            "seconds": round(time.perf_counter() - began, 2),
        }
        self.write("running")

    def attempt(self, name: str, work: Callable[..., None], *args: Any, **settings: Any) -> None:
        """Run ``work(*args, **settings)`` as a `part`, unless it has passed in an earlier run of this stage."""
        if self.parts.get(name, {}).get("status") == "passed":
            print(f"{name}: passed already", flush=True)
            return
        with self.part(name):
            work(*args, **settings)

    def verdict(self) -> None:
        """Write the findings of a stage that has ended by itself."""
        status = "failed" if self.faults else "incomplete" if self.missing else "passed"
        self.write(status, "; ".join([*self.missing, *self.faults])[-REASON:])

    def write(self, status: str, reason: str = "") -> None:
        """Write all findings in one atomic step."""
        found = {"status": status, "reason": reason, "checks": self.checks}
        write_json(self.path, {**found, "parts": self.parts, "figures": self.figures})


def write_json(path: Path, content: Any) -> None:
    """Replace the content of a file in one atomic step."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content, indent=1, default=str) + "\n")
    fresh.replace(path)


def work(module: str, device: str, path: str, limit: str, before: str) -> None:
    """Run ``module.run`` in this process, which belongs to the stage, and write the verdict to `path`.

    Args:
        module: the stage's module.
        device: ``cuda`` or ``cpu``.
        path: file of the findings.
        limit: seconds after which this process is killed.
        before: file with the findings of an earlier run.
    """
    with tempfile.TemporaryDirectory(prefix="basis-gpu-") as folder:
        found = Findings(Path(path), device, Path(folder), float(limit), json.loads(Path(before).read_text()))
        try:
            importlib.import_module(module).run(found)
        except Skipped as skipped:
            found.write("skipped", str(skipped))
        except Exception:
            found.faults.append(traceback.format_exc())
            traceback.print_exc()
            found.verdict()
        else:
            found.verdict()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries that do not end must not block the stage
