"""The model card: facts of a run in, Markdown with YAML front matter out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from basis_rl.hub.citations import citations
from basis_rl.hub.results import Result

FILE_NAME, FACTS = "README.md", "card.json"
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
    """

    kind: str
    source: str
    sha256: str
    provenance: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a card says of a run. All of it is public: nothing here may hold a secret.

    Attributes:
        model_name: the title.
        hub_model_id: ``owner/name``, None while it is not known.
        base_model: Hub id, or the name of a local folder.
        base_on_hub: whether `base_model` is a Hub id.
        base_revision: its commit, or a hash over the local weights.
        license: None if it is not known.
        datasets: Hub ids of the training data.
        data: the training data in words.
        baseline: registered name, or the class of somebody's own.
        baseline_parameters: what it was built with.
        artefacts: what it was given.
        objective: name of the policy objective.
        reward: `reward_identity`: reward functions and their versions.
        settings: further rows of the training table, label to value.
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
    artefacts: Sequence[Artefact] = ()
    objective: str
    reward: str
    settings: Mapping[str, str] = field(default_factory=dict)
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


def is_hub_id(name: str) -> bool:
    """Whether a name is one of the Hub, and not of a file or folder here."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def save_facts(facts: RunFacts, folder: str | Path) -> Path:
    """Write the facts as ``card.json``, from which `load_facts` makes the card again once there are more results."""
    path = Path(folder) / FACTS
    path.write_text(json.dumps(asdict(facts), indent=2, default=str) + "\n")
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
    sections = [
        _introduction(facts),
        _evaluation(facts, results),
        _training(facts, curves),
        _reproduction(facts),
        _limitations(facts, results),
        _citation(facts),
    ]
    return ModelCard(f"---\n{card_data(facts, results).to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


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
            "samples": result.samples,
            "temperature": result.temperature,
            "top_p": result.top_p,
            "max_tokens": result.max_tokens,
        },
    )


def _introduction(facts: RunFacts) -> str:
    base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_on_hub else facts.base_model
    lines = [
        f"# {facts.model_name}",
        "",
        f"{base}, trained by reinforcement learning with verifiable rewards: baseline `{facts.baseline}`, objective "
        f"`{facts.objective}`, {facts.rollouts:,} rollouts in {facts.step:,} optimizer steps, with basis-rl on "
        "[TRL](https://github.com/huggingface/trl).",
    ]
    if facts.step < facts.max_steps:
        lines += ["", f"**Not the end of its training:** step {facts.step:,} of {facts.max_steps:,}."]
    if facts.license is None:
        lines += ["", "License: not known to this run. That of the base model applies; look it up before use."]
    if facts.hub_model_id:
        lines += [
            "",
            "```python",
            "from transformers import pipeline",
            "",
            f'generate = pipeline("text-generation", model="{facts.hub_model_id}", device_map="auto")',
            'messages = [{"role": "user", "content": "What is 12 * 13?"}]',
            'print(generate(messages, max_new_tokens=1024, return_full_text=False)[0]["generated_text"])',
            "```",
        ]
    return "\n".join(lines)


def _evaluation(facts: RunFacts, results: Sequence[Result]) -> str:
    if not results:
        return "## Evaluation\n\nNot evaluated on a benchmark. The mean reward in training is no measure of one."
    rows = [
        [
            result.benchmark,
            f"{facts.base_model} (base)" if result.is_base else f"**{facts.model_name}**",
            result.metric,
            f"{100 * result.value:.1f}",
            f"{100 * result.low:.1f} to {100 * result.high:.1f}",
            f"{result.problems:,}",
            f"{result.samples:,}",
            "0 (greedy)" if result.temperature == 0 else f"{result.temperature:g}, top-p {result.top_p:g}",
            f"{result.max_tokens:,}",
            f"{100 * result.truncated:.1f}",
        ]
        for result in sorted(results, key=lambda r: (r.benchmark, r.metric, not r.is_base))
    ]
    head = ["benchmark", "model", "metric", "%", "95 % interval", "problems", "samples each", "temperature"]
    text = "Intervals are over problems: they do not tell how much another training seed would change."
    return f"## Evaluation\n\n{_table([*head, 'max tokens', 'truncated, %'], rows)}\n\n{text}"


def _training(facts: RunFacts, curves: str | None) -> str:
    parameters = ", ".join(f"{key} = {value}" for key, value in facts.baseline_parameters.items())
    rows = [
        ["baseline", f"`{facts.baseline}`" + (f" ({parameters})" if parameters else "")],
        ["objective", f"`{facts.objective}`"],
        ["reward", facts.reward],
        *([["data", facts.data]] if facts.data else []),
        ["rollouts", f"{facts.rollouts:,}"],
        ["optimizer steps", f"{facts.step:,} of {facts.max_steps:,}"],
        *([["mean reward, first and last log", _pair(facts.reward_curve)]] if facts.reward_curve else []),
        *([key, value] for key, value in facts.settings.items()),
        ["seed", str(facts.seed)],
        ["hardware", facts.hardware],
    ]
    parts = ["## Training", _table(["", ""], rows)]
    if curves:
        parts.append(f"![Reward and the baseline's error over the optimizer steps]({curves})")
    for artefact in facts.artefacts:
        made = ", ".join(
            f"{key} {value}" for key, value in artefact.provenance.items() if value not in (None, "", "{}")
        )
        parts.append(
            f"The {artefact.kind} that the baseline read: `{artefact.source}`, sha256 `{artefact.sha256}`. "
            f"Made with: {made or 'not known'}."
        )
    return "\n\n".join(parts)


def _reproduction(facts: RunFacts) -> str:
    parts = ["## Reproduction"]
    if facts.command:
        parts.append(f"```sh\n{facts.command}\n```")
    parts.append(f"```yaml\n{facts.recipe.rstrip()}\n```")
    parts.append(", ".join(f"{name} {version}" for name, version in facts.versions.items()) + ".")
    return "\n\n".join(parts)


def _limitations(facts: RunFacts, results: Sequence[Result]) -> str:
    points = [
        f"Trained for one reward, {facts.reward}, and for nothing else. What it does not look at was not checked: for "
        "a reward of the final answer, the reasoning before it.",
        "Other tasks, languages and longer outputs than in training were not looked at, nor was safety; what the base "
        "model does badly there is to be expected here too.",
        "One run with one seed.",
    ]
    if not results:
        points.append("No benchmark has been run on it.")
    return "## Limitations\n\n" + "\n".join(f"- {point}" for point in points)


def _citation(facts: RunFacts) -> str:
    entries = "\n\n".join(citations(facts.baseline, facts.objective))
    return f"## Citation\n\n```bibtex\n{entries}\n```"


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.3f}, {values[1]:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
