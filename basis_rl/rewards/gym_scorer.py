"""reasoning-gym's scorers, in a worker: some of them ``eval`` what a model wrote. Imports nothing of basis_rl."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec


def gym_score(answer: str, reference: str) -> float:
    """What the scorer of the entry's set gives an answer; see `basis_rl.rewards.gym` for the reference.

    Raises:
        ValueError: the entry is not the one that the reference was made of.
    """
    known = json.loads(reference)
    dataset = procedural_set(known["dataset"], json.dumps(known.get("config") or {}, sort_keys=True))
    entry = known["entry"] if "entry" in known else dataset[known["index"]]
    made = hashlib.sha256(entry["question"].encode()).hexdigest()[:16]
    if known.get("question_sha256") not in (None, made):
        raise ValueError(
            f"entry {known.get('index')} of reasoning-gym's '{known['dataset']}' is another one than that of the data: "
            "those are of another version of reasoning-gym. Make them anew."
        )
    try:
        return float(dataset.score_answer(answer, entry))
    except MemoryError:
        raise
    except Exception:  # scorers stumble over answers that they cannot read
        return 0.0


@cache
def procedural_set(name: str, config: str) -> Any:
    """The set of a name and its configuration (JSON)."""
    options = json.loads(config)
    if name == "composite":
        options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets") or []]
    return reasoning_gym.create_dataset(name, **options)
