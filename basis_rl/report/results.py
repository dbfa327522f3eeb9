"""Results of evaluations (``results.json``), as far as a card shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS, BASE_RESULTS = "results.json", "base_results.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number (`value`, in [0, 1]) of one model on one benchmark.

    `metric` is ``avg@32``, ``pass@8`` or ``maj@8``; `low` and `high` bound its 95 % interval over the problems.
    `rollouts` is their number per problem, `truncated` the share of those that reached `max_tokens`, and `dataset` the
    Hub id of the problems.
    """

    benchmark: str
    metric: str
    value: float
    low: float
    high: float
    problems: int
    rollouts: int
    temperature: float
    top_p: float
    max_tokens: int
    truncated: float
    dataset: str | None = None
    is_base: bool = False


def read_results(folder: Path) -> list[Result]:
    """Results of the model in `folder` (``results.json``) and of its base model (``base_results.json``), if any."""
    files = [(folder / RESULTS, False), (folder / BASE_RESULTS, True)]
    return [result for path, is_base in files if path.is_file() for result in results_of(path, is_base=is_base)]


def results_of(path: Path, *, is_base: bool = False) -> list[Result]:
    """``avg@n`` of every benchmark of a file, and ``pass@k`` and ``maj@k`` for the largest k where n > 1.

    Raises:
        ValueError: it is not the result of an evaluation.
    """
    try:
        content = json.loads(path.read_text())
        return [result for name, entry in content.items() for result in _results(name, entry, is_base)]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"'{path}' is not the results.json of an evaluation: {error!r}.") from error


def _results(name: str, entry: Mapping[str, Any], is_base: bool) -> Iterator[Result]:
    rollouts, settings = int(entry["num_rollouts"]), entry["settings"]
    found = {f"avg@{rollouts}": entry[f"avg@{rollouts}"]}
    for metric in ("pass@k", "maj@k"):
        largest = max(entry.get(metric) or {}, key=int, default=None)
        if largest is not None and rollouts > 1:
            found[metric.replace("k", largest)] = entry[metric][largest]
    for metric, numbers in found.items():
        yield Result(
            benchmark=name,
            metric=metric,
            value=float(numbers["value"]),
            low=float(numbers["low"]),
            high=float(numbers["high"]),
            problems=int(entry["num_problems"]),
            rollouts=rollouts,
            temperature=float(settings["temperature"]),
            top_p=float(settings["top_p"]),
            max_tokens=int(settings["max_new_tokens"]),
            truncated=float(entry["truncated"]),
            dataset=(settings.get("source") or {}).get("dataset_name"),
            is_base=is_base,
        )
