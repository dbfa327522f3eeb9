"""Which files of a run go to the Hub, and when (``hub_strategy``)."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers.trainer_utils import HubStrategy

from basis_rl.report import plot_training
from basis_rl.report.card import FACTS, FILE_NAME, RunFacts, load_facts, model_card, save_facts
from basis_rl.report.results import read_results
from basis_rl.run import checkpoint
from basis_rl.run.hub import ONLY_TO_RESUME, Hub, Push, files_of_checkpoint, files_of_run, model_of_checkpoint
from basis_rl.run.progress import PLOT
from basis_rl.run.ranks import on_main_process
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.facts import run_facts

_logger = logging.getLogger(__name__)


class Publisher:
    """What goes to the Hub during a run and at its end, in place of transformers' own pushes.

    Those are not repeated, drop their errors, may come by halves, read a checkpoint while it is being deleted, and take
    the token along in ``training_args.bin``.

    Args:
        run: whose files they are.
        args: its settings.

    Raises:
        ValueError: ``push_to_hub`` is set, and the Hub refuses.
    """

    def __init__(self, run: Any, args: BasisConfig) -> None:
        self.run = run
        self.asked = args.push_to_hub
        self.hub = Hub(
            name=args.hub_model_id or Path(str(args.output_dir)).absolute().name,
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
            return  # no collective without need: at a run's end the other ranks may be gone
        while not on_main_process(lambda: self.hub.done(timeout=5.0)):
            pass

    def wait_for_own(self) -> None:
        """Wait for this rank's pushes: what is being uploaded would be lost with the process."""
        if self.run.accelerator.is_main_process and not self.hub.done():
            _logger.warning("Waiting for the push to %s to end.", self.hub.url)
            self.hub.done(timeout=None)

    def introduce(self, token: str | None, private: bool | None) -> str | None:
        """Take what a push by hand was given; the repository's name, as far as the Hub tells it."""
        self.asked = True
        self.hub.token, self.hub.private = token or self.hub.token, self.hub.private if private is None else private
        if self.run.accelerator.is_main_process and self.hub.repo_id is None:
            self.hub.try_to_connect()
        return self.hub.repo_id

    def save_facts(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Iterable[str] = ()
    ) -> Path:
        """Write the record of the run as it stands, ``run.json``, into ``output_dir``; returns that folder."""
        folder = Path(str(self.run.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        name = model_name or self.hub.name.split("/")[-1]
        save_facts(run_facts(self.run, self.run.record, name, dataset_name, tags), folder)
        return folder

    def write_card(self, model_name: str | None, dataset_name: str | None, tags: Iterable[str]) -> None:
        """Write the model card and the record of the run; before a push, a plot too. What fails is a warning."""
        try:
            folder = self.save_facts(model_name, dataset_name, tags)
            facts = load_facts(folder)
            if self.run.args.push_to_hub and facts.reward_curve:
                plot_training(self.run.state.log_history, folder / PLOT, title=facts.model_name)
            write_readme(facts, folder)
        except Exception:
            _logger.warning("The model card could not be written; the run continues.", exc_info=True)

    def is_due(self, is_last: bool) -> bool:
        """Whether a save is pushed. With ``hub_strategy`` ``end`` none is.

        While an earlier push is still running, one of ``every_save`` and ``checkpoint`` is skipped, as in
        transformers, unless ``hub_always_push`` is set or it is the run's last one.
        """
        args = self.run.args
        every = args.hub_always_push or args.hub_strategy == HubStrategy.ALL_CHECKPOINTS or is_last
        return args.hub_strategy != HubStrategy.END and (every or self.hub.done())

    def push_checkpoint(self, folder: Path) -> None:
        """Push a save, as ``hub_strategy`` says; `folder` is complete. Files that cannot be read are a warning.

        ``every_save``: the model. ``checkpoint``: also the checkpoint as ``last-checkpoint``, so that a run can be
        resumed from the Hub. ``all_checkpoints``: each one under its own name.
        """
        args = self.run.args
        place = None if args.hub_strategy == HubStrategy.EVERY_SAVE else _place(args.hub_strategy, folder)
        try:
            files = {**files_of_run(Path(str(args.output_dir))), **model_of_checkpoint(folder)}
            files |= files_of_checkpoint(folder, place) if place else {}
        except OSError as error:
            _logger.warning("push_to_hub: '%s' could not be read, and is not pushed: %s", folder, error)
            return
        message, command = f"Training in progress, step {self.run.state.global_step}", checkpoint_by_hand(folder, place)
        self.hub.submit(Push(message=message, files=files, by_hand=command, replaces=place, checkpoint=folder))

    def push_run(self, message: str, revision: str | None) -> Future[CommitInfo | None]:
        """Push ``output_dir``, then the checkpoints that ``hub_strategy`` requires and that were not pushed yet."""
        output_dir = Path(str(self.run.args.output_dir))
        try:
            files = files_of_run(output_dir)
        except OSError as error:
            _logger.warning("push_to_hub: '%s' could not be read, and is not pushed: %s", output_dir, error)
            files = {}
        future = self.hub.submit(Push(message=message, files=files, by_hand=by_hand(output_dir), revision=revision))
        self._push_owed(message, revision)
        return future

    def catch_up(self) -> None:
        """Of a resumed run, on the main process: push the checkpoints whose push was cut off with the process before.

        The training would delete them (``save_total_limit``). By its manifest each one that is there is known.
        """
        strategy = self.run.args.hub_strategy
        owed = {f"{_place(strategy, folder)}/{checkpoint.MANIFEST}": folder for folder in self._owed()}
        if self.run.args.push_to_hub and owed:
            there = self.hub.has({path: folder / checkpoint.MANIFEST for path, folder in owed.items()})
            self.hub.pushed |= {owed[path].name for path in there}
            self._push_owed("Training resumed", None)

    def _push_owed(self, message: str, revision: str | None) -> None:
        args = self.run.args
        for folder in self._owed() if args.push_to_hub else []:
            place = _place(args.hub_strategy, folder)
            self.hub.submit(
                Push(
                    message=f"{message}, {folder.name}",
                    files=files_of_checkpoint(folder, place),
                    by_hand=by_hand(Path(str(args.output_dir)), folder, place),
                    replaces=place,
                    checkpoint=folder,
                    revision=revision,
                )
            )

    def _owed(self) -> list[Path]:
        args, hub = self.run.args, self.hub
        whole = [path for path in checkpoint.checkpoints(str(args.output_dir)) if checkpoint.is_complete(path)]
        promised = {HubStrategy.CHECKPOINT: whole[-1:], HubStrategy.ALL_CHECKPOINTS: whole}.get(args.hub_strategy, [])
        waiting = hub.in_use()
        return [path for path in promised if path.name not in hub.pushed and path not in waiting]


def is_finished(output_dir: Path) -> bool:
    """Whether a folder holds a run that was trained to its end, with its model saved to the last byte."""
    record = output_dir / FACTS
    if checkpoint.was_cut_off(output_dir) or not record.is_file():
        return False
    model = [*output_dir.glob("*.safetensors"), *output_dir.glob("*.bin")]
    return bool(model) and bool(json.loads(record.read_text()).get("finished"))


def write_readme(facts: RunFacts, folder: Path) -> None:
    """The card from the facts and what the folder holds by now: a plot, results of evaluations."""
    plot = PLOT if (folder / PLOT).is_file() else None
    (folder / FILE_NAME).write_text(str(model_card(facts, read_results(folder), curves=plot)), encoding="utf-8")


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
