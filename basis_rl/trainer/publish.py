"""What a run tells about itself (``run.json``, model card), and which of its files go to the Hub, and when."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo, ModelCard, hf_hub_download
from transformers.trainer_utils import HubStrategy

from basis_rl.baselines import Baseline, baseline_name
from basis_rl.clusters import PromptClusters
from basis_rl.report import plot_training
from basis_rl.report.card import write_card
from basis_rl.run import checkpoint
from basis_rl.run.artefacts import versions
from basis_rl.run.hub import Hub, Push, files_of_checkpoint, files_of_run
from basis_rl.run.progress import PLOT
from basis_rl.run.ranks import on_main_process
from basis_rl.run.record import RunInfo, is_hub_id, save_run_info
from basis_rl.run.redact import public_path, redact
from basis_rl.run.run_lock import check_place
from basis_rl.samplers import sampler_name
from basis_rl.trainer.config import BasisConfig, changed_settings
from basis_rl.values import ValueTable
from basis_rl.values.provenance import model_revision, reward_identity

_logger = logging.getLogger(__name__)
_PACKAGES = ["basis-rl", "trl", "transformers", "torch", "accelerate", "datasets", "math-verify", "huggingface_hub"]
_KINDS: dict[type, str] = {ValueTable: "value table", PromptClusters: "prompt codebook"}


class Publisher:
    """What goes to the Hub during a run and at its end, in place of transformers' own pushes.

    Transformers does not repeat a push, drops its errors, may push a part of a checkpoint or one that is being deleted,
    and pushes the token within ``training_args.bin``.

    Raises:
        ValueError: ``push_to_hub`` is set, and the Hub refuses.
    """

    def __init__(self, args: BasisConfig) -> None:
        self.args = args
        self.folder = Path(str(args.output_dir))
        self.asked = args.push_to_hub
        self.hub = Hub(
            name=args.hub_model_id or self.folder.absolute().name,
            folder=self.folder,
            token=args.hub_token,
            private=args.hub_private_repo,
            revision=args.hub_revision,
            retries=args.hub_retries,
            wait_first=args.hub_retry_wait,
        )
        if args.push_to_hub:
            self.hub.repo_id = on_main_process(self.hub.connect)

    def finish(self) -> None:
        """Wait for the pushes, all ranks in short collectives, so that no timeout of the process group runs out."""
        if not self.asked:
            # No collective without need: at a run's end the other ranks may be gone.
            return
        while not on_main_process(lambda: self.hub.done(timeout=5.0)):
            pass

    def wait_for_own(self) -> None:
        """Wait for this rank's pushes: what is being uploaded would be lost with the process."""
        if PartialState().is_main_process and not self.hub.done():
            _logger.warning("Waiting for the push to %s to end.", self.hub.repo_id or self.hub.name)
            self.hub.done(timeout=None)

    def set_repo(self, token: str | None, private: bool | None) -> str | None:
        """Use the token and visibility of a push by hand; returns the repository's name if the Hub tells it."""
        self.asked = True
        self.hub.token = token or self.hub.token
        self.hub.private = self.hub.private if private is None else private
        if PartialState().is_main_process and self.hub.repo_id is None:
            # The push itself reports what is wrong.
            with suppress(Exception):
                self.hub.prepare(self.hub.revision)
        return self.hub.repo_id

    def write_card(self, info: Callable[[], RunInfo], log: Sequence[Mapping[str, Any]]) -> None:
        """Write ``run.json`` and the model card; before a push, a plot of the `log` as well. A failure is a warning,
        unless the folder is gone (`FolderLost`)."""
        try:
            known = info()
            save_run_info(known, self.folder)
            if self.args.push_to_hub and known.reward_curve:
                plot_training(log, self.folder / PLOT, title=known.model_name)
            write_card(known, self.folder)
        except Exception:
            # A run whose folder is gone must not continue as if only the card had failed.
            check_place(self.folder)
            _logger.warning("The model card could not be written; the run continues.", exc_info=True)

    def is_due(self, is_last: bool) -> bool:
        """Whether a save is pushed. With ``hub_strategy`` ``end`` none is.

        While an earlier push is still running, one of ``every_save`` and ``checkpoint`` is skipped, as in
        transformers, unless ``hub_always_push`` is set or it is the run's last one.
        """
        strategy = self.args.hub_strategy
        every = self.args.hub_always_push or strategy == HubStrategy.ALL_CHECKPOINTS or is_last
        return strategy != HubStrategy.END and (every or self.hub.done())

    def push_checkpoint(self, folder: Path, step: int) -> None:
        """Push a save, as ``hub_strategy`` says; `folder` is complete. Files that cannot be read are a warning.

        ``every_save``: the model. ``checkpoint``: also the checkpoint as ``last-checkpoint``, so that a run can be
        resumed from the Hub. ``all_checkpoints``: each one under its own name.
        """
        place = self._place(folder)
        try:
            files = files_of_run(self.folder, self.args.push_rollouts) | files_of_checkpoint(folder)
            if place is not None:
                files |= files_of_checkpoint(folder, place)
        except OSError as error:
            _logger.warning("push_to_hub: '%s' could not be read, and is not pushed: %s", folder, error)
            return
        message = f"Training in progress, step {step}"
        self.hub.submit(Push(message=message, files=files, replaces=place, checkpoint=folder))

    def push_run(self, message: str, revision: str | None) -> Future[CommitInfo | None]:
        """Push ``output_dir``, then the checkpoints that ``hub_strategy`` requires and that were not pushed yet."""
        try:
            files = files_of_run(self.folder, self.args.push_rollouts)
        except OSError as error:
            _logger.warning("push_to_hub: '%s' could not be read, and is not pushed: %s", self.folder, error)
            files = {}
        future = self.hub.submit(Push(message=message, files=files, revision=revision))
        self._push_owed(message, revision)
        return future

    def catch_up(self) -> None:
        """On the main process of a resumed run: push the checkpoints whose push ended when the process before was
        killed. The training would delete them (``save_total_limit``).

        The client does not upload again what the Hub has already.
        """
        self._push_owed("Training resumed", None)

    def _push_owed(self, message: str, revision: str | None) -> None:
        for folder in self._owed():
            place = self._place(folder)
            push = Push(
                message=f"{message}, {folder.name}",
                files=files_of_checkpoint(folder, place),
                replaces=place,
                checkpoint=folder,
                revision=revision,
            )
            self.hub.submit(push)

    def _owed(self) -> list[Path]:
        """The complete checkpoints that ``hub_strategy`` requires on the Hub, and that are neither there nor queued."""
        if not self.args.push_to_hub:
            return []
        whole = [path for path in checkpoint.checkpoints(str(self.folder)) if checkpoint.is_complete(path)]
        required = {HubStrategy.CHECKPOINT: whole[-1:], HubStrategy.ALL_CHECKPOINTS: whole}
        waiting = self.hub.in_use()
        promised = required.get(self.args.hub_strategy, [])
        return [path for path in promised if path.name not in self.hub.pushed and path not in waiting]

    def _place(self, folder: Path) -> str | None:
        """The folder of the repository that a checkpoint becomes; None if it is not pushed as a whole."""
        places = {HubStrategy.CHECKPOINT: checkpoint.LAST, HubStrategy.ALL_CHECKPOINTS: folder.name}
        return places.get(self.args.hub_strategy)


@dataclass
class Origin:
    """Where a run comes from: what the card says besides what the trainer itself holds.

    `model` is the Hub id (with the `commit`) or folder that the training started from, `objective` the name of the
    policy objective. `online` tells whether the Hub may be asked for the base model's license, `license` is what the
    user has said. Without a `recipe` (YAML), the card shows the settings that are not at their defaults. `first` is the
    `base` that the run began with, if it was resumed with another one because nothing needed it any more.
    """

    model: str
    objective: str
    commit: str | None = None
    online: bool = False
    license: str | None = None
    recipe: str | None = None
    command: str | None = None
    dataset_name: str | None = None
    first: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Any, args: BasisConfig, objective: str) -> Origin:
        """The origin of a run that has just loaded a model with this configuration."""
        model = str(getattr(config, "_name_or_path", "") or "")
        commit = getattr(config, "_commit_hash", None)
        return cls(model, objective, commit, args.push_to_hub, args.model_license)

    @property
    def base(self) -> dict[str, Any]:
        """Name and revision of the base model."""
        on_hub = bool(self.model) and not Path(self.model).is_dir()
        return {
            "base_model": self.model if on_hub else Path(self.model).name or "a model built in memory",
            "base_on_hub": on_hub,
            "base_revision": self.revision,
        }

    def base_model(self) -> dict[str, Any]:
        """The facts of the base model: name, revision, license."""
        first = self.first or self.base
        return {**first, "license": self.found_license if self.license or first == self.base else None}

    @cached_property
    def revision(self) -> str | None:
        """Of the base model. Looked up once: its folder may be overwritten later."""
        return model_revision(self.model, self.commit) if self.model else None

    @cached_property
    def found_license(self) -> dict[str, str | None] | None:
        """The one that was given, or that of the base model's card; None if neither is known."""
        if self.license:
            return {"license": self.license}
        card = Path(self.model) / "README.md"
        is_local = card.parent.is_dir()
        try:
            if not is_local:
                card = Path(hf_hub_download(self.model, "README.md", local_files_only=not self.online))
            data = ModelCard.load(card).data
        # No card, no such model, no network, no front matter: the card then says so.
        except Exception:
            return None
        link = data.license_link
        # A file of the base model's repository.
        if link and "://" not in link:
            link = None if is_local else f"https://huggingface.co/{self.model}/blob/main/{link}"
        found = {"license": data.license, "license_name": data.license_name, "license_link": link}
        return found if data.license else None


def run_info(run: Any, model_name: str, dataset_name: str | None = None, tags: Iterable[str] = ()) -> RunInfo:
    """What ``run.json`` and the card tell about `run`, a `BasisTrainer`, at this step; see `create_model_card`."""
    args = run.args
    state = run.state
    processes = run.accelerator.num_processes
    rewards = [row["reward"] for row in state.log_history if row.get("reward") is not None]
    # A run that was continued has the row of its earlier end, too.
    ends = [row["step"] for row in state.log_history if "train_runtime" in row]
    ended = state.global_step in ends or 0 < state.max_steps <= state.global_step
    dataset_name = dataset_name or run.origin.dataset_name
    size = f"{len(run.train_dataset):,} problems" if hasattr(run.train_dataset, "__len__") else "a stream of problems"
    deepspeed = getattr(run.accelerator.state, "deepspeed_plugin", None) is not None
    extras = [*(["vllm"] if args.use_vllm else []), *(["deepspeed"] if deepspeed else [])]
    on_gpu = torch.cuda.is_available() and not args.use_cpu
    on_cpu = f"{processes} process(es) on a CPU ({platform.machine()}, {os.cpu_count()} cores)"
    return RunInfo(
        model_name=model_name,
        hub_model_id=run.hub_model_id,
        **run.origin.base_model(),
        datasets=[dataset_name] if dataset_name and is_hub_id(dataset_name) else [],
        data=f"{size} of {public_path(dataset_name)}" if dataset_name else size,
        baseline=baseline_name(run.baseline),
        baseline_parameters={key: _shown(value) for key, value in run.baseline.parameters.items()},
        sampler=sampler_name(run.sampler),
        sampler_parameters={key: _shown(value) for key, value in run.sampler.parameters.items()},
        artefacts=artefacts_of(run.baseline),
        objective=run.origin.objective,
        reward=reward_identity(run.functions, args.reward_weights),
        settings=_settings(args),
        compared=_compared(args, processes),
        step=state.global_step,
        max_steps=max(state.max_steps, state.global_step),
        rollouts=run.spending.rollouts,
        reward_curve=(rewards[0], rewards[-1]) if rewards else None,
        seed=args.seed,
        hardware=f"{processes} x {torch.cuda.get_device_name(0)}" if on_gpu else on_cpu,
        versions={"Python": platform.python_version(), **versions(*_PACKAGES, *extras)},
        recipe=run.origin.recipe or yaml.safe_dump(changed_settings(args), sort_keys=False),
        command=run.origin.command,
        library="peft" if is_peft_model(run.model) else "transformers",
        tags=["generated_from_trainer", *sorted(tags)],
        finished=ended and not run.stop_on_signal.stopped,
    )


def artefacts_of(baseline: Baseline) -> list[dict[str, Any]]:
    """Value tables and codebooks among the baseline's attributes."""
    found = []
    # Two attributes may be one object.
    for value in {id(each): each for each in vars(baseline).values()}.values():
        if type(value) in _KINDS:
            counted = int(value.counts(value.prompt_ids).sum()) if isinstance(value, ValueTable) else 0
            kept = {key: entry for key, entry in value.provenance.items() if not isinstance(entry, (list, dict))}
            artefact = {
                "kind": _KINDS[type(value)],
                "source": public_path(value.source),
                "sha256": value.digest,
                "provenance": redact(kept),
                "rollouts": kept.get("rollouts", counted),
            }
            found.append(artefact)
    return found


def _shown(value: Any) -> str:
    if type(value) in _KINDS:
        return public_path(value.source)
    if isinstance(value, dict):
        return f"a mapping of {len(value)} entries"
    if isinstance(value, Path):
        return public_path(str(value))
    # An object has another address in each process, which would tell the seeds of one setting apart.
    return re.sub(" at 0x[0-9a-f]+", "", str(redact(value)))[:100]


def _compared(args: BasisConfig, processes: int) -> dict[str, float]:
    return {
        "num_generations": args.num_generations,
        "rollouts_per_batch": args.generation_batch_size,
        "rollouts_per_update": args.per_device_train_batch_size * args.gradient_accumulation_steps * processes,
        "learning_rate": args.learning_rate,
    }


def _settings(args: BasisConfig) -> dict[str, str]:
    kl = f"{args.kl_estimator} in the {args.kl_placement}, coefficient {args.beta:g}"
    if args.kl_estimator == "k3" and args.kl_placement == "loss":
        kl += ", times the ratio (use_bias_correction_kl)" if args.use_bias_correction_kl else ", not times the ratio"
    scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return {
        "KL to the reference": kl if args.beta != 0 else "none",
        "generation batch": f"{args.prompts_per_batch} prompts x {args.group_size} rollouts",
        "sampling": f"temperature {args.temperature:g}, top-p {args.top_p:g}",
        "completion": f"at most {args.max_completion_length} tokens",
        "learning rate": f"{args.learning_rate:g}, {scheduler}",
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }
