"""What does a judge behind the rules find of the right answers that these reject, and what does it give away?

    python -m benchmarks.reward.judge [FILE.jsonl ...]

The rows are those of `benchmarks.reward.styles`. The rules are ours, with answers read from anywhere behind the
thought; `JudgeReward` asks a stub at a real HTTP address about what they reject. The stub knows the labels and is right
with the probability in the head of a column, 0.95, 0.88 and 0.70: VerifyBench (arXiv 2505.15801) has about 95 % for
good judges on ordinary rows, and 70 to 88 % on its hard ones. So the figures are those of these rows and of a judge
whose mistakes do not depend on what an answer says; a policy that learns to please a judge makes them worse.

Results without FILE: ``benchmarks/results/reward_judge.json``.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

from basis_rl.rewards import JudgeReward, MathVerifyReward, gold_answer
from basis_rl.text import markdown_table
from benchmarks.common import save
from benchmarks.reward.cases import DATA, reward_parser
from benchmarks.reward.styles import BLIND, FILES, golds
from tests.support.fake_judge import JudgeServer, material

ACCURACIES = (0.95, 0.88, 0.70)


def judged(rows: list[dict[str, Any]], expected: list[str], rules: MathVerifyReward, accuracy: float) -> list[bool]:
    """Which rows are accepted by the rules, or else by a judge that is right so often; 1 is by the rules alone."""
    names = [str(number) for number in range(len(rows))]

    def says(question: str) -> str:
        name = material(question)["prompt"]
        right = bool(rows[int(name)]["right"]) if name in names else True
        said = right if random.Random(f"{accuracy} {name}").random() < accuracy else not right
        return f"Score: {int(said)}"

    with JudgeServer(says) as server:
        judge = JudgeReward(server.url, "stub", behind=rules)
        scores = judge(prompts=names, completions=[row["completion"] for row in rows], solution=expected)
    return [score == 1.0 for score in scores]


def counts(rows: list[dict[str, Any]], by_rules: list[bool], after: list[bool]) -> dict[str, int]:
    """How many of the right rows that the rules reject were found, and of the wrong ones given away."""
    rejected = [(bool(row["right"]), new) for row, old, new in zip(rows, by_rules, after, strict=True) if not old]
    return {
        "lost": sum(right for right, _ in rejected),
        "found": sum(right and new for right, new in rejected),
        "wrong": sum(not right for right, _ in rejected),
        "given away": sum(new and not right for right, new in rejected),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = reward_parser(__doc__, "folder of the data sets")
    parser.add_argument("files", nargs="*", type=Path, help="rows, as JSON lines (those of this folder)")
    options = parser.parse_args(argv)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rules = MathVerifyReward(num_workers=options.workers, batch_timeout=None, answer_in="anywhere", after_think=True)
    results: dict[str, Any] = {"blind": BLIND, "sets": {}}
    for path in options.files or FILES:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        expected = [
            golds(options.data or DATA, row["set"])[row["row"]] if row["set"] else gold_answer(row["gold"])
            for row in rows
        ]
        texts = [row["completion"] for row in rows]
        by_rules = [score == 1.0 for score in rules([], texts, solution=expected)]
        found = {str(a): counts(rows, by_rules, judged(rows, expected, rules, a)) for a in ACCURACIES}
        results["sets"][path.stem] = {"rows": len(rows), **found}
    rules.close()
    lines = [[name, *map(_shown, list(entry.values())[1:])] for name, entry in results["sets"].items()]
    print(markdown_table(lines, ["set", *(f"judge right in {a:.0%}: found, given away" for a in ACCURACIES)]))
    if not options.files and not options.quick:
        save("reward_judge", results)
    return results


def _shown(found: dict[str, int]) -> str:
    return f"{found['found']} of {found['lost']}, {found['given away']} of {found['wrong']}"


if __name__ == "__main__":
    main()
