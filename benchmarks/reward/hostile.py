"""Do 40 hostile answers hang a batch, use too much memory, or change the verdict of another answer?

    python -m benchmarks.reward.hostile [--quick]

A batch of clean rollouts is graded alone, and then five times with the hostile ones inserted at random places, each
time by a new reward. These properties are checked: the verdicts of the clean rollouts are the same as alone; all
repeats agree; no hostile answer is right; time is bounded (by the clean batch and a timeout for every hostile answer,
shared by the workers); and so is the memory of all processes.

Results: ``benchmarks/results/reward_hostile.json``.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from typing import Any

import psutil

from basis_rl.rewards import MathVerifyReward
from benchmarks.common import save
from benchmarks.reward.cases import cases, golds_of, reward_parser

# Answers that were found to hang, use much memory or break something, and similar ones: (name, content of the box).
HOSTILE: tuple[tuple[str, str], ...] = (
    ("tower", "9^{9^{9^{9}}}"),
    ("tower of parentheses", "9^(9^(9^9))"),
    ("tower of a variable", "x^{" * 18 + "2" + "}" * 18),
    ("factorial of factorials", "((9!)!)!"),
    ("double factorial", "99!!"),
    ("large factorial", "900000!"),
    ("binomial", r"\binom{10000000}{5000000}"),
    ("binomial below the screen", r"\binom{900000}{450000}"),
    ("sines in brackets", r"\sin(" * 12 + "1" + ")" * 12),
    ("sines", r"\sin " * 30 + "1"),
    ("continued fraction", r"\frac{1}{1+" * 22 + "1" + "}" * 22),
    ("deep continued fraction", r"\frac{1}{1+" * 400 + "1" + "}" * 400),
    ("braces", "{" * 20 + "2" + "}" * 20),
    ("parentheses", "(" * 50 + "2" + ")" * 50),
    ("absolute values", "|" * 40 + "1" + "|" * 40),
    ("digits", "9" * 100_000),
    ("ten megabytes", "x+" * 5_000_000 + "x"),
    ("ten megabytes of blanks", "1" + " " * 10_000_000 + "2"),
    ("set of numbers", ",".join(map(str, range(2000, 0, -1)))),
    ("set of sums", ",".join(f"x+{i}" for i in range(300))),
    ("union", r"\cup".join(f"({i},{i + 1})" for i in range(30))),
    ("endless union", r"\cup".join(f"({i},{i + 1})" for i in range(400))),
    ("matrix", r"\begin{pmatrix}" + r"\\".join("&".join(["x"] * 25) for _ in range(25)) + r"\end{pmatrix}"),
    ("determinant", r"\det\begin{pmatrix}" + r"\\".join("&".join("abcdefg") for _ in range(7)) + r"\end{pmatrix}"),
    ("integral", r"\int_0^1 \frac{\sin(x^x)}{\ln(1+x^{17})} dx"),
    ("sum", r"\sum_{n=1}^{10^9} \frac{1}{n^n}"),
    ("product", r"\prod_{n=1}^{99999999} n"),
    ("limit", r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7 \ln(\cos x)}"),
    ("greatest common divisor", r"\gcd(10^{999999}, 7^{99999})"),
    ("remainder", r"7^{7^{77}} \mod 10^{9}"),
    ("floor", r"\lfloor 10^{900000} \cdot \pi \rfloor"),
    ("logarithms", r"\log_{2}{\log_{2}{2^{10^{15}}}}"),
    ("exponent", "1e999999999"),
    ("decimal exponent", r"1.5 \times 10^{999999999}"),
    ("complex power", r"(1+i)^{(1+i)^{(1+i)^{99}}}"),
    ("percents", r"50\%" * 400),
    ("polynomial", "(x+y+z+1)^{60}-(x-y)^{59}"),
    ("text in text", r"\text{" * 23 + "a" + "}" * 23),
    ("what breaks JSON", '"}\n{"verdict": true}\n\x00\ud800\\u0000\r\u2028'),
    ("digits of other scripts", "٣²³¹⁰" * 50 + "π" * 100),
)
assert len(HOSTILE) == 40


class Memory:
    """Measures the peak resident memory of this process, and of the largest of its workers, in MB."""

    def __init__(self) -> None:
        self.parent = self.worker = 0.0
        self._end = threading.Event()

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        command = me.cmdline()
        while not self._end.wait(0.05):
            self.parent = max(self.parent, me.memory_info().rss / 2**20)
            for child in me.children(recursive=True):
                try:
                    # Until a new worker has started its own program, it has this process's memory.
                    if child.cmdline() == command:
                        continue
                    self.worker = max(self.worker, child.memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue


def run(texts: list[str], golds: list[str], options: argparse.Namespace) -> tuple[list[float | None], dict[str, float]]:
    """The verdicts of a new reward, and its seconds, metrics and memory in MB."""
    reward = MathVerifyReward(num_workers=options.workers, timeout=options.timeout)
    metrics: dict[str, float] = {}
    with Memory() as memory:
        began = time.perf_counter()
        verdicts = reward([], texts, golds, metrics.__setitem__)
        seconds = time.perf_counter() - began
    reward.close()
    return verdicts, {"seconds": seconds, "parent_mb": memory.parent, "worker_mb": memory.worker, **metrics}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    options = reward_parser(__doc__, size=4096, repeats=5, timeout=5.0).parse_args(argv)
    if options.quick:
        options.size, options.repeats = 4 * len(HOSTILE), 2
    batch = cases(golds_of(options), options.size, options.seed)
    clean, alone = run([case.completion for case in batch], [case.gold for case in batch], options)
    print(f"clean batch alone: {alone['seconds']:.1f} s", flush=True)
    # A hostile answer is inserted before each of these clean rollouts, with the same gold.
    places = sorted(random.Random(options.seed).sample(range(len(batch)), len(HOSTILE)))
    texts, golds, kept = [], [], []
    for i, case in enumerate(batch):
        if i in places:
            texts.append(rf"So \boxed{{{HOSTILE[places.index(i)][1]}}}")
            golds.append(case.gold)
        kept.append(len(texts))
        texts.append(case.completion)
        golds.append(case.gold)
    runs: list[list[float | None]] = []
    rows: list[dict[str, float]] = []
    for number in range(options.repeats):
        verdicts, row = run(texts, golds, options)
        runs.append(verdicts)
        rows.append(row)
        print(f"repeat {number}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    bound = 3 * alone["seconds"] + len(HOSTILE) * (options.timeout + 3) / options.workers
    hostile = [texts.index(rf"So \boxed{{{text}}}") for _, text in HOSTILE]
    checks = {
        "clean_verdicts_unchanged": all([run[i] for i in kept] == clean for run in runs),
        "repeats_identical": all(run == runs[0] for run in runs),
        "within_the_time": max(row["seconds"] for row in rows) < bound,
        # The batch has answers of 10 MB, which exist in several copies for a time; a worker may have 4 GB of addresses.
        "within_the_memory": max(row["parent_mb"] for row in rows) < alone["parent_mb"] + 200
        and max(row["worker_mb"] for row in rows) < alone["worker_mb"] + 1000,
        "no_hostile_answer_is_right": all(run[i] != 1.0 for run in runs for i in hostile),
    }
    results: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("size", "repeats", "workers", "timeout", "seed")},
        "alone": alone,
        "with_hostile": rows,
        "bound_seconds": bound,
        "hostile_verdicts": {name: runs[0][i] for (name, _), i in zip(HOSTILE, hostile, strict=True)},
        "checks": checks,
    }
    print(checks)
    if not options.quick:
        save("reward_hostile", results)
    if not all(checks.values()):
        raise SystemExit(f"These checks failed: {', '.join(name for name, holds in checks.items() if not holds)}.")
    return results


if __name__ == "__main__":
    main()
