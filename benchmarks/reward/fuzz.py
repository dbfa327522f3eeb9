"""Which answers make grading slow, use much memory, or kill a worker?

    python -m benchmarks.reward.fuzz [--n 20000] [--quick]

Answers are LaTeX from a grammar, and mutated golds. A worker grades each against a gold, without the screen, and one at
a time. The results list the slowest answers, those with the largest memory, every worker that died, and the number of
timeouts; also every answer for which a quick rule contradicts Math-Verify (there must be none), and every answer that
is screened although Math-Verify says that it is right.

Results: ``benchmarks/results/reward_fuzz.json``.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import psutil
from tqdm import tqdm

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.quick import quick_verdict
from basis_rl.rewards.math.screen import screened
from basis_rl.rewards.workers.pool import WorkerPool
from benchmarks.common import save
from benchmarks.reward.cases import golds_of, reward_parser

_ATOMS = (
    "x", "y", "n", "2", "10", "3.5", r"\pi", "e", "i", "7", "999999", r"\infty", r"\theta", r"\text{cm}", r"50\%",
    "0",
)  # fmt: skip
_GLUE = (
    "+", "-", "*", "/", r"\cdot ", r"\times ", ",", ";", "=", "<", r"\le ", r"\cup ", r"\approx ", r"\mod ", " ",
    ":", "|",
)  # fmt: skip
_ONE = (
    "(@)", "{@}", r"\{@\}", "[@)", r"\left(@\right)", r"\sqrt{@}", r"\sqrt[3]{@}", r"\sin @", r"\ln(@)", "-@",
    "f(@)", "@!", "|@|", r"\lfloor @ \rfloor", r"\text{@}", r"\overline{@}", r"@^\circ", r"@\%", r"\boxed{@}",
    r"\det(@)", r"\int_0^1 @ dx", r"\sum_{n=1}^{100} @", r"\lim_{x \to 0} @", r"\gcd(@,12)",
    r"\operatorname{tr}(@)", "@_2", r"\prod_{n=1}^{50} @", r"\begin{pmatrix} @ & 1 \\ 2 & @ \end{pmatrix}",
    r"\frac{d}{dx} @", r"\pm @", r"\$@", r"\log_{2}{@}", "x = @", "f(@)",
)  # fmt: skip
_TWO = (
    r"\frac{@}{#}", "@^{#}", r"\binom{@}{#}", "(@, #)", "[@, #]", r"\{@, #\}", "@_{#}", r"\frac@#", "@#",
)  # fmt: skip
_NOISE = (
    "\x00", "\ud800", "٣", "²", "\u200b", '"', "\\", "{", "}", "$", "&", "\\\\", "\n", "\t", "'", "#", "~", "é",
    "😀", "^", "_",
)  # fmt: skip
_KEPT = 10


def expression(rng: random.Random, budget: int) -> str:
    """A random formula of about `budget` parts."""
    if budget <= 1:
        return rng.choice(_ATOMS)
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(_ONE).replace("@", expression(rng, budget - 1))
    split = rng.randint(1, budget - 1)
    left, right = expression(rng, split), expression(rng, budget - split)
    if kind < 0.7:
        return left + rng.choice(_GLUE) + right
    return rng.choice(_TWO).replace("@", left).replace("#", right)


def mutated(gold: str, rng: random.Random) -> str:
    """A gold with one to five parts deleted, doubled, repeated or replaced at random."""
    text = gold
    for _ in range(rng.randint(1, 5)):
        a, b = sorted(rng.choices(range(len(text) + 1), k=2))
        part = rng.choice(("", text[a:b] * 2, text[a:b] * rng.randint(2, 40), rng.choice(_NOISE), expression(rng, 3)))
        text = text[:a] + part + text[b:]
    return text[:4000]


def inputs(golds: list[str], n: int, seed: int) -> list[tuple[str, str]]:
    """``n`` pairs (gold, answer) in normal form; half of the answers are from the grammar, half are mutated golds."""
    rng = random.Random(seed)
    pairs = []
    for i in range(n):
        gold = rng.choice(golds)
        if i % 2:
            pairs.append((gold, mutated(gold, rng)))
        else:
            pairs.append((gold, expression(rng, min(60, int(rng.paretovariate(0.8)) + 1))[:4000]))
    return [(normal_form(gold), normal_form(answer)) for gold, answer in pairs]


class Prober:
    """A single worker, and its time and memory for each pair."""

    def __init__(self, like: WorkerPool) -> None:
        self.pool = WorkerPool(like.command, 1, like.timeout, policy=like.policy)

    def probe(self, gold: str, answer: str) -> dict[str, Any]:
        began = time.perf_counter()
        outcome = self.pool.run([{"gold": gold, "answer": answer}])[0]
        found = {"seconds": round(time.perf_counter() - began, 3), "status": outcome.status, **outcome.value}
        workers = [psutil.Process(worker.process.pid) for worker in self.pool._workers]
        everyone = [process for worker in workers for process in (worker, *worker.children(recursive=True))]
        found["megabytes"] = sum(process.memory_info().rss for process in everyone) >> 20
        return {**found, "gold": gold, "answer": answer}


def probe_all(pairs: list[tuple[str, str]], timeout: float, workers: int) -> list[dict[str, Any]]:
    """The result of grading each pair."""
    reward = MathVerifyReward(timeout=timeout)
    found: list[dict[str, Any]] = [{} for _ in pairs]
    bar = tqdm(total=len(pairs), unit="answer", mininterval=10)

    def work(first: int) -> None:
        prober = Prober(reward._pool)
        prober.probe("1", "1")
        for i in range(first, len(pairs), workers):
            found[i] = prober.probe(*pairs[i])
            bar.update()
        prober.pool.close()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bar.close()
    return found


def contradicted(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers for which a quick rule decides otherwise than Math-Verify."""
    wrong = []
    for entry in found:
        here = quick_verdict(entry["gold"], entry["answer"])
        if entry["status"] == "ok" and here is not None and here is not (entry.get("verdict") == "right"):
            wrong.append({**entry, "here": here})
    return wrong


def lost(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers that are screened although Math-Verify says that they are right."""
    return [e for e in found if e.get("verdict") == "right" and screened(e["gold"], e["answer"])]


def most(found: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The answers that took most, each cut off after 200 characters."""
    return [{**e, "answer": e["answer"][:200]} for e in sorted(found, key=lambda e: -e[key])[:_KEPT]]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    options = reward_parser(__doc__, n=20_000, timeout=2.0).parse_args(argv)
    if options.quick:
        options.n = 100
    began = time.perf_counter()
    found = probe_all(inputs(golds_of(options), options.n, options.seed), options.timeout, options.workers)
    ended = [e for e in found if e["status"] != "ok"]
    wrong = contradicted(found)
    results = {
        **{name: getattr(options, name) for name in ("n", "seed", "timeout", "workers")},
        "seconds": round(time.perf_counter() - began, 1),
        "screened": sum(screened(e["gold"], e["answer"]) is not None for e in found),
        "timeouts": sum(e["status"] == "timeout" for e in ended),
        "crashed": [e for e in ended if e["status"] == "crashed"],
        "errors": [e for e in found if "error" in e][:_KEPT],
        "ended_unscreened": sum(screened(e["gold"], e["answer"]) is None for e in ended),
        "slowest": most(found, "seconds"),
        "largest": most(found, "megabytes"),
        "contradicted": wrong,
        "screened_though_right": lost(found),
    }
    shown = {name: len(value) if isinstance(value, list) else value for name, value in results.items()}
    print(", ".join(f"{name} {value}" for name, value in shown.items()))
    print(f"largest {results['largest'][0]['megabytes']} MB, slowest {results['slowest'][0]['seconds']} s")
    if not options.quick:
        save("reward_fuzz", results)
    return results


if __name__ == "__main__":
    main()
