"""Does the suite notice it when the code is broken? Breaks a copy of the repository, one mutant at a time.

    python -m tests.mutation [--area functional ...] [--only ID ...] [--suite area|fast|full]

A mutant meets the tests of its area first, those that its file names first alone; one that survives them, the rest of
the fast suite, and with ``--suite full`` the long tests too. What killed it the last time (``results.json``) is tried
before all else. Results of a part of the table are put into those that are there; ``results.md`` is their summary.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import Queue
from typing import Any

from tests.mutation.table import ROOT, Mutant, read_table

RESULTS = Path(__file__).with_name("results.json")
KILLED = ("failed", "timeout", "died")
Result = dict[str, Any]


class Workplace:
    """A copy of the repository, and a server that runs tests in it."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.tree, self.timeout = folder / "tree" / "basis_rl", timeout
        self.log, self.temporary = folder / "log.txt", folder / "tmp"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        if (ROOT.parent / "shared").is_dir():  # beside the repository; some tests read it
            (self.tree.parent / "shared").symlink_to(ROOT.parent / "shared")
        # By content: a mutant may leave the size of a file as it was, and be written in the same second.
        compileall.compile_dir(self.tree, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        environment = {
            "PYTHONPATH": str(self.tree),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "MPLBACKEND": "agg",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.server"],
            cwd=self.tree,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        assert self.server.stdout is not None
        if self.server.stdout.readline() != "ready\n":
            raise RuntimeError(self.log.read_text()[-3000:])

    def pytest(self, arguments: list[str]) -> Result:
        """Run these tests in the tree as it is."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--basetemp", str(self.temporary)]
        options += ["--ignore=tests/test_mutants.py"]  # which every mutant would fail
        request = {"arguments": [*options, *arguments], "log": str(self.log), "timeout": self.timeout}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        result: Result = json.loads(self.server.stdout.readline())
        shutil.rmtree(self.temporary, ignore_errors=True)
        return result

    def close(self) -> None:
        """End the server."""
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()


def stages(mutant: Mutant, suite: str, killer: str) -> Iterator[tuple[str, list[str]]]:
    """What to run, in order: the name of the suite that the tests belong to, and pytest's arguments."""
    if killer:
        yield "last time", [killer]
    first, rest = mutant.tests[0], mutant.tests[1:]
    yield "area", ["-m", "not long", first]
    if rest:
        yield "area", ["-m", "not long", *rest, f"--ignore={first}"]
    if suite in ("fast", "full"):
        yield "fast", ["-m", "not long", "tests", *(f"--ignore={path}" for path in mutant.tests)]
    if suite == "full":
        yield "full", ["-m", "long", *mutant.tests]
        yield "full", ["-m", "long", "tests", *(f"--ignore={path}" for path in mutant.tests)]


def judge(mutant: Mutant, place: Workplace, suite: str, last: Result) -> Result:
    """Break the copy, run the tests, and put the copy back."""
    before = mutant.apply(place.tree)
    seconds, asked = 0.0, last.get("test", "")
    asked = asked if asked and (place.tree / asked.split("::")[0]).exists() else ""
    try:
        for name, arguments in stages(mutant, suite, asked):
            found = place.pytest(arguments)
            seconds += found["seconds"]
            missing = name == "last time" and found["test"] == ""  # the test has another name now
            if found["outcome"] in KILLED and not missing:
                by = last["suite"] if name == "last time" else name
                return {"outcome": found["outcome"], "test": found["test"], "suite": by, "seconds": round(seconds, 1)}
    finally:
        (place.tree / mutant.path).write_text(before)
    return {"outcome": "survived", "test": "", "suite": suite, "seconds": round(seconds, 1)}


def check_unbroken(place: Workplace, mutants: list[Mutant]) -> None:
    """Raise RuntimeError if tests fail on the code as it is: what they kill would prove nothing."""
    named = sorted({path for mutant in mutants for path in mutant.tests})
    whole = [path for path in named if not any(str(parent) in named for parent in Path(path).parents)]
    found = place.pytest(["-m", "not long", *whole])
    if found["outcome"] != "passed":
        log = place.log.read_text()[-3000:]
        raise RuntimeError(f"{found['test'] or whole} fails without any mutant; the log:\n{log}")
    print(f"unbroken: {' '.join(whole)} in {found['seconds']} s", flush=True)


def summary(results: dict[str, Result]) -> str:
    """The Markdown table of what the table's mutants came to."""
    table = read_table()
    lines = [
        "# Mutants",
        "",
        f"Written by `python -m tests.mutation` on {date.today()}. A mutant is a fault put into the code by hand",
        "(`areas/*.txt`); a test that fails kills it. *Run*: those that have met the tests so far; *area*: killed by",
        "the fast tests of the area; *fast*: by others of the fast suite; *full*: by a long test only. Equivalent",
        "ones, which nothing can tell from the code, are not run.",
        "",
        "| area | mutants | equivalent | run | killed | area | fast | full | survived |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for area in [*dict.fromkeys(mutant.area for mutant in table), "all"]:
        own = [mutant for mutant in table if area in (mutant.area, "all")]
        equivalent = sum(bool(mutant.equivalent) for mutant in own)
        found = [results[mutant.id] for mutant in own if mutant.id in results and not mutant.equivalent]
        by = [sum(r["outcome"] in KILLED and r["suite"] == suite for r in found) for suite in ("area", "fast", "full")]
        share = f"{sum(by)} ({sum(by) / len(found):.0%})" if found else "0"
        numbers = [len(own), equivalent, len(found), share, *by, len(found) - sum(by)]
        lines.append(f"| {area} | {' | '.join(map(str, numbers))} |")
    outcomes = {mutant.id: results.get(mutant.id, {}) for mutant in table if not mutant.equivalent}
    for title, chosen in (
        ("Survived", [m for m in table if outcomes.get(m.id, {}).get("outcome") == "survived"]),
        ("Killed by a long test only", [m for m in table if outcomes.get(m.id, {}).get("suite") == "full"]),
    ):
        if chosen:
            lines += ["", f"## {title}", "", *(f"- `{m.id}`: {m.meaning}." for m in chosen)]
    lines += ["", "## Equivalent", ""]
    lines += [f"- `{m.id}`: {m.meaning}; but {m.equivalent}." for m in table if m.equivalent]
    return "\n".join(lines) + "\n"


@contextmanager
def workplaces(count: int, timeout: float) -> Iterator[Queue[Workplace]]:
    """So many copies with servers."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        free: Queue[Workplace] = Queue()
        places = [Workplace(Path(temporary) / str(number), timeout) for number in range(count)]
        for place in places:
            free.put(place)
        try:
            yield free
        finally:
            for place in places:
                place.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", nargs="*", default=[], help="areas; default: all")
    parser.add_argument("--only", nargs="*", default=[], help="ids")
    parser.add_argument("--suite", choices=["area", "fast", "full"], default="fast", help="how far to go")
    parser.add_argument("--survivors", action="store_true", help="only those that are not known to be killed")
    parser.add_argument("--list", action="store_true", help="show the table and stop")
    parser.add_argument("--jobs", type=int, default=1, help="copies at work at a time")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each run of pytest")
    options = parser.parse_args()
    known: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    mutants = [mutant for mutant in read_table(options.area) if not options.only or mutant.id in options.only]
    if options.survivors:
        mutants = [mutant for mutant in mutants if known.get(mutant.id, {}).get("outcome") not in KILLED]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.id:40} {mutant.meaning}")
        return 0
    mutants = [mutant for mutant in mutants if not mutant.equivalent]
    with workplaces(options.jobs, options.timeout) as free:
        place = free.get()
        check_unbroken(place, mutants)
        free.put(place)

        def work(mutant: Mutant) -> tuple[Mutant, Result]:
            place = free.get()
            try:
                return mutant, judge(mutant, place, options.suite, known.get(mutant.id, {}))
            finally:
                free.put(place)

        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, result in pool.map(work, mutants):
                known[mutant.id] = result
                print(f"{result['outcome']:9} {mutant.id:40} {result['seconds']:6} s  {result['test']}", flush=True)
                RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    ids = {mutant.id for mutant in read_table() if not mutant.equivalent}
    known = {name: result for name, result in known.items() if name in ids}
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(summary(known))
    return int(any(known[mutant.id]["outcome"] == "survived" for mutant in mutants))


if __name__ == "__main__":
    sys.exit(main())
