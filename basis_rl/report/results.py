"""Results of evaluations (``results.json``), as far as a card shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from basis_rl.run.record import is_hub_id

RESULTS, BASE_RESULTS = "results.json", "base_results.json"


def results_of(path: Path) -> list[EvalResult]:
    """``avg@n`` of every benchmark of a file, and ``pass@k`` and ``maj@k`` for the largest k where n > 1.

    ``metric_args`` has the 95 % interval over the problems, their number, and how the rollouts were drawn.

    Raises:
        ValueError: it is not the result of an evaluation.
    """
    try:
        content = json.loads(path.read_text())
        return [result for name, entry in content.items() for result in _results(name, entry)]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"'{path}' is not the results.json of an evaluation: {error!r}.") from error


def _results(name: str, entry: Mapping[str, Any]) -> Iterator[EvalResult]:
    rollouts, settings = int(entry["num_rollouts"]), entry["settings"]
    dataset = (settings.get("source") or {}).get("dataset_name") or ""
    found = {f"avg@{rollouts}": entry[f"avg@{rollouts}"]}
    for metric in ("pass@k", "maj@k"):
        largest = max(entry.get(metric) or {}, key=int, default=None)
        if largest is not None and rollouts > 1:
            found[metric.replace("k", largest)] = entry[metric][largest]
    for metric, numbers in found.items():
        yield EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=dataset if is_hub_id(dataset) else name,
            dataset_name=name,
            metric_type="accuracy",
            metric_name=metric,
            metric_value=round(float(numbers["value"]), 6),
            metric_args={
                "interval": [round(float(numbers[end]), 6) for end in ("low", "high")],
                "problems": int(entry["num_problems"]),
                "rollouts": rollouts,
                "temperature": float(settings["temperature"]),
                "top_p": float(settings["top_p"]),
                "max_tokens": int(settings["max_new_tokens"]),
                "truncated": float(entry["truncated"]),
            },
        )
