"""The model card of a run, Markdown with YAML front matter, and the results of evaluations that it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from basis_rl.run.progress import PLOT
from basis_rl.run.record import BASE_RESULTS, RESULTS, RunInfo, is_hub_id
from basis_rl.text import render

_HERE = Path(__file__).parent


def write_card(info: RunInfo, folder: Path) -> None:
    """Write the card into a run's folder, with what it holds by now: a plot, and the results of evaluations."""
    own, base = (results_of(path) if path.is_file() else [] for path in (folder / RESULTS, folder / BASE_RESULTS))
    plot = PLOT if (folder / PLOT).is_file() else None
    (folder / "README.md").write_text(str(model_card(info, own, base, curves=plot)), encoding="utf-8")


def model_card(
    info: RunInfo, results: Sequence[EvalResult] = (), base: Sequence[EvalResult] = (), *, curves: str | None = None
) -> ModelCard:
    """The card of a run with results of the trained model, which are metadata as well, and of its `base` model.

    ``str`` of it is the README; `curves` is the file name of the plot beside it.
    """
    shown = [(f"{info.base_model} (base)", result) for result in base]
    shown += [(f"**{info.model_name}**", result) for result in results]
    text = render(
        _HERE / "card.md.jinja",
        info=info,
        results=sorted(shown, key=lambda pair: (pair[1].dataset_name, pair[1].metric_name)),
        curves=curves,
        citations=citations(info.baseline, info.objective),
    )
    license: dict[str, Any] = {**(info.license or {})}
    data = ModelCardData(
        base_model=info.base_model if info.base_on_hub else None,
        datasets=list(info.datasets) or None,
        library_name=info.library,
        metrics=["accuracy"] if results else None,
        model_name=info.model_name,
        pipeline_tag="text-generation",
        tags=list(info.tags),
        eval_results=list(results) or None,
        **license,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def results_of(path: Path) -> list[EvalResult]:
    """``avg@n`` of every benchmark of a file, and ``pass@k`` and ``maj@k`` for the largest k where n > 1.

    ``metric_args`` has the 95 % interval over the problems. A ValueError if the file is not of an evaluation.
    """
    try:
        content = json.loads(path.read_text())
        return [result for name, entry in content.items() for result in _results(name, entry)]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"'{path}' is not the results.json of an evaluation: {error!r}.") from error


def _results(name: str, entry: Mapping[str, Any]) -> Iterator[EvalResult]:
    rollouts = int(entry["num_rollouts"])
    settings = entry["settings"]
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


@cache
def papers() -> dict[str, str]:
    """Name of a baseline or an objective (and ``trl``) -> its entry in ``citations.bib``, which has the names above."""
    blocks = (_HERE / "citations.bib").read_text(encoding="utf-8").strip().split("\n\n")
    named = [block.removeprefix("% ").split("\n", 1) for block in blocks]
    return {name: entry for names, entry in named for name in names.split()}


def citations(baseline: str, objective: str | None = None) -> list[str]:
    """BibTeX entries: the baseline's paper (none for your own class), the objective's, TRL's; each once."""
    known = papers()
    return list(dict.fromkeys(known[name] for name in (baseline, objective, "trl") if name in known))
