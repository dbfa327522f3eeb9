"""The record of a run, read off its trainer: what the model card says of it, and what a comparison needs."""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, hf_hub_download

from basis_rl.baselines import BASELINES, Baseline
from basis_rl.clusters import PromptClusters
from basis_rl.report.card import Artefact, License, RunFacts, is_hub_id
from basis_rl.run.artefacts import versions
from basis_rl.run.redact import redact
from basis_rl.samplers.registry import sampler_name
from basis_rl.trainer.config import BasisConfig, plain_values
from basis_rl.values import ValueTable
from basis_rl.values.provenance import model_revision, reward_identity

_PACKAGES = ["basis-rl", "trl", "transformers", "torch", "accelerate", "datasets", "math-verify", "huggingface_hub"]
_KINDS: dict[type, str] = {ValueTable: "value table", PromptClusters: "prompt codebook"}


@dataclass
class Record:
    """What is known of a run besides its trainer, and what is looked up once.

    Attributes:
        model: Hub id or folder that the training started from.
        objective: name of the policy objective.
        commit: its commit on the Hub.
        online: whether the Hub may be asked for the base model's license.
        recipe: YAML of the recipe; None shows the settings that are not the default.
        command: that started the run.
        dataset_name: of the recipe.
        license: of the trained model, if the user has said so.
    """

    model: str
    objective: str
    commit: str | None = None
    online: bool = False
    recipe: str | None = None
    command: str | None = None
    dataset_name: str | None = None
    license: str | None = None

    @classmethod
    def of(cls, config: Any, args: BasisConfig, objective: str) -> Record:
        """The record of a run that has just loaded a model with this configuration."""
        model, commit = str(getattr(config, "_name_or_path", "") or ""), getattr(config, "_commit_hash", None)
        return cls(model, objective, commit=commit, online=args.push_to_hub, license=args.model_license)

    @cached_property
    def revision(self) -> str | None:
        """Of the base model. Looked up once: its folder may be overwritten later."""
        return model_revision(self.model, self.commit) if self.model else None

    @cached_property
    def found_license(self) -> License | None:
        """The one that was given, or that of the base model's card; None if neither is known."""
        if self.license:
            return License(id=self.license)
        try:
            if Path(self.model).is_dir():
                card = ModelCard.load(Path(self.model) / "README.md")
            else:
                card = ModelCard.load(hf_hub_download(self.model, "README.md", local_files_only=not self.online))
        except Exception:  # no card, no such model, no network, no front matter: the card then says so
            return None
        data = card.data
        if not data.license:
            return None
        link = data.license_link
        if link and "://" not in link:  # a file of the base model's repository
            link = None if Path(self.model).is_dir() else f"https://huggingface.co/{self.model}/blob/main/{link}"
        return License(id=data.license, name=data.license_name, link=link)


def run_facts(run: Any, record: Record, model_name: str, dataset_name: str | None, tags: Iterable[str]) -> RunFacts:
    """The facts of a run as it stands."""
    args, state, processes = run.args, run.state, run.accelerator.num_processes
    rewards = [row["reward"] for row in state.log_history if row.get("reward") is not None]
    ended = any("train_runtime" in row for row in state.log_history) or 0 < state.max_steps <= state.global_step
    dataset_name = dataset_name or record.dataset_name
    on_hub = bool(record.model) and not Path(record.model).is_dir()
    extras = [*(["vllm"] if args.use_vllm else []), *(["deepspeed"] if run.is_deepspeed_enabled else [])]
    return RunFacts(
        model_name=model_name,
        hub_model_id=run.hub_model_id,
        base_model=record.model if on_hub else Path(record.model).name or "a model built in memory",
        base_on_hub=on_hub,
        base_revision=record.revision,
        license=record.found_license,
        datasets=[dataset_name] if dataset_name and is_hub_id(dataset_name) else [],
        data=_data(run.train_dataset, dataset_name),
        baseline=baseline_name(run.baseline),
        baseline_parameters={key: _shown(value) for key, value in run.baseline.parameters.items()},
        sampler=sampler_name(run.sampler),
        sampler_parameters={key: _shown(value) for key, value in run.sampler.parameters.items()},
        artefacts=artefacts_of(run.baseline),
        objective=record.objective,
        reward=reward_identity(run._functions, args.reward_weights),
        settings=_settings(args),
        compared={
            "num_generations": args.num_generations,
            "rollouts_per_batch": args.generation_batch_size,
            "rollouts_per_update": args.per_device_train_batch_size * args.gradient_accumulation_steps * processes,
            "learning_rate": args.learning_rate,
        },
        step=state.global_step,
        max_steps=max(state.max_steps, state.global_step),
        rollouts=run.spending.rollouts,
        reward_curve=(rewards[0], rewards[-1]) if rewards else None,
        seed=args.seed,
        hardware=_hardware(processes, args),
        versions={"Python": platform.python_version(), **versions(*_PACKAGES, *extras)},
        recipe=record.recipe or yaml.safe_dump(changed_settings(args), sort_keys=False),
        command=record.command,
        library="peft" if is_peft_model(run.model) else "transformers",
        tags=["generated_from_trainer", *sorted(tags)],
        finished=ended and not run.stop_on_signal.stopped,
    )


def baseline_name(baseline: Baseline) -> str:
    """Its registered name, or its class."""
    return next((key for key, cls in BASELINES.items() if cls is type(baseline)), type(baseline).__name__)


def artefacts_of(baseline: Baseline) -> list[Artefact]:
    """Value tables and codebooks among the baseline's attributes."""
    found = []
    for value in vars(baseline).values():
        if type(value) in _KINDS:
            kept = {key: entry for key, entry in value.provenance.items() if not isinstance(entry, (list, dict))}
            source, kind = _public_path(value.source), _KINDS[type(value)]
            rollouts = kept.get("rollouts", getattr(value, "num_rollouts", 0))
            given = {"kind": kind, "source": source, "sha256": value.digest, "rollouts": rollouts}
            found.append(Artefact(**given, provenance=redact(kept)))
    return found


def changed_settings(args: BasisConfig, *, defaults: bool = False) -> dict[str, Any]:
    """The settings that differ from their defaults (or all, with `defaults`) and can be written in YAML, without
    secrets."""
    changed = {}
    for entry in dataclasses.fields(args):
        value = getattr(args, entry.name, None)
        value = value.value if isinstance(value, Enum) else value
        plain = isinstance(value, (bool, int, float, str, list, dict)) and not entry.name.startswith("_")
        if plain and (defaults or value != _default(entry)):
            changed[entry.name] = int(value) if type(value) not in (bool, float) and isinstance(value, int) else value
    shown: dict[str, Any] = plain_values(redact(changed))
    return {
        key: _public_path(value) if key.endswith("_dir") and type(value) is str else value
        for key, value in shown.items()
    }


def without_secrets(args: BasisConfig) -> BasisConfig:
    """A copy of the arguments that may be saved and pushed: no token in it."""
    public, kept = copy.copy(args), redact(vars(args))
    plain = {key: kept.get(key) for key, value in vars(args).items() if type(value) in (str, dict)}
    public.__dict__.update(plain)
    return public


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default is not dataclasses.MISSING:
        return entry.default.value if isinstance(entry.default, Enum) else entry.default
    return entry.default_factory() if entry.default_factory is not dataclasses.MISSING else None


def _shown(value: Any) -> str:
    if type(value) in _KINDS:
        return _public_path(value.source)
    if isinstance(value, dict):
        return f"a mapping of {len(value)} entries"
    return _public_path(str(value)) if isinstance(value, Path) else str(redact(value))[:100]


def _public_path(path: str) -> str:
    """A path without the folders above: those name people and machines. A Hub id stays."""
    return Path(path).name if os.path.isabs(path) or path.startswith("~") else path


def _data(dataset: Any, name: str | None) -> str:
    size = f"{len(dataset):,} problems" if hasattr(dataset, "__len__") else "a stream of problems"
    return f"{size} of {_public_path(name)}" if name else size


def _settings(args: BasisConfig) -> dict[str, str]:
    kl = f"{args.kl_estimator} in the {args.kl_placement}, coefficient {args.beta:g}"
    if args.kl_estimator == "k3" and args.kl_placement == "loss":
        kl += ", times the ratio (use_bias_correction_kl)" if args.use_bias_correction_kl else ", not times the ratio"
    prompts = args.generation_batch_size // args.num_generations
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return {
        "KL to the reference": kl if args.beta != 0 else "none",
        "generation batch": f"{prompts} prompts x {args.num_generations} rollouts",
        "sampling": f"temperature {args.temperature:g}, top-p {args.top_p:g}",
        "completion": f"at most {args.max_completion_length} tokens",
        "learning rate": f"{args.learning_rate:g}, {scheduler}",
        "precision": precision,
    }


def _hardware(processes: int, args: BasisConfig) -> str:
    if torch.cuda.is_available() and not args.use_cpu:
        return f"{processes} x {torch.cuda.get_device_name(0)}"
    return f"{processes} process(es) on a CPU ({platform.machine()}, {os.cpu_count()} cores)"
