"""How fast is grading compared with TRL's `accuracy_reward`, and where do the verdicts differ?

    python -m benchmarks.reward.speed [--quick]

First, up to 4,096 rollouts for the golds of MATH-500 of which no two have the same gold and answer: TRL's function and
ours with one worker, in turns, by the clock and in processor time (``unrepeated``). On a busy machine, trust the ratio
of processor times.

Then there are 4,096 rollouts in which few answers are new. Both rewards get the golds bare and, in addition, in boxes,
which TRL reads best. The two alternate, with the other one first in each round: TRL's function; ours as a new object
(its processes start, then all rollouts are graded with nothing cached), and once more with everything cached. TRL
grades in its own process, on one core; ours uses ``--workers``. Ratios are of wall-clock time in one round, TRL / ours:
``cold`` without the start, ``from_nothing`` with it, ``warm`` with everything cached.

Every difference between verdicts is counted under the reason that `reason` gives. A difference without a reason makes
the benchmark fail.

Results: ``benchmarks/results/reward_speed.json``.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from basis_rl.rewards import MathVerifyReward
from basis_rl.rewards.extract import last_boxed, plain_number
from basis_rl.rewards.math.notation import normal_form
from basis_rl.rewards.math.quick import same_text
from basis_rl.rewards.math.reading import refused_reading
from benchmarks.common import save, spread
from benchmarks.reward.cases import Case, cases, golds_of, reward_parser

REASONS = {
    "gold not read": "TRL does not score what has a bare LaTeX gold that it cannot read; ours puts golds into a box",
    "gold misread": "TRL reads the bare gold as something else (a number in it, a product of letters)",
    "malformed operator": r"TRL reads no \frac12 or \sqrt2 in answers",
    "no balanced box": "TRL grades a box that is never closed, or, without one, formulas of the text; ours says 0",
    "several boxes": "TRL joins boxes that stand close together; ours those with nothing else between",
    "numeral": "numerals of one value are equal to us in every notation",
    "the gold's own text": "the gold's own text is always right to us",
    "another reading": "spaced thousands, products side by side and the like (docs/rewards.md)",
}


def reason(case: Case, ours: float | None, theirs: float | None, boxed: float | None) -> str | None:
    """Why the verdicts differ, a key of `REASONS`; `boxed` is TRL's verdict on this answer with the gold in a box."""
    answer = last_boxed(case.completion)
    if theirs is None:
        return "gold not read"
    if answer is None or not answer:
        return "no balanced box"
    if boxed == ours:
        return "gold misread"
    if re.search(r"\\[dt]?frac\s*\d|\\sqrt\s*\d", answer + case.gold):
        return "malformed operator"
    if ours and plain_number(answer) is not None and plain_number(answer) == plain_number(case.gold):
        return "numeral"
    if ours and same_text(case.gold, answer):
        return "the gold's own text"
    forms = [normal_form(text) for text in (case.gold, answer)]
    if forms != [case.gold, answer] or any(refused_reading(form) for form in forms):
        return "another reading"
    return "several boxes" if case.completion.count(r"\boxed") > 1 else None


def timed(work: Callable[[], list[float | None]]) -> tuple[float, list[float | None]]:
    """The seconds that `work` takes, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def ours(texts: list[str], golds: list[str], workers: int) -> tuple[dict[str, float], list[list[float | None]]]:
    """Seconds of a reward with an empty cache for its start, its first and its second grading; and both verdicts."""
    reward = MathVerifyReward(num_workers=workers, batch_timeout=None)
    row: dict[str, float] = {}
    # Enough pairs that every worker starts.
    row["start"], _ = timed(
        lambda: list(map(float, reward.equivalent([(f"x+{i}", f"{i}+x") for i in range(20 * workers)])))
    )
    row["cold"], cold = timed(partial(reward, [], texts, golds))
    row["warm"], warm = timed(partial(reward, [], texts, golds))
    reward.close()
    return row, [cold, warm]


def unrepeated(golds: list[str], size: int, seed: int) -> list[Case]:
    """Up to `size` cases; no two have the same gold and answer."""
    known = {(case.gold, last_boxed(case.completion)): case for case in cases(golds, 8 * size, seed)}
    return list(known.values())[:size]


def compare_unrepeated(batch: list[Case], rounds: int, trl: Any) -> dict[str, Any]:
    """Seconds of TRL and of ours with one started worker and an empty cache, by the clock and of processor time."""
    texts = [case.completion for case in batch]
    talks = [[{"role": "assistant", "content": text}] for text in texts]
    golds = [rf"\boxed{{{case.gold}}}" for case in batch]
    rows: list[dict[str, float]] = []
    for number in range(rounds):
        row: dict[str, float] = {}
        for side in ("trl", "ours") if number % 2 == 0 else ("ours", "trl"):
            began = time.process_time()
            if side == "trl":
                row["trl"], _ = timed(partial(trl, talks, golds))
                row["trl_cpu"] = time.process_time() - began
                continue
            reward = MathVerifyReward(num_workers=1, batch_timeout=None)
            reward.equivalent([("x+1", "1+x")])
            before = worker_seconds()
            row["ours"], _ = timed(partial(reward, [], texts, golds))
            row["ours_cpu"] = time.process_time() - began + worker_seconds() - before
            reward.close()
        rows.append(row)
        print(f"unrepeated, round {number}: " + ", ".join(f"{k} {v:.2f} s" for k, v in row.items()), flush=True)
    found = {
        "clock": spread([row["trl"] / row["ours"] for row in rows]),
        "processor": spread([row["trl_cpu"] / row["ours_cpu"] for row in rows]),
    }
    for name, ratio in found.items():
        print(f"TRL / ours, {len(batch)} unrepeated rollouts, {name}: {ratio}", flush=True)
    return {"size": len(batch), "seconds": rows, "ratios": found}


def worker_seconds() -> float:
    """Processor time of all processes that this one has started and that still run."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def ratios(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """TRL's seconds divided by ours, over the rounds."""
    return {
        "cold": spread([row["trl"] / row["cold"] for row in rows]),
        "from_nothing": spread([row["trl"] / (row["start"] + row["cold"]) for row in rows]),
        "warm": spread([row["trl"] / row["warm"] for row in rows]),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    options = reward_parser(__doc__, size=4096, rounds=5).parse_args(argv)
    if options.quick:
        options.size, options.rounds = 40, 2
    from trl.rewards import accuracy_reward

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    distinct = unrepeated(golds_of(options), options.size, options.seed)
    first = compare_unrepeated(distinct, options.rounds, accuracy_reward)
    batch = cases(golds_of(options), options.size, options.seed)
    texts = [case.completion for case in batch]
    talks = [[{"role": "assistant", "content": text}] for text in texts]
    golds = {"bare": [case.gold for case in batch], "boxed": [rf"\boxed{{{case.gold}}}" for case in batch]}
    rows: dict[str, list[dict[str, float]]] = {form: [] for form in golds}
    verdicts: dict[str, list[list[float | None]]] = defaultdict(list)
    for number in range(options.rounds):
        for form, given in golds.items():
            row: dict[str, float] = {}
            for side in ("trl", "ours") if number % 2 == 0 else ("ours", "trl"):
                if side == "ours":
                    seconds, found = ours(texts, given, options.workers)
                    row |= seconds
                    verdicts["ours"] += found
                else:
                    row["trl"], theirs = timed(partial(accuracy_reward, talks, given))
                    verdicts["trl" if form == "bare" else "trl, boxed golds"].append(theirs)
            rows[form].append(row)
            print(f"round {number}, {form} golds: " + ", ".join(f"{k} {v:.2f} s" for k, v in row.items()), flush=True)
    stable = {name: all(run == runs[0] for run in runs) for name, runs in verdicts.items()}
    differences, unexplained = explain(batch, verdicts["ours"][0], verdicts["trl"][0], accuracy_reward)
    results: dict[str, Any] = {
        "size": options.size,
        "workers": options.workers,
        "seed": options.seed,
        "unrepeated": first,
        "seconds": rows,
        "ratios": {form: ratios(entries) for form, entries in rows.items()},
        "same_in_every_round": stable,
        "kinds": dict(Counter(case.kind for case in batch)),
        "as_meant": {
            name: sum((run[0][i] == 1.0) == case.right for i, case in enumerate(batch))
            for name, run in verdicts.items()
        },
        "differences": differences,
        "unexplained": unexplained,
    }
    for form, found_ratios in results["ratios"].items():
        text = ", ".join(
            f"{k} {v['median']:.1f} ({v['least']:.1f} to {v['largest']:.1f})" for k, v in found_ratios.items()
        )
        print(f"TRL / ours, {form} golds: {text}")
    print(f"same in every round: {stable}")
    for name, entry in differences.items():
        print(f"  {entry['count']:5d} {name}: {REASONS[name]}; e.g. {entry['examples'][0]}")
    if not options.quick:
        save("reward_speed", results)
    if unexplained:
        raise SystemExit(f"{len(unexplained)} differences have no reason; the first is {unexplained[0]}.")
    return results


def explain(batch: list[Case], ours: list[float | None], theirs: list[float | None], trl: Any) -> tuple[Any, Any]:
    """Differences by reason, with their number and examples; and those without a reason."""
    differ = [i for i in range(len(batch)) if ours[i] != theirs[i]]
    talks = [[{"role": "assistant", "content": rf"\boxed{{{last_boxed(batch[i].completion) or ''}}}"}] for i in differ]
    boxed = trl(talks, [rf"\boxed{{{batch[i].gold}}}" for i in differ])
    found: dict[str, dict[str, Any]] = {}
    unexplained = []
    for i, again in zip(differ, boxed, strict=True):
        name = reason(batch[i], ours[i], theirs[i], again)
        shown = {
            "gold": batch[i].gold,
            "answer": last_boxed(batch[i].completion),
            "kind": batch[i].kind,
            "ours": ours[i],
            "trl": theirs[i],
        }
        if name is None:
            unexplained.append(shown)
            continue
        entry = found.setdefault(name, {"why": REASONS[name], "count": 0, "examples": []})
        entry["count"] += 1
        if len(entry["examples"]) < 5:
            entry["examples"].append(shown)
    return found, unexplained


if __name__ == "__main__":
    main()
