"""The model card of a run: Markdown with YAML front matter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from basis_rl.report.results import BASE_RESULTS, RESULTS, results_of
from basis_rl.run.progress import PLOT
from basis_rl.run.record import RunInfo
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
    """The card; ``str`` of it is the README.

    Args:
        info: of the run.
        results: of evaluations of the trained model; they go into the metadata as well.
        base: those of its base model.
        curves: file name of the plot beside it.
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
    license = info.license
    data = ModelCardData(
        base_model=info.base_model if info.base_on_hub else None,
        datasets=list(info.datasets) or None,
        library_name=info.library,
        license=license.id if license else None,
        license_name=license.name if license else None,
        license_link=license.link if license else None,
        metrics=["accuracy"] if results else None,
        model_name=info.model_name,
        pipeline_tag="text-generation",
        tags=list(info.tags),
        eval_results=list(results) or None,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


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
