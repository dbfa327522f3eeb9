"""Pushes to the Hub that never end a run: each is one commit, made in the background and repeated if it fails."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, errors
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from basis_rl.run.rollouts import FOLDER

T = TypeVar("T")
_logger = logging.getLogger(__name__)
# Codes of 4xx that another attempt may fix: timeout, conflict with another commit, too early, too many requests.
_PASSING = {408, 409, 412, 425, 429}
_LONGEST_WAIT = 300.0
# Of output_dir: what is not part of the model, or not for others (a server's log names hosts and arguments).
NOT_PUSHED = ["_*", "checkpoint-*", "last-checkpoint*", "*.log", "STOP", ".*", "*/.*", "*.part", "*.old"]
NOT_PUSHED += ["previous-*", "INCOMPLETE"]
# Of a checkpoint: what only a resume needs; the rest is the model, its tokenizer and the baseline's state.
ONLY_TO_RESUME = ["optimizer*", "scheduler*", "scaler*", "rng_state*", "phase_*", "trainer_state.json", "global_step*"]
ONLY_TO_RESUME += ["baseline_module.pt", "pytorch_model_fsdp*", "latest", "zero_to_fp32.py", "entropy_ctrl_state.json"]
ONLY_TO_RESUME += ["user_content.pt", "manifest.json", "run_settings.json"]
# Written to, or deleted, while an upload may run: read when the push is made.
_CHANGING = (".json", ".jsonl", ".md", ".yaml", ".png", ".gz")


@dataclass(frozen=True, kw_only=True)
class Push:
    """One commit: `files` maps a path in the repository to the local file, or to its content.

    `checkpoint` is a local folder that must stay until the push is done, `replaces` the folder of the repository that
    becomes it: its other files are deleted. A `revision` of None is the branch of the run.
    """

    message: str
    files: Mapping[str, Path | bytes]
    replaces: str | None = None
    checkpoint: Path | None = None
    revision: str | None = None


@dataclass
class Hub:
    """A model repository, and the pushes to it: one after the other in a thread of their own.

    Each push is one commit, so that the Hub never holds a part of a model or checkpoint. A push that fails is repeated
    after `wait_first`, twice that, ... seconds, `retries` times; one that is refused (4xx) is not. Then a warning says
    what to do, and nothing is raised. `name` may lack the owner, `repo_id` is complete, `folder` is the run's, and
    `pushed` names the checkpoints that are on the Hub.
    """

    name: str
    folder: Path
    token: str | None = field(default=None, repr=False)
    private: bool | None = None
    revision: str | None = None
    retries: int = 4
    wait_first: float = 5.0
    repo_id: str | None = None
    pushed: set[str] = field(default_factory=set)
    _running: dict[Future[CommitInfo | None], Push] = field(default_factory=dict)
    # Its one thread.
    _queue: HfApi = field(default_factory=HfApi, repr=False)

    def connect(self) -> str | None:
        """Create the repository and its branch, and ask whether this token may write, before anything is spent.

        Returns ``owner/name``; None with a warning if the Hub cannot be reached, since it may be back for the pushes.

        Raises:
            ValueError: the Hub refuses it.
        """

        def probe() -> str:
            repo_id = self.prepare(self.revision)
            self._api().preupload_lfs_files(repo_id, [CommitOperationAdd("README.md", b"")], revision=self.revision)
            return repo_id

        try:
            return self._repeated(probe, 1)
        except Exception as error:
            refuse_push(self.name, error)
            _logger.warning("push_to_hub: the Hub cannot be reached (%s). Each push will try again.", one_line(error))
            return None

    def submit(self, push: Push) -> Future[CommitInfo | None]:
        """Do `push` after those that wait already. Its result is None if it failed; it raises nothing."""
        # Forget pushes that are over, so that the list does not grow with the run.
        self._running = {future: other for future, other in self._running.items() if not future.done()}
        future = self._queue.run_as_future(self._push, push)
        self._running[future] = push
        return future

    def done(self, timeout: float | None = 0.0) -> bool:
        """Whether all pushes are over, after waiting for at most `timeout` seconds (None: however long it takes)."""
        return not wait(self._running, timeout).not_done

    def in_use(self) -> list[Path]:
        """Checkpoints that are being uploaded or wait for it."""
        return [push.checkpoint for future, push in self._running.items() if push.checkpoint and not future.done()]

    def _push(self, push: Push) -> CommitInfo | None:
        try:
            info = self._repeated(lambda: self._commit(push), self.retries)
        except Exception as error:
            repo = self.repo_id or self.name
            by_hand = ["basis-rl", "push", str(self.folder), repo]
            if push.replaces:
                by_hand = ["hf", "upload", repo, str(push.checkpoint), push.replaces]
            _logger.warning(
                "push_to_hub: '%s' is NOT on the Hub: %s\nThe run continues, all files are on this machine, and later "
                "saves will be pushed. To push by hand after its end: %s",
                push.message,
                one_line(error),
                shlex.join(by_hand),
            )
            return None
        if push.replaces and push.checkpoint:
            self.pushed.add(push.checkpoint.name)
        return info

    def _repeated(self, work: Callable[[], T], retries: int) -> T:
        """What `work` returns, after at most `retries` repetitions; a refusal and the last error are raised."""
        for attempt in range(retries):
            try:
                return work()
            except Exception as error:
                if is_refusal(error):
                    raise
                pause = min(_LONGEST_WAIT, self.wait_first * 2**attempt)
                _logger.warning("push_to_hub: %s. Trying again in %g s.", one_line(error), pause)
                time.sleep(pause)
        return work()

    def _commit(self, push: Push) -> CommitInfo:
        api = self._api()
        revision = push.revision or self.revision
        repo_id = self.prepare(revision)
        operations: list[Any] = [CommitOperationAdd(path, content) for path, content in push.files.items()]
        if push.replaces is not None:
            with suppress(errors.EntryNotFoundError):
                there = api.list_repo_tree(repo_id, push.replaces, recursive=True, revision=revision)
                # The commit replaces the folder, so files of the checkpoint before must go.
                old = [entry.path for entry in there if isinstance(entry, RepoFile) and entry.path not in push.files]
                operations += map(CommitOperationDelete, old)
        return api.create_commit(repo_id, operations, commit_message=push.message, revision=revision)

    def prepare(self, revision: str | None) -> str:
        """Create the repository and the branch, if they are missing; returns ``owner/name``."""
        api = self._api()
        self.repo_id = api.create_repo(self.repo_id or self.name, private=self.private, exist_ok=True).repo_id
        if revision not in (None, "main") and not str(revision).startswith("refs/"):
            api.create_branch(self.repo_id, branch=str(revision), exist_ok=True)
        return self.repo_id

    def _api(self) -> HfApi:
        return HfApi(token=self.token, library_name="basis-rl")


def is_refusal(error: BaseException) -> bool:
    """Whether the same request would fail in the same way again."""
    if isinstance(error, errors.HfHubHTTPError):
        return 400 <= error.response.status_code < 500 and error.response.status_code not in _PASSING
    kinds = (errors.HFValidationError, errors.LocalTokenNotFoundError, errors.OfflineModeIsEnabled, FileNotFoundError)
    return isinstance(error, kinds)


def refuse_push(name: str, error: BaseException) -> None:
    """Raise ValueError with what to do if the `error` says that the Hub refuses pushes to the repository `name`."""
    if is_refusal(error) and not isinstance(error, errors.OfflineModeIsEnabled):
        raise ValueError(
            f"push_to_hub: the Hub refuses '{name}': {one_line(error)}\nLog in (`hf auth login`, or HF_TOKEN) with a "
            "token that may write there, fix hub_model_id, or push later: `basis-rl push OUTPUT_DIR OWNER/NAME`."
        ) from error


def one_line(error: BaseException) -> str:
    """An error in one line: of the Hub's errors the first line (status) and the last one (reason)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (" ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__)[:400]


def files_of_run(output_dir: Path, rollouts: bool = False) -> dict[str, Path | bytes]:
    """What is pushed of a run's folder, without its checkpoints, with the `rollouts` that it keeps only if asked."""
    found = _paths(output_dir, NOT_PUSHED if rollouts else [*NOT_PUSHED, f"{FOLDER}/*"])
    for name in [name for name in found if name.endswith(_CHANGING) or "tfevents" in name]:
        try:
            found[name] = found[name].read_bytes()
        except FileNotFoundError:
            del found[name]
    return found


def files_of_checkpoint(folder: Path, place: str | None = None) -> dict[str, Path | bytes]:
    """A checkpoint as the folder `place` of the repository; without `place` only its model, at the root."""
    if place is None:
        return _paths(folder, ONLY_TO_RESUME)
    return {f"{place}/{name}": path for name, path in _paths(folder, []).items()}


def _paths(folder: Path, ignore: list[str]) -> dict[str, Any]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: folder / name for name in filter_repo_objects(names, ignore_patterns=ignore)}
