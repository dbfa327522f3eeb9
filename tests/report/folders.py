"""Folders of runs as `basis-rl train` leaves them, written without training; and the elements of a page."""

from __future__ import annotations

import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path,
    *,
    baseline: str = "rloo",
    seed: int = 0,
    steps: int = 20,
    per_step: int = 64,
    level: float = 0.5,
    table: str | None = None,
    recipe: dict[str, Any] | None = None,
    finished: bool = True,
    **metrics: float,
) -> list[dict[str, Any]]:
    """A run whose rewards climb from 0 to about `level`; returns its rows."""
    rng = random.Random(f"{baseline} {seed} {level}")
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "reward": level * step / steps + rng.uniform(-0.05, 0.05),
            "num_rollouts": per_step * step,
            "num_rollout_tokens": 10 * per_step * step,
            "seconds": 2.0 * step,
            "advantages/zero": 0.25,
            **metrics,
        }
        rows.append(row)
    folder.mkdir(parents=True)
    write_rows(folder, rows)
    settings = {"baseline": baseline, "seed": seed, "output_dir": str(folder), "learning_rate": 1e-6, **(recipe or {})}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    record: dict[str, Any] = {"seed": seed, "compared": {"num_generations": 2}, "finished": finished}
    if table:
        record["artefacts"] = [{"kind": "value table", "sha256": table, "source": "values", "rollouts": 1000}]
    (folder / "run.json").write_text(json.dumps(record))
    return rows


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Elements(HTMLParser):
    """Of a page: `found`, its tags with their attributes, and `text`, what stands between them."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)
