"""What `basis-rl train` says at its end: before and after, what it cost, where things are, what to do next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from basis_rl.run.progress import clock

_AVERAGE = re.compile(r"eval_(?:(?P<name>.+)_)?avg@\d+")
_TENTH = 10
# Files that a run's folder may hold besides the model, in the order of the summary.
_FILES = {
    "README.md": "the model card",
    "recipe.yaml": "the recipe",
    "metrics.jsonl": "every metric",
    "training.png": "a plot",
    "vllm.log": "the log of vLLM",
}


def summary(log: Sequence[Mapping[str, Any]], output: Path, how: str, benchmarks: Sequence[str] = ()) -> str:
    """The text that a run prints at its end.

    Args:
        log: what was logged, in order (`TrainerState.log_history`).
        output: folder of the run, with everything written.
        how: how the rollouts of evaluations were drawn.
        benchmarks: suggested for an evaluation of the model; without any it is one on the recipe's own problems.
    """
    place = quote(str(output))
    rows = before_and_after(log, how)
    width = max((len(row[0]) for row in rows), default=0)
    lines = ["", "== Summary", _cost(log)]
    if rows:
        lines += [f"{'':{width}}  {'before':>7}  {'after':>7}"]
        lines += [f"{name:{width}}  {first:7.3g}  {last:7.3g}  {note}" for name, first, last, note in rows]
    if {row["reward"] for row in log if row.get("reward") is not None} == {0}:
        lines += [
            "The reward was 0 in every step, so nothing was learnt. See what the model writes, and why it is wrong:",
            f"  basis-rl rollouts {place}",
            "and try the next recipe before it runs: basis-rl check RECIPE --rollouts 16",
        ]
    lines += [f"In {output}:", "  the model and its tokenizer"]
    lines += [f"  {name:13}  {what}" for name, what in _FILES.items() if (output / name).is_file()]
    measured = f" --benchmarks {quote(','.join(benchmarks))}" if benchmarks else ""
    lines += [
        "Next:",
        f"  basis-rl eval {place}{measured}",
        f"  basis-rl compare {place} OTHER_RUN",
        f"  basis-rl push {place} OWNER/NAME",
    ]
    return "\n".join(lines)


def before_and_after(log: Sequence[Mapping[str, Any]], how: str) -> list[tuple[str, float, float, str]]:
    """Name, value at the start, value at the end, and what they are; without what was logged once.

    The reward's values are the means of the first and the last tenth of the log; of an evaluation its first and last.
    """
    rows = []
    rewards = [row for row in log if row.get("reward") is not None]
    if len(rewards) > 1:
        size = max(1, len(rewards) // _TENTH)
        first = rewards[:size]
        last = rewards[-size:]
        steps = [f"{part[0]['step']}" + (f"-{part[-1]['step']}" if size > 1 else "") for part in (first, last)]
        before, after = (fmean(row["reward"] for row in part) for part in (first, last))
        rows.append(("reward", before, after, f"of the training rollouts, steps {' and '.join(steps)}"))
    for name in dict.fromkeys(key for row in log for key in row if _AVERAGE.fullmatch(key)):
        found = [row for row in log if row.get(name) is not None]
        if len(found) > 1:
            note = f"{how}, steps {found[0]['step']} and {found[-1]['step']}"
            rows.append((name.replace("eval_", "eval ", 1), found[0][name], found[-1][name], note))
    return rows


def _cost(log: Sequence[Mapping[str, Any]]) -> str:
    last: dict[str, Any] = {key: value for row in log for key, value in row.items()}
    if "num_rollouts" not in last:
        return f"Trained to step {last.get('step', 0)}."
    return (
        f"Trained to step {last['step']} in {clock(last['seconds'])}: {last['num_rollouts']:,} rollouts with "
        f"{last['num_rollout_tokens']:,} tokens."
    )
