"""A value table in words: the distribution of its values, and the card of its dataset repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from basis_rl.run.record import is_hub_id
from basis_rl.text import render


def histogram(means: Tensor, reward_range: tuple[float, float], width: int = 40) -> str:
    """The distribution of the mean rewards as text: a histogram of ten bins, and the shares at both ends.

    Args:
        means: ``(P,)``, see `ValueTable.means`.
        reward_range: what 0 and 1 stand for.
        width: of the longest bar.
    """
    counts = torch.histc(means, bins=10, min=0, max=1).long().tolist()
    lines = [f"{len(means)} prompts, mean reward {float(means.mean()):.3f} (as a share of {reward_range})"]
    for i, count in enumerate(counts):
        bar = "#" * round(width * count / max(counts))
        lines.append(f"  {i / 10:.1f} - {(i + 1) / 10:.1f}  {count:7d}  {bar}")
    never = float((means == 0).double().mean())
    always = float((means == 1).double().mean())
    lines.append(f"  never solved {never:.1%}, always solved {always:.1%}")
    return "\n".join(lines)


def card(
    repo_id: str, counts: Sequence[int], description: str, known: Mapping[str, Any], license: str | None = None
) -> str:
    """The README of a dataset repository: front matter, how the table was built, its distribution, how to load it.

    `counts` are the scored rollouts of each of the P prompts, `description` is the text of `histogram`, `known` the
    provenance of the table. Without a `license` (an identifier of the Hub) the owner has to add one.
    """
    model = str(known.get("model") or "an unnamed model")
    # Without the path, if it is a local folder.
    name = model if is_hub_id(model) else Path(model).name
    front: dict[str, Any] = {
        **({"license": license} if license else {}),
        "pretty_name": f"Value table of {name}",
        "tags": ["basis-rl", "value-table", "reinforcement-learning", "rlvr"],
        "size_categories": [_size_category(len(counts))],
        "configs": [{"config_name": "default", "data_files": "rewards.parquet"}],
        **({"base_model": model} if is_hub_id(model) else {}),
    }
    shown = {**known, "model": name if known.get("model") else None}
    shown["early_exit"] = f"{known['early_exit']} rollouts" if known.get("early_exit") else None
    if known.get("truncated") is not None and known.get("rollouts"):
        shown["truncated"] = f"{known['truncated']} ({known['truncated'] / known['rollouts']:.1%})"
    return render(
        Path(__file__).with_name("card.md.jinja"),
        front=yaml.safe_dump(front, sort_keys=False).rstrip(),
        name=name,
        repo_id=repo_id,
        prompts=len(counts),
        rollouts=f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}",
        shown=shown,
        exit_after=known.get("early_exit"),
        planned=known.get("num_rollouts"),
        description=description,
    )


def _size_category(n: int) -> str:
    for bound, name in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K")):
        if n < bound:
            return name
    return "100K<n<1M"
