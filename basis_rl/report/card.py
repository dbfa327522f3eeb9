"""The record of a run (``run.json``), and the model card from it: Markdown with YAML front matter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from basis_rl.report.citations import citations
from basis_rl.report.results import Result
from basis_rl.run.artefacts import write_whole
from basis_rl.text import render

FILE_NAME, FACTS = "README.md", "run.json"
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+")


@dataclass(frozen=True, kw_only=True)
class License:
    """A licence as the Hub knows it: an identifier (``apache-2.0``, ``other``), with name and link for ``other``."""

    id: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A value table or a codebook that the baseline was given.

    Attributes:
        kind: ``value table`` or ``prompt codebook``.
        source: Hub id or path that it was loaded from.
        sha256: over its content, see `ValueTable.digest`.
        provenance: how it was made.
        rollouts: that it was built from: what it cost once.
    """

    kind: str
    source: str
    sha256: str
    provenance: Mapping[str, Any]
    rollouts: int = 0


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run: what its card says, and what tells it apart from others in a comparison.

    All of it is public: nothing here may hold a secret.

    Attributes:
        model_name: the title.
        hub_model_id: ``owner/name``, None while it is not known.
        base_model: Hub id, or the name of a local folder.
        base_on_hub: whether `base_model` is a Hub id.
        base_revision: its commit, or a hash over the local weights.
        license: None if it is not known.
        datasets: Hub ids of the training data.
        data: the training data in words.
        baseline: registered name, or the name of your own class.
        baseline_parameters: what it was built with.
        sampler: registered name of the prompt sampler, or the name of your own class.
        sampler_parameters: what it was built with.
        artefacts: what the baseline was given.
        objective: name of the policy objective.
        reward: `reward_identity`: reward functions and their versions.
        settings: further rows of the training table, label to value.
        compared: settings that count whether given or by default: ``num_generations``, ``rollouts_per_batch``,
            ``rollouts_per_update``, ``learning_rate``.
        step: optimizer steps done.
        max_steps: of the whole run.
        rollouts: sampled in training.
        reward_curve: mean reward of the first and of the last logged step.
        seed: of the run.
        hardware: in words.
        versions: package to version.
        recipe: YAML of the recipe, or of the settings that are not the default.
        command: that started the run.
        library: that loads the model: ``transformers``, or ``peft`` for an adapter.
        tags: of the card.
        finished: whether it was trained to its end.
    """

    model_name: str
    hub_model_id: str | None = None
    base_model: str
    base_on_hub: bool = False
    base_revision: str | None = None
    license: License | None = None
    datasets: Sequence[str] = ()
    data: str = ""
    baseline: str
    baseline_parameters: Mapping[str, str] = field(default_factory=dict)
    sampler: str = "uniform"
    sampler_parameters: Mapping[str, str] = field(default_factory=dict)
    artefacts: Sequence[Artefact] = ()
    objective: str
    reward: str
    settings: Mapping[str, str] = field(default_factory=dict)
    compared: Mapping[str, float] = field(default_factory=dict)
    step: int
    max_steps: int
    rollouts: int
    reward_curve: tuple[float, float] | None = None
    seed: int
    hardware: str
    versions: Mapping[str, str] = field(default_factory=dict)
    recipe: str
    command: str | None = None
    library: str = "transformers"
    tags: Sequence[str] = ()
    finished: bool = False


def is_hub_id(name: str) -> bool:
    """Whether a name is one of the Hub, and not of a file or folder here."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def save_facts(facts: RunFacts, folder: str | Path) -> Path:
    """Write the facts as ``run.json``; `load_facts` reads them for a new card, `basis_rl.report` to compare runs."""
    path = Path(folder) / FACTS
    write_whole(path, json.dumps(asdict(facts), indent=2, default=str) + "\n")
    return path


def load_facts(folder: str | Path) -> RunFacts:
    """The facts that a run left in its folder.

    Raises:
        ValueError: there are none, or another version wrote them.
    """
    path = Path(folder) / FACTS
    if not path.is_file():
        raise ValueError(f"'{folder}' has no {FACTS}: it is not the output_dir of a run of basis-rl.")
    content = json.loads(path.read_text())
    try:
        content["license"] = License(**content["license"]) if content["license"] else None
        content["artefacts"] = [Artefact(**entry) for entry in content["artefacts"]]
        content["reward_curve"] = tuple(content["reward_curve"]) if content["reward_curve"] else None
        return RunFacts(**content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"'{path}' was written by another version of basis-rl: {error}.") from error


def model_card(facts: RunFacts, results: Sequence[Result] = (), *, curves: str | None = None) -> ModelCard:
    """The card; ``str`` of it is the README.

    Args:
        facts: of the run.
        results: of evaluations, the base model's too. Only the trained model's own go into the metadata.
        curves: file name of the plot beside it.
    """
    text = render(
        Path(__file__).with_name("card.md.jinja"),
        facts=facts,
        results=sorted(results, key=lambda r: (r.benchmark, r.metric, not r.is_base)),
        curves=curves,
        citations=citations(facts.baseline, facts.objective),
    )
    return ModelCard(f"---\n{card_data(facts, results).to_yaml()}\n---\n\n{text}")


def card_data(facts: RunFacts, results: Sequence[Result] = ()) -> ModelCardData:
    """The metadata, in the keys that the Hub reads."""
    own = [result for result in results if not result.is_base]
    given: dict[str, Any] = {
        "base_model": facts.base_model if facts.base_on_hub else None,
        "datasets": list(facts.datasets) or None,
        "library_name": facts.library,
        "license": facts.license.id if facts.license else None,
        "license_name": facts.license.name if facts.license else None,
        "license_link": facts.license.link if facts.license else None,
        "metrics": ["accuracy"] if own else None,
        "model_name": facts.model_name,
        "pipeline_tag": "text-generation",
        "tags": list(facts.tags),
        "eval_results": [_eval_result(result) for result in own] or None,
    }
    return ModelCardData(**given)


def _eval_result(result: Result) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        task_name="Text generation",
        dataset_type=result.dataset if result.dataset and is_hub_id(result.dataset) else result.benchmark,
        dataset_name=result.benchmark,
        metric_type="accuracy",
        metric_name=result.metric,
        metric_value=round(result.value, 6),
        metric_args={
            "interval": [round(result.low, 6), round(result.high, 6)],
            "problems": result.problems,
            "rollouts": result.rollouts,
            "temperature": result.temperature,
            "top_p": result.top_p,
            "max_tokens": result.max_tokens,
        },
    )
