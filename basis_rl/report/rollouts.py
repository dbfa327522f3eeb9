"""Rollouts that a run has kept, chosen and shown: as text for a terminal, or as one HTML page."""

from __future__ import annotations

import heapq
import math
import re
import secrets
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from basis_rl.run.rollouts import Row, files, read
from basis_rl.text import printable, render

# The largest comes first.
SORTS: dict[str, Callable[[Row], float]] = {
    "reward": lambda row: -math.inf if row["reward"] is None else float(row["reward"]),
    "advantage": lambda row: abs(row["advantage"] or 0.0),
    "length": lambda row: float(row["tokens"]),
}
_WIDTH = 80
# Characters at the beginning and at the end of a text that a terminal, or the report of a comparison, shows.
_HEAD = 400
_TAIL = 800


def choose(
    output_dir: str | Path,
    steps: str = "last",
    *,
    below: float | None = None,
    above: float | None = None,
    prompt: str = "",
    verdict: str = "",
    sort: str = "step",
    limit: int = 20,
) -> list[Row]:
    """At most `limit` rollouts of a run, the largest by `sort` first.

    Args:
        output_dir: of the run.
        steps: ``last``, ``all``, ``N`` or ``N-M``.
        below: rewards are at most this; rollouts without a reward are left out.
        above: rewards are at least this; likewise.
        prompt: is in the text of the prompt, in whatever case, or begins its prompt_id.
        verdict: is in the verdict of the reward function.
        sort: ``step``, the newest first and in the order of the batch, or a key of `SORTS`.
        limit: see above.

    Raises:
        ValueError: nothing was kept, or nothing of these steps.
    """
    kept = files(output_dir)
    if not kept:
        raise ValueError(
            f"'{output_dir}' has no rollouts. Give the output_dir of a run that has ended its first step; a run keeps "
            "its rollouts there unless keep_rollouts_mb is 0."
        )
    words = re.fullmatch(r"(\d+)(?:-(\d+))?", {"last": str(max(kept)), "all": f"0-{max(kept)}"}.get(steps, steps))
    if words is None:
        raise ValueError(f"--step must be last, all, N or N-M, got '{steps}'.")
    first = int(words[1])
    last = int(words[2] or words[1])
    paths = [path for step, path in reversed(kept.items()) if first <= step <= last]
    if not paths:
        raise ValueError(
            f"--step {steps}: '{output_dir}' has rollouts of {len(kept)} steps from {min(kept)} to {max(kept)}, none "
            "of them there. A generation batch that serves several steps is kept with the first of them."
        )

    def fits(row: Row) -> bool:
        reward = math.nan if row["reward"] is None else row["reward"]
        in_range = (below is None or reward <= below) and (above is None or reward >= above)
        asked = prompt.casefold() in row["prompt"].casefold() or row["prompt_id"].startswith(prompt)
        return in_range and asked and verdict in _verdict(row)

    found = filter(fits, read(paths))
    # The newest step is read first, so that nothing more is read than is shown.
    return list(islice(found, limit)) if sort == "step" else heapq.nlargest(limit, found, key=SORTS[sort])


def facts(row: Row) -> list[str]:
    """What is known of a rollout beside its texts, in short phrases."""
    parts = [f"{name} {_number(value)}" for name, value in row["rewards"].items()]
    known = [
        f"reward {_number(row['reward'])}" + (f" ({', '.join(parts)})" if len(parts) > 1 else ""),
        f"advantage {_number(row['advantage'])}",
        *([f"gold {row['gold']}"] if row.get("gold") is not None else []),
        *(f"{name}: {value}" for name, value in row["extra"].items() if value is not None),
        f"baseline {_number(row['baseline'])}",
        f"{row['tokens']} tokens" + (", cut off" if row["cut_off"] else ""),
        *([f"drawn with chance {_number(row['chance'])}"] if row["chance"] is not None else []),
    ]
    return list(map(_line, known))


def _line(value: Any, characters: int = 200) -> str:
    return "" if value is None else printable(" ".join(str(value).split()))[:characters]


def _verdict(row: Row) -> str:
    return _line(row["extra"].get("verdict"))


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "none"


def clipped(text: str) -> str:
    """The beginning and the end of a text, harmless for a terminal."""
    left_out = len(text) - _HEAD - _TAIL
    return printable(text if left_out <= 0 else f"{text[:_HEAD]}\n[{left_out} characters]\n{text[-_TAIL:]}")


def ask_math_verify(rows: Sequence[Row]) -> None:
    """Add to the verdict on each answer that the rules rejected whether Math-Verify alone finds it equal."""
    from basis_rl.rewards.math.reward import REJECTED, MathVerifyReward

    rejected = [row for row in rows if _verdict(row).partition(":")[0] in REJECTED]
    asked = [row for row in rejected if row["extra"].get("answer") and isinstance(row.get("gold"), str)]
    answers = [rf"\boxed{{{row['extra']['answer']}}}" for row in asked]
    reward = MathVerifyReward(rules="plain")
    scores = reward.plain(answers, [row["gold"] for row in asked])
    reward.close()
    for row, score in zip(asked, scores, strict=True):
        if score:
            row["extra"]["verdict"] += " (equal to Math-Verify alone)"


def text(rows: Sequence[Row]) -> str:
    """Rollouts for a terminal of 80 columns, long ones without their middle."""
    counts = Counter(filter(None, map(_verdict, rows))).most_common()
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts)
    lines = textwrap.wrap(f"Verdicts: {said}", _WIDTH) if counts else []
    for row in rows:
        lines.append(f"--- step {row['step']} ".ljust(_WIDTH, "-"))
        lines += textwrap.wrap("; ".join(facts(row)), _WIDTH)
        for name in ("prompt", "completion"):
            title = f"prompt {printable(row['prompt_id'][:16])}" if name == "prompt" else "rollout"
            lines.append(f"{title}:")
            for line in clipped(row[name]).split("\n"):
                indent: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "  "}
                lines += textwrap.wrap(line, _WIDTH, **indent, drop_whitespace=False, replace_whitespace=False) or [""]
    return "\n".join(line.rstrip() for line in lines)


def page(rows: Sequence[Row], title: str) -> str:
    """One HTML page that needs no network; only its own script may run on it, whatever a rollout says."""
    return render(
        Path(__file__).with_name("rollouts.html.jinja"),
        html=True,
        title=printable(title),
        nonce=secrets.token_urlsafe(16),
        rows=[
            {
                "step": row["step"],
                "reward": "" if row["reward"] is None else row["reward"],
                "advantage": row["advantage"] or 0.0,
                "facts": facts(row),
                "verdict": _verdict(row),
                "pair": (_line(row.get("gold"), _WIDTH), _line(row["extra"].get("answer"), _WIDTH)),
                **{key: printable(str(row.get(key, ""))) for key in ("prompt_id", "prompt", "completion", "rendered")},
            }
            for row in rows
        ],
    )


def extremes(output_dir: Path) -> dict[str, Any]:
    """For a report: the command that shows a run's rollouts, and the three of its last step that weigh most."""
    found: dict[str, Any] = {"command": f"basis-rl rollouts {shlex.quote(output_dir.name)}", "rows": []}
    # Others' runs may hold anything.
    with suppress(ValueError, OSError, OverflowError, RecursionError):
        rows = choose(output_dir, sort="advantage", limit=3)
        shown = [{"facts": facts(row), "texts": [clipped(row["prompt"]), clipped(row["completion"])]} for row in rows]
        found |= {"step": str(max(files(output_dir))), "rows": shown}
    return found
