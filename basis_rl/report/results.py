"""Results of ``basis-rl eval``, as far as a card shows them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME, BASE_FILE_NAME = "results.json", "base_results.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number of one model on one benchmark.

    Attributes:
        benchmark: its name.
        metric: ``avg@32``, ``pass@8``, ``accuracy`` and the like.
        value: in [0, 1].
        n: problems.
        samples: completions of each.
        interval: of 95 %, over problems.
        temperature: 0 is greedy.
        max_tokens: of a completion.
        truncated: share of the completions that reached it.
        dataset: Hub id of the problems.
        is_base: the base model's.
    """

    benchmark: str
    metric: str
    value: float
    n: int | None = None
    samples: int | None = None
    interval: tuple[float, float] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    truncated: float | None = None
    dataset: str | None = None
    is_base: bool = False


def read_results(folder: str | Path) -> list[Result]:
    """Results of the model in `folder` (``results.json``) and of its base model (``base_results.json``), if any.

    Raises:
        ValueError: a file that is not what ``basis-rl eval`` writes.
    """
    results: list[Result] = []
    for name, is_base in ((FILE_NAME, False), (BASE_FILE_NAME, True)):
        path = Path(folder) / name
        if path.is_file():
            try:
                entries = json.loads(path.read_text())["benchmarks"]
                results += [_result(benchmark, entry, is_base) for benchmark, entry in entries.items()]
            except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
                raise ValueError(f"'{path}' is not a result of `basis-rl eval`: {error!r}.") from error
    return results


def _result(benchmark: str, entry: dict[str, Any], is_base: bool) -> Result:
    known = {key: entry[key] for key in Result.__dataclass_fields__ if key in entry}
    interval = entry.get("interval")
    return Result(
        **{**known, "benchmark": benchmark, "interval": tuple(interval) if interval else None, "is_base": is_base}
    )
