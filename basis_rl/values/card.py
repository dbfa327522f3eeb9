"""A value table in words: the distribution of its values, and the card of its dataset repository."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

if TYPE_CHECKING:
    from basis_rl.values.table import ValueTable

_SHOWN = {
    "model": "Model",
    "revision": "Revision",
    "chat_template": "Chat template (hash)",
    "reward": "Reward",
    "num_rollouts": "Rollouts a prompt",
    "early_exit": "Early exit after",
    "max_completion_length": "Longest completion (tokens)",
    "temperature": "Temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "min_p": "min-p",
    "repetition_penalty": "Repetition penalty",
    "generation_kwargs": "Further settings",
    "seed": "Seed",
    "sampler": "Sampled with",
    "rollouts": "Rollouts in all",
    "tokens": "Tokens in all",
    "truncated": "Completions that were cut off",
    "dataset": "Dataset (hash)",
    "date": "Date",
}


def describe(table: ValueTable, width: int = 40) -> str:
    """The distribution of the mean rewards as text: a histogram of ten bins, and the shares at both ends."""
    means = table.means
    counts = torch.histc(means, bins=10, min=0, max=1).long().tolist()
    lines = [f"{len(table)} prompts, mean reward {float(means.mean()):.3f} (as a share of {table.reward_range})"]
    for i, count in enumerate(counts):
        bar = "#" * round(width * count / max(counts))
        lines.append(f"  {i / 10:.1f} - {(i + 1) / 10:.1f}  {count:7d}  {bar}")
    never, always = float((means == 0).double().mean()), float((means == 1).double().mean())
    lines.append(f"  never solved {never:.1%}, always solved {always:.1%}")
    return "\n".join(lines)


def card(table: ValueTable, repo_id: str, license: str | None = None) -> str:
    """The README of a dataset repository: front matter, how the table was built, its distribution, how to load it.

    Args:
        table: what it is about.
        repo_id: where it will be.
        license: an identifier of the Hub's; None leaves it to the owner.
    """
    known = table.provenance
    sizes = {len(table.rewards(prompt_id)) for prompt_id in table.prompt_ids}
    front: dict[str, Any] = {
        **({"license": license} if license else {}),
        "pretty_name": f"Value table of {_name(known)}",
        "tags": ["basis-rl", "value-table", "reinforcement-learning", "rlvr"],
        "size_categories": [_size_category(len(table))],
        "configs": [{"config_name": "default", "data_files": "rewards.parquet"}],
        **({"base_model": known["model"]} if _on_hub(known.get("model")) else {}),
    }
    rows = {label: _shown(key, known) for key, label in _SHOWN.items() if known.get(key) not in (None, "", "{}")}
    facts = "\n".join(f"| {label} | {text} |" for label, text in rows.items() if text)
    counts = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    return f"""---
{yaml.safe_dump(front, sort_keys=False).rstrip()}
---

# Value table of {_name(known)}

Rewards of {counts} rollouts of the reference model for each of {len(table)} prompts, drawn once. [BASIS], a
baseline for reinforcement learning with verifiable rewards, reads from them what each prompt is worth.

| | |
|---|---|
{facts}

{_early_exit(known)}## Distribution of the mean rewards

```
{describe(table)}
```

## Load it

```python
from basis_rl.values import ValueTable

table = ValueTable.load("{repo_id}")
```

In a recipe: `baseline: basis` and `baseline_kwargs: {{values: {repo_id}}}`. Training refuses a table of another model,
chat template, reward or way of sampling. Without basis-rl, `datasets.load_dataset("{repo_id}")` has the columns
`prompt_id` (16 hex digits of the SHA-256 of the problem), `fingerprint` (of the rendered prompt) and `rewards`.

[BASIS]: Gong, Xu, Ye, Quinzan, Livieri and Shi, "Batchwise Advantage Estimation from Single-Rollout Information
Sharing for LLM Reasoning", 2026.
"""


def _shown(key: str, known: Mapping[str, Any]) -> str:
    if key == "model":
        return _name(known)
    if key == "truncated" and known.get("rollouts"):
        return f"{known[key]} ({known[key] / known['rollouts']:.1%})"
    if key == "early_exit":
        return f"{known[key]} rollouts" if known[key] else ""
    return f"{known[key]}".replace("|", "\\|")


def _early_exit(known: Mapping[str, Any]) -> str:
    m, n = known.get("early_exit"), known.get("num_rollouts")
    if not m or not n:
        return ""
    return (
        f"Prompts whose first {m} rewards were all 0 or all 1 have no more than these. The mean reward of a prompt "
        f"with success probability p is therefore off by {(n - m) / n:.3g} (p^{m} (1 - p) - (1 - p)^{m} p) "
        "on average.\n\n"
    )


def _name(known: Mapping[str, Any]) -> str:
    """The Hub id, or the name of a local folder without the path to it."""
    model = str(known.get("model") or "an unnamed model")
    return model if _on_hub(model) else Path(model).name


def _on_hub(model: Any) -> bool:
    return (
        isinstance(model, str)
        and model.count("/") == 1
        and not model.startswith(("/", "."))
        and not Path(model).exists()
    )


def _size_category(n: int) -> str:
    for bound, name in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K")):
        if n < bound:
            return name
    return "100K<n<1M"
