"""The model card of a run: Markdown with YAML front matter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from basis_rl.report.results import Result, read_results
from basis_rl.run.progress import PLOT
from basis_rl.run.record import RunInfo, is_hub_id
from basis_rl.text import render

_HERE = Path(__file__).parent


def write_card(info: RunInfo, folder: Path) -> None:
    """Write the card into a run's folder, with what it holds by now: a plot, and the results of evaluations."""
    plot = PLOT if (folder / PLOT).is_file() else None
    card = model_card(info, read_results(folder), curves=plot)
    (folder / "README.md").write_text(str(card), encoding="utf-8")


def model_card(info: RunInfo, results: Sequence[Result] = (), *, curves: str | None = None) -> ModelCard:
    """The card; ``str`` of it is the README.

    Args:
        info: of the run.
        results: of evaluations, the base model's as well. Only those of the trained model go into the metadata.
        curves: file name of the plot beside it.
    """
    text = render(
        _HERE / "card.md.jinja",
        info=info,
        results=sorted(results, key=lambda r: (r.benchmark, r.metric, not r.is_base)),
        curves=curves,
        citations=citations(info.baseline, info.objective),
    )
    own = [result for result in results if not result.is_base]
    data = ModelCardData(
        base_model=info.base_model if info.base_on_hub else None,
        datasets=list(info.datasets) or None,
        library_name=info.library,
        license=info.license.id if info.license else None,
        license_name=info.license.name if info.license else None,
        license_link=info.license.link if info.license else None,
        metrics=["accuracy"] if own else None,
        model_name=info.model_name,
        pipeline_tag="text-generation",
        tags=list(info.tags),
        eval_results=[_eval_result(result) for result in own] or None,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _eval_result(result: Result) -> EvalResult:
    arguments: dict[str, Any] = {
        "interval": [round(result.low, 6), round(result.high, 6)],
        "problems": result.problems,
        "rollouts": result.rollouts,
        "temperature": result.temperature,
        "top_p": result.top_p,
        "max_tokens": result.max_tokens,
    }
    return EvalResult(
        task_type="text-generation",
        task_name="Text generation",
        dataset_type=result.dataset if result.dataset and is_hub_id(result.dataset) else result.benchmark,
        dataset_name=result.benchmark,
        metric_type="accuracy",
        metric_name=result.metric,
        metric_value=round(result.value, 6),
        metric_args=arguments,
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
