"""Merges the problems of ORZ and DAPO into one file: `python -m examples.papers.orz_dapo runs/papers/orz_dapo.jsonl`.

Both datasets are read with the loader that training uses. A problem that is in both is kept once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from basis_rl.data import DataArguments, load_prompts

SETS = (
    DataArguments("Chenmien/OpenReasonerZero", prompt_column="messages", solution_column="answer"),
    DataArguments("open-r1/DAPO-Math-17k-Processed", "all", solution_column="solution"),
)


def merge(path: Path) -> int:
    """Write the problems with the columns ``problem`` and ``answer``; returns their number."""
    rows: dict[str, dict[str, str]] = {}
    for data in SETS:
        data.prompt_template, data.on_missing_gold = "{prompt}", "drop"
        for row in load_prompts(data, conversational=False, reads=()):
            rows.setdefault(row["prompt_id"], {"problem": row["prompt"], "answer": row["solution"]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
    return len(rows)


if __name__ == "__main__":
    print(f"{merge(Path(sys.argv[1]))} problems")
