"""How many answers, written in the styles of different models, does each grader judge as a reader does?

    python -m benchmarks.reward.styles [FILE.jsonl ...]

A row of a file is ``{"set", "row", "style", "completion", "right"}``: a rollout for the problem in row ``row`` of the
data set ``set``, and whether a reader takes it as right; ``gold`` where the row is of no data set. Three graders judge
it: ours (``full``, with ``--answer_in``, behind the thought), ours with ``rules: plain``, and
``math_verify.verify(parse(gold), parse(rollout))`` in this process, with the gold as it is in the data set. Recall is
the share of right rollouts that are accepted; precision is the share of accepted ones that are right.

``styles_*`` are rollouts as models write them, ``hard_*`` are meant to be hard: half of their rows are a notation or a
trap of their own. Nobody who wrote them knew the rules, and nobody who wrote the rules has read ``BLIND``.

Results: ``benchmarks/results/reward_styles.json``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from basis_rl.data.prompts import SOLUTION_COLUMNS
from basis_rl.data.rows import gold_text
from basis_rl.rewards import MathVerifyReward, gold_answer
from basis_rl.text import markdown_table
from benchmarks.common import save
from benchmarks.reward.cases import DATA, reward_parser

FILES = sorted(Path(__file__).parent.glob("*.jsonl"))
BLIND = ("styles_c", "hard_b")


@cache
def golds(folder: Path, name: str) -> list[str]:
    """The golds of a data set, read as the loaders of the package read them."""
    path = next(path for path in (folder / name, folder / f"{name}.jsonl", folder / f"{name}.json") if path.is_file())
    text = path.read_text()
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    column = next(column for column in SOLUTION_COLUMNS if column in rows[0])
    return [gold_answer(gold_text(row[column]) or "") for row in rows]


def shares(right: Sequence[bool], accepted: Sequence[bool]) -> dict[str, float | None]:
    """Recall and precision; None where there is nothing to count."""
    both = sum(a and b for a, b in zip(right, accepted, strict=True))
    return {
        "recall": both / sum(right) if sum(right) else None,
        "precision": both / sum(accepted) if sum(accepted) else None,
    }


def graded(rows: Sequence[dict[str, Any]], folder: Path, workers: int, answer_in: Any) -> dict[str, list[bool]]:
    """What each grader accepts."""
    texts = [row["completion"] for row in rows]
    expected = [golds(folder, row["set"])[row["row"]] if row["set"] else gold_answer(row["gold"]) for row in rows]
    full = MathVerifyReward(num_workers=workers, batch_timeout=None, answer_in=answer_in, after_think=True)
    scores = {"full": full([], texts, solution=expected), "plain": full.plain(texts, expected)}
    full.close()
    found = {name: [score == 1.0 for score in given] for name, given in scores.items()}
    bare = [bool(verify(parse(gold), parse(text))) for gold, text in zip(expected, texts, strict=True)]
    return {**found, "Math-Verify": bare}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = reward_parser(__doc__, "folder of the data sets")
    parser.add_argument("files", nargs="*", type=Path, help="rows, as JSON lines (those of this folder)")
    parser.add_argument("--answer_in", default="anywhere", help="where `full` looks for the answer (anywhere)")
    options = parser.parse_args(argv)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    paths = options.files or FILES
    rows = [(path.stem, json.loads(line)) for path in paths for line in path.read_text().splitlines() if line]
    accepted = graded([row for _, row in rows], options.data or DATA, options.workers, options.answer_in)
    results: dict[str, Any] = {"rows": len(rows), "answer_in": options.answer_in, "blind": BLIND, "sets": {}}
    for name in [path.stem for path in paths]:
        at = [i for i, (of, _) in enumerate(rows) if of == name]
        right = [bool(rows[i][1]["right"]) for i in at]
        found = {grader: shares(right, [given[i] for i in at]) for grader, given in accepted.items()}
        results["sets"][name] = {"rows": len(at), "right": sum(right), **found}
    names = list(accepted)
    lines = [
        [name, entry["rows"], entry["right"], *(_shown(entry[grader]) for grader in names)]
        for name, entry in results["sets"].items()
    ]
    print(markdown_table(lines, ["set", "rows", "right", *(f"{name}: recall, precision" for name in names)]))
    if not options.files and not options.quick:
        save("reward_styles", results)
    return {**results, "accepted": accepted}


def _shown(found: dict[str, float | None]) -> str:
    return ", ".join("-" if share is None else f"{100 * share:.1f}" for share in found.values())


if __name__ == "__main__":
    main()
