"""Which files of a run go to the Hub, and when (``hub_strategy``)."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers.trainer_utils import HubStrategy
from trl import GRPOTrainer

from basis_rl.hub.card import FILE_NAME, RunFacts, load_facts, model_card, save_facts
from basis_rl.hub.repository import ONLY_TO_RESUME, Hub, Push, files_of_checkpoint, files_of_run, model_of_checkpoint
from basis_rl.hub.results import read_results
from basis_rl.report import plot_training
from basis_rl.trainer import checkpoint
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.facts import Record, run_facts, without_secrets
from basis_rl.trainer.preflight import on_main_process

PLOT = "training.png"
_logger = logging.getLogger(__name__)


class PublishingTrainer(GRPOTrainer):
    """What of `BasisTrainer` concerns the Hub, in place of transformers' own pushes.

    Those are not repeated, drop their errors, may come by halves, read a checkpoint while it is being deleted, and take
    the token along in ``training_args.bin``.
    """

    record: Record
    _asked_to_push = False

    def _connect(self, args: BasisConfig) -> None:
        self._hub = Hub(
            name=args.hub_model_id or Path(str(args.output_dir)).absolute().name,
            token=args.hub_token,
            private=args.hub_private_repo,
            revision=args.hub_revision,
            retries=args.hub_retries,
            wait_first=args.hub_retry_wait,
        )
        if args.push_to_hub:
            self._hub.repo_id = on_main_process(self._hub.connect)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        args: BasisConfig = self.args
        self.args: BasisConfig = without_secrets(args)  # they are saved beside the model, and pushed with it
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = args

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Has been done before the model was loaded."""
        self.hub_model_id = self._hub.repo_id
        self.push_in_progress = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not from within transformers' saving, where the checkpoint is not complete yet."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_current_push()  # transformers deletes checkpoints in there
        return super()._finalize_training(*args, **kwargs)

    def _finish_current_push(self) -> None:
        """Wait for the pushes, all ranks in short collectives, so that no timeout of the process group runs out."""
        if not (self.args.push_to_hub or self._asked_to_push):
            return  # no collective without need: at a run's end the other ranks may be gone
        while not on_main_process(lambda: self._hub.done(timeout=5.0)):
            pass

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push model, tokenizer, recipe, baseline state, log, evaluation results and card, as one commit.

        With ``hub_strategy`` ``checkpoint`` or ``all_checkpoints`` also those checkpoints whose push was skipped or has
        failed. Takes the arguments of transformers' `Trainer.push_to_hub`; those of `create_model_card` go on to it.

        Returns:
            On the main process what the Hub says of the commit (with ``blocking=False`` a future of it). None if the
            push failed, after `hub_retries` repetitions: a warning says how to push by hand, nothing is raised.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._asked_to_push = True
        self._hub.token, self._hub.private = token or self._hub.token, self._hub.private if private is None else private
        self.save_model(_internal_call=True)
        if self.is_world_process_zero() and self._hub.repo_id is None:
            self._hub.try_to_connect()  # for the name that the card tells
        self.hub_model_id = self._hub.repo_id
        self.create_model_card(kwargs.pop("model_name", None), **kwargs)
        pushed: Future[CommitInfo | None] = Future()
        if self.is_world_process_zero():
            pushed = push_run(self, commit_message or "End of training", revision)
        if blocking:
            self._finish_current_push()
        if not self.is_world_process_zero():
            return None
        return pushed.result() if blocking else pushed

    def end(self) -> None:
        """As in transformers, after the pushes that are still running."""
        self._wait_for_own_pushes()
        super().end()

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the model card and the record of the run, ``run.json``, into ``output_dir``, with a plot of the run.

        Without a recipe (`record`) the settings that differ from their defaults are shown. A card that cannot be made
        is a warning.

        Args:
            model_name: title; default the repository's or the folder's name.
            dataset_name: of the training data, if it is on the Hub.
            tags: further ones.
        """
        if not self.is_world_process_zero():
            return
        given = {tags} if isinstance(tags, str) else set(tags or [])
        given |= {*self._tag_names, *(getattr(self.model, "model_tags", None) or [])}
        try:
            folder = self.save_facts(model_name, dataset_name, given)
            facts = load_facts(folder)
            if self.args.push_to_hub and facts.reward_curve:
                plot_training(self.state.log_history, folder / PLOT, title=facts.model_name)
            write_readme(facts, folder)
        except Exception:
            _logger.warning("The model card could not be written; the run goes on.", exc_info=True)

    def save_facts(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Iterable[str] = ()
    ) -> Path:
        """Write the record of the run as it stands, ``run.json``, into ``output_dir``; returns that folder."""
        folder = Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        name = model_name or self._hub.name.split("/")[-1]
        save_facts(run_facts(self, self.record, name, dataset_name, tags), folder)
        return folder

    def _wait_for_own_pushes(self) -> None:
        """What is being uploaded would be lost with the process."""
        if self.is_world_process_zero() and not self._hub.done():
            _logger.warning("Waiting for the push to %s to end.", self._hub.url)
            self._hub.done(timeout=None)


def write_readme(facts: RunFacts, folder: Path) -> None:
    """The card from the facts and what the folder holds by now: a plot, results of evaluations."""
    plot = PLOT if (folder / PLOT).is_file() else None
    (folder / FILE_NAME).write_text(str(model_card(facts, read_results(folder), curves=plot)), encoding="utf-8")


def push_checkpoint(trainer: PublishingTrainer, folder: Path) -> None:
    """Push after a save, as ``hub_strategy`` says; `folder` is complete. Files that cannot be read are a warning.

    ``end``: nothing. ``every_save``: the model. ``checkpoint``: also the checkpoint as ``last-checkpoint``, so that a
    run can be resumed from the Hub. ``all_checkpoints``: each one under its own name. While an earlier push is still
    running, a save of the middle two kinds is passed over, as in transformers, unless ``hub_always_push`` is set or
    it is the run's last one.
    """
    args, hub, state = trainer.args, trainer._hub, trainer.state
    last = trainer.stop_on_signal.stopped or state.global_step >= state.max_steps
    every = args.hub_always_push or args.hub_strategy == HubStrategy.ALL_CHECKPOINTS or last
    if args.hub_strategy == HubStrategy.END or not (every or hub.done()):
        return
    trainer.callback_handler.on_push_begin(args, state, trainer.control)
    place = None if args.hub_strategy == HubStrategy.EVERY_SAVE else _place(args.hub_strategy, folder)
    try:
        files = {**files_of_run(Path(str(args.output_dir))), **model_of_checkpoint(folder)}
        files |= files_of_checkpoint(folder, place) if place else {}
    except OSError as error:
        _logger.warning("push_to_hub: '%s' could not be read, and is not pushed: %s", folder, error)
        return
    message, command = f"Training in progress, step {state.global_step}", checkpoint_by_hand(folder, place)
    hub.submit(Push(message=message, files=files, by_hand=command, replaces=place, checkpoint=folder))


def push_run(trainer: PublishingTrainer, message: str, revision: str | None) -> Future[CommitInfo | None]:
    """Push ``output_dir``, then the checkpoints that ``hub_strategy`` promises and that are not there yet."""
    args, hub = trainer.args, trainer._hub
    output_dir = Path(str(args.output_dir))
    try:
        files = files_of_run(output_dir)
    except OSError as error:
        _logger.warning("push_to_hub: '%s' could not be read, and is not pushed: %s", output_dir, error)
        files = {}
    future = hub.submit(Push(message=message, files=files, by_hand=by_hand(output_dir), revision=revision))
    for folder in _owed(trainer) if args.push_to_hub else []:
        place = _place(args.hub_strategy, folder)
        hub.submit(
            Push(
                message=f"{message}, {folder.name}",
                files=files_of_checkpoint(folder, place),
                by_hand=by_hand(output_dir, folder, place),
                replaces=place,
                checkpoint=folder,
                revision=revision,
            )
        )
    return future


def _owed(trainer: PublishingTrainer) -> list[Path]:
    hub, strategy = trainer._hub, trainer.args.hub_strategy
    whole = [path for path in checkpoint.checkpoints(str(trainer.args.output_dir)) if checkpoint.is_complete(path)]
    promised = {HubStrategy.CHECKPOINT: whole[-1:], HubStrategy.ALL_CHECKPOINTS: whole}.get(strategy, [])
    waiting = hub.in_use()
    return [path for path in promised if path.name not in hub.pushed and path not in waiting]


def _place(strategy: HubStrategy | str, folder: Path) -> str:
    return checkpoint.LAST if strategy == HubStrategy.CHECKPOINT else folder.name


def checkpoint_by_hand(folder: Path, place: str | None) -> str:
    """The commands that push a checkpoint: its model as the repository's, and where it goes all of it."""
    without = " ".join(f"--exclude {shlex.quote(pattern)}" for pattern in ONLY_TO_RESUME)
    whole = f" && hf upload {{repo}} {shlex.quote(str(folder))} {place}" if place else ""
    return f"hf upload {{repo}} {shlex.quote(str(folder))} . {without}{whole}"


def by_hand(output_dir: Path, folder: Path | None = None, place: str | None = None) -> str:
    """The command that pushes the same; ``{repo}`` stands for the repository."""
    run = f"basis-rl push {output_dir} {{repo}}"
    return f"{run} && hf upload {{repo}} {folder} {place}" if place else run
