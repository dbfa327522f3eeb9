"""Rollouts that stream: drawn one by one by a server that always has work, and trained on when a batch is there."""

from __future__ import annotations

import copy
import json
import logging
import math
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from basis_rl.functional.pacing import batches_left, next_batch
from basis_rl.run.errors import RequestRefused, RewardFailed, RolloutError
from basis_rl.samplers import Draw
from basis_rl.trainer.conversation import Conversation, Environments, StreamedRollout
from basis_rl.trainer.grading import Entry, Grader

# Seconds between two checks for a batch, and between two lines that say why it is not there.
_POLL = 0.2
_TELL = 30.0
_MOST_REQUESTS = 4096
# Seconds, at most, until the requests of a run that has ended have ended, too.
_FAREWELL = 5.0
# Where a rollout is, by the phase of its conversation.
_WHERE = {"environment": "in environments", "server": "at server", "tools": "in tools", "reward": "in grading"}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How far rollouts may run ahead of the training.

    Attributes:
        max_staleness: optimizer steps, at most, between the weights with which a rollout began and those it trains.
        batches: generation batches that are under way while one is trained on.
        generate_every: micro-batches that a generation batch serves.
        accumulation: micro-batches of an optimizer step.
        seconds: that one rollout may take, with tools, environment and grading.
        kind: what makes rollouts and rewards: those of another one do not fit this run.
    """

    max_staleness: int
    batches: int
    generate_every: int
    accumulation: int
    seconds: float
    kind: str = ""


@dataclass(eq=False)
class Group:
    """The rollouts of one prompt.

    Attributes:
        block, place: which of the run's draws the prompt comes from, and where it stands in it.
        row: of the dataset.
        rollouts: G of them; None while one is under way.
        step: optimizer step of the weights with which they began.
        era: recoveries of the server before they began.
        began: when that was.
        ended: whether all are scored.
        proven: whether the server is known to have had the right weights all along.
        conversations: that are under way, a new list each time they begin: what others bring is not used. Empty where
            they have not begun.
        entry: what the grader was given.
    """

    block: int
    place: int
    row: Mapping[str, Any]
    rollouts: list[StreamedRollout | None]
    step: int = 0
    era: int = -1
    began: float = 0.0
    ended: bool = False
    proven: bool = False
    conversations: list[Conversation] = field(default_factory=list)
    entry: Entry | None = None


class Load:
    """Who waits for whom, from one generation batch to the next; the first one counts from its first request on."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self.requests = 0
        self._idle = 0.0
        self._idle_since: float | None = None
        self._began: float | None = None
        self._tokens = 0
        # Of the batch that is trained on; there is none at first.
        self._trained: int | None = None
        self.waited = 0.0

    def count(self, tokens: int) -> None:
        """The server has drawn so many tokens."""
        with self._changing:
            self._tokens += tokens

    @contextmanager
    def request(self) -> Iterator[None]:
        """Within it the server has something to do."""
        with self._changing:
            self.requests += 1
            self._began = self._began or time.monotonic()
            if self._idle_since is not None:
                self._idle += time.monotonic() - self._idle_since
                self._idle_since = None
        try:
            yield
        finally:
            with self._changing:
                self.requests -= 1
                if self.requests == 0:
                    self._idle_since = time.monotonic()

    def take(self, tokens: int) -> dict[str, float]:
        """Metrics since the last call. Of the two sides' speeds, each is over the seconds in which it did not wait.

        Args:
            tokens: of the batch that is trained on from now on.
        """
        now = time.monotonic()
        with self._changing:
            if self._idle_since is not None:
                self._idle += now - self._idle_since
                self._idle_since = now
            span = max(1e-3, now - (self._began or now))
            idle = self._idle
            self._idle = 0.0
            drawn = self._tokens
            self._tokens = 0
            self._began = now
        waited = self.waited
        self.waited = 0.0
        trained = self._trained
        self._trained = tokens
        found = {
            "rollout/waited": waited,
            "rollout/waited_share": min(1.0, waited / span),
            "rollout/server_waited": idle,
            "rollout/server_waited_share": min(1.0, idle / span),
            "rollout/server_tokens_per_second": drawn / max(1e-3, span - idle),
        }
        if trained is not None:
            found["rollout/trainer_tokens_per_second"] = trained / max(1e-3, span - waited)
        return found


class Stream:
    """Groups that are under way or have ended, on the main process, which alone asks the server for them.

    Every rollout has a thread of its own: it waits for the server, for tools and for reward functions, and holds up no
    other one. Groups are used once all their rollouts are scored; which ones, and when a batch has to wait, is told by
    `basis_rl.functional.pacing`. None is dropped. A rollout that takes too long or whose environment fails is used
    without a reward. After the server had to be recovered, whatever it may have drawn with wrong weights is drawn
    again: all that began before, and was not proven by then. A server that was started again is never taken for the
    one before (`TrainingClient.prove`), so whatever ended before a proof was asked for has the right weights.

    Args:
        trainer: the run; conversations are TRL's own, with its state.
        pace: of the stream.
    """

    def __init__(self, trainer: Any, pace: Pace) -> None:
        self.engine = trainer.vllm_generation
        self.grader = Grader(trainer)
        self.pace = pace
        # Groups of a generation batch, and rollouts of a group.
        self.size: int = trainer.args.prompts_per_batch
        self.num_generations: int = trainer.args.num_generations
        self._trainer = trainer
        # Padding and truncation, which other threads may set, would change a tokenizer that is in use.
        self._tokenizer = copy.deepcopy(trainer.processing_class)
        # Greedy rollouts and evaluations change the engine's own for a while.
        self._sampling = self.engine.sampling()
        self._environments = Environments(trainer.environment_factories)
        self._changed = threading.Condition()
        self._groups: list[Group] = []
        self._ended: list[Group] = []
        self._taken: dict[int, list[Group]] = {}
        # What threads have met, and recoveries of the server before their rollouts began.
        self._failures: list[tuple[int, Exception]] = []
        self._load = Load()
        # Each request needs a file descriptor.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._slots = threading.BoundedSemaphore(_MOST_REQUESTS if most < 0 else min(_MOST_REQUESTS, most // 2))

    # The threads.

    def submit(self, groups: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Begin rollouts: of each group its block, its place in it, and its row of the dataset."""
        began = time.monotonic()
        for block, place, row in groups:
            group = Group(block, place, row, [])
            with self._changed:
                self._groups.append(group)
            self._begin(group)
        self._load.waited += time.monotonic() - began

    def _begin(self, group: Group) -> None:
        with self._changed:
            group.ended = group.proven = False
            group.entry = None
            group.step = self.engine.served_step
            group.era = self.engine.recoveries
            group.began = time.monotonic()
            group.rollouts = [None] * self.num_generations
            begun: list[Conversation] = []
            begun += [self._conversation(group, begun) for _ in group.rollouts]
            group.conversations = begun
        for index in range(self.num_generations):
            arguments = (group, begun, index)
            threading.Thread(target=self._roll_out, args=arguments, name="rollout", daemon=True).start()

    def _conversation(self, group: Group, begun: list[Conversation]) -> Conversation:
        ask = partial(self._ask, group, begun)
        return Conversation(self._trainer, group.row, self._tokenizer, self._environments, ask)

    def _ask(self, group: Group, begun: list[Conversation], prompt: list[int], most: int) -> Mapping[str, Any]:
        with self._slots, self._load.request():
            if group.conversations is not begun:
                raise RolloutError("nobody waits for this rollout any more")
            found: Mapping[str, Any] = self.engine.vllm_client.complete_one(prompt, most, self._sampling)
        self._load.count(len(found["completion_ids"]))
        return found

    def _roll_out(self, group: Group, begun: list[Conversation], index: int) -> None:
        """What a rollout's thread does; the last one of a group also grades it."""
        try:
            rollout = begun[index].rolled_out()
        except (RolloutError, RequestRefused) as error:
            self._note(group, begun, error)
            return
        # A tool or an environment may raise anything, also what ends a process.
        except BaseException as error:
            # It may be in any state, and is not used again.
            begun[index].environments = None
            what = f"{type(error).__name__}: {str(error)[:300]}"
            try:
                rollout = self._unscored(group, what)
            # Nothing stands for a prompt that cannot be tokenized.
            except Exception as again:
                self._note(group, begun, RewardFailed(f"A rollout failed ({what}), and its prompt as well: {again}"))
                return
        self._arrived(group, begun, index, rollout)

    def _note(self, group: Group, begun: list[Conversation], error: Exception) -> None:
        with self._changed:
            if group.conversations is begun and not group.ended:
                self._failures.append((group.era, error))
                self._changed.notify_all()

    def _unscored(self, group: Group, failure: str) -> StreamedRollout:
        _logger.warning("A rollout has no reward: %s", failure)
        return self._conversation(group, []).unscored(failure)

    def _arrived(self, group: Group, begun: list[Conversation], index: int, rollout: StreamedRollout) -> None:
        with self._changed:
            # It may have been begun again, or been given up.
            if group.conversations is not begun or group.rollouts[index] is not None:
                begun[index].close()
                return
            group.rollouts[index] = rollout
            begun[index].phase = "reward"
            whole = [each for each in group.rollouts if each is not None]
        if len(whole) == self.num_generations:
            self._grade(group, begun, whole)

    def _grade(self, group: Group, begun: list[Conversation], rollouts: Sequence[StreamedRollout]) -> None:
        drawn = [index for index, each in enumerate(rollouts) if not each.failure]
        environments = [(begun[index].environments or [None])[0] for index in drawn]
        known = self._environments.factories is not None
        entry = Entry(group.row, [rollouts[index] for index in drawn], environments if known else None)
        for rollout in rollouts:
            rollout.rewards = [math.nan] * len(self._trainer.reward_func_names)
        group.entry = entry
        try:
            scored = not drawn or self.grader.grade(entry)
        except RewardFailed as error:
            self._note(group, begun, error)
            return
        with self._changed:
            if group.conversations is begun and not group.ended:
                if not scored:
                    self._without_rewards(group)
                self._end(group)
        for index in drawn if scored else []:
            begun[index].close()

    def _end(self, group: Group) -> None:
        group.ended = True
        self._ended.append(group)
        self._changed.notify_all()

    # The main thread.

    def take(self, number: int, step: int, offset: int) -> list[tuple[int, int, list[StreamedRollout]]] | None:
        """Wait for generation batch `number` and return its groups: block, place, rollouts. None if it is not there
        after half a minute: call it again.

        Args:
            number: of the generation batch.
            step: optimizer steps taken.
            offset: micro-batches since then.

        Raises:
            RolloutError: the server failed. Once it is well again and has the weights, call it again.
            RequestRefused, RewardFailed: waiting would not help.
        """
        began = time.monotonic()
        chosen = None
        while chosen is None and time.monotonic() - began < _TELL:
            with self._changed:
                self._look_after()
                chosen = self._chosen(step, offset)
                # Only these are proven: the server may fail after the proof.
                ended = list(self._ended)
                if chosen is None:
                    with self.engine.interrupting():
                        self._changed.wait(_POLL)
        self.engine.vllm_client.prove()
        _require_some(chosen or [])
        with self._changed:
            for group in ended:
                group.proven = True
            for group in chosen or []:
                self._groups.remove(group)
                self._ended.remove(group)
                # What was given up may still be under way.
                group.conversations = []
        self._load.waited += time.monotonic() - began
        if chosen is None:
            print(self.described(self._load.waited), flush=True)
            return None
        self._taken[number] = chosen
        return [(each.block, each.place, [rollout for rollout in each.rollouts if rollout]) for each in chosen]

    def _look_after(self) -> None:
        """Raise what threads have met, begin again what a failed server drew, and give up what takes too long."""
        failures = self._failures
        self._failures = []
        for era, error in failures:
            if isinstance(error, RequestRefused):
                # Another server at this address refuses requests for our model; this raises what has happened.
                self.engine.vllm_client.prove()
            # After a recovery, what those before it tell is known.
            if era == self.engine.recoveries:
                raise error
        late = time.monotonic() - self.pace.seconds
        for group in self._under_way():
            if group.era != self.engine.recoveries and not group.proven:
                if group.ended:
                    self._ended.remove(group)
                self._begin(group)
            elif not group.ended and group.began < late:
                self._give_up(group)

    def _under_way(self) -> list[Group]:
        """Of a run that is resumed with fewer batches in flight, the later groups have to wait."""
        return self._groups[: (self.pace.batches + 1) * self.size]

    def _give_up(self, group: Group) -> None:
        """Use a group as it is; what has not come has no reward."""
        missing = [index for index, each in enumerate(group.rollouts) if each is None]
        for index in missing:
            late = f"not there after {self.pace.seconds:g} s, waiting for the {group.conversations[index].phase}"
            group.rollouts[index] = self._unscored(group, late)
        whole = [each for each in group.rollouts if each is not None]
        if missing:
            # The others, if there are any, are graded, and have as long for it again.
            group.began = time.monotonic()
            threading.Thread(target=self._grade, args=(group, group.conversations, whole), daemon=True).start()
            return
        if group.entry is not None and not self.grader.give_up(group.entry):
            # It has as long again, once those before it are scored or given up.
            group.began = time.monotonic()
            return
        self._without_rewards(group)
        self._end(group)

    def _without_rewards(self, group: Group) -> None:
        """Its rollouts have no rewards. Copies take their place, since a function that returns late fills in theirs."""
        late = f"grading took more than {self.pace.seconds:g} s"
        none: dict[str, Any] = {"rewards": [math.nan] * len(self._trainer.reward_func_names)}
        none |= {"turn_rewards": [], "logged": {}}
        group.rollouts = [replace(each, **none, failure=each.failure or late) for each in group.rollouts if each]

    def _chosen(self, step: int, offset: int) -> list[Group] | None:
        def left(group: Group) -> int:
            pace = self.pace
            age = step - group.step
            return batches_left(age, pace.max_staleness, pace.generate_every, pace.accumulation, offset)

        running = [left(group) for group in self._under_way() if not group.ended]
        found = next_batch([left(group) for group in self._ended], running, self.size)
        return None if found is None else [self._ended[index] for index in found]

    def described(self, seconds: float) -> str:
        """A line that says how long a batch has been waiting, how many prompts of it are there, and where rollouts of
        the others are."""
        late = [group for group in self._groups if not group.ended]
        counts = Counter(
            conversation.phase
            for group in late
            for conversation, rollout in zip(group.conversations, group.rollouts, strict=False)
            # A rollout is graded with the others of its group.
            if rollout is None or all(group.rollouts)
        )
        there = ", ".join(f"{counts[phase]} {where}" for phase, where in _WHERE.items() if counts[phase])
        oldest = max((self.engine.served_step - group.step for group in late), default=0)
        ready = f"{len(self._ended)}/{self.size} prompts"
        return f"waiting {seconds:.0f} s, {ready}: {there or 'none under way'}, oldest {oldest} steps"

    def metrics(self, step: int, number: int) -> dict[str, float]:
        """``rollout/*`` of the batch that was taken last."""
        rollouts = [each for group in self._taken[number] for each in group.rollouts if each]
        ages = [
            step - drawn for each in rollouts for drawn, own in zip(each.steps, each.tool_mask, strict=False) if own
        ]
        under_way = [group for group in self._groups if group.conversations and not group.ended]
        return {
            "rollout/staleness": sum(ages) / max(1, len(ages)),
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/in_flight": float(len(under_way) * self.num_generations),
            "rollout/failed": sum(bool(each.failure) for each in rollouts) / len(rollouts),
            **self._load.take(sum(sum(each.tool_mask) for each in rollouts)),
        }

    # Checkpoints.

    def settle(self, number: int) -> None:
        """Generation batches before `number` are trained on: their rollouts are not needed any more."""
        self._taken = {each: groups for each, groups in self._taken.items() if each >= number}

    def give_back(self, number: int) -> None:
        """The generation batches from `number` on are not trained on: their groups are ready to be taken again."""
        for each in [each for each in self._taken if each >= number]:
            groups = self._taken.pop(each)
            with self._changed:
                self._groups = [*groups, *self._groups]
                self._ended = [*groups, *self._ended]

    def close(self) -> None:
        """The run has ended: nothing asks the server any more. What is not proven, or has failed, begins again with the
        next `take`."""
        with self._changed:
            self._failures = []
            for group in self._groups:
                group.conversations = []
                group.ended = group.proven = _is_kept(group)
                group.era = -1
            self._ended = [group for group in self._ended if group.ended]
        until = time.monotonic() + _FAREWELL
        while self._load.requests and time.monotonic() < until:
            self.engine.vllm_client.session.cut()
            time.sleep(0.02)

    def state_dict(self) -> list[dict[str, Any]]:
        """Of each group its prompt, by block and place, and its rollouts, if they are scored and proven and not all of
        them have failed."""
        with self._changed:
            return [
                {"at": (group.block, group.place), "step": group.step, "rollouts": _written(group)}
                for group in self._groups
            ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], row: Callable[[int, int], Mapping[str, Any]]) -> None:
        """Restore `state_dict`'s result, with the rows of the dataset by block and place. What was under way begins
        again with the next `take`."""
        self._groups = []
        self._ended = []
        self._taken = {}
        for each in state:
            rollouts = [StreamedRollout(**fields) for fields in json.loads(each["rollouts"] or "[]")]
            block, place = each["at"]
            group = Group(block, place, row(block, place), list(rollouts), step=int(each["step"]))
            group.ended = group.proven = bool(rollouts)
            self._groups.append(group)
            self._ended += [group] if rollouts else []


def _is_kept(group: Group) -> bool:
    """Whether the next run has its rollouts: they are proven, and not all of them have failed. Where nothing else is
    there they would end that run as they have ended this one, though what made them fail may be over."""
    return group.proven and any(each and not each.failure for each in group.rollouts)


def _written(group: Group) -> str | None:
    """Its rollouts as JSON. None if they are not kept, or have what JSON cannot hold, such as images: they are drawn
    again."""
    try:
        # What reward functions have logged may be numbers of numpy.
        fields = [vars(each) for each in group.rollouts if each]
        return json.dumps(fields, default=lambda number: number.tolist()) if _is_kept(group) else None
    except (TypeError, ValueError, AttributeError):
        return None


def _require_some(groups: Sequence[Group]) -> None:
    """Raise RewardFailed if no rollout of a batch could be scored."""
    failures = [each.failure for group in groups for each in group.rollouts if each is not None]
    if failures and all(failures):
        raise RewardFailed(f"All {len(failures)} rollouts of a batch failed. The first one: {failures[0]}")


class StreamedBatches:
    """Which prompts a stream is given and which batches come out, on every rank alike.

    Prompts are drawn a generation batch at a time, as soon as rollouts of them may begin: a block. A batch may have
    prompts of several blocks. `batches` blocks are under way while a batch is trained on.

    Args:
        engine: the run's `basis_rl.engine.generation.Generation`.
        stream: None on all but the main process.
        pace: of the stream.
        draw: draws the block with a given number.
        dataset: of the prompts.
    """

    def __init__(
        self, engine: Any, stream: Stream | None, pace: Pace, draw: Callable[[int], Draw], dataset: Any
    ) -> None:
        self.engine = engine
        self.stream = stream
        self.pace = pace
        self.dataset = dataset
        self._draw = draw
        self._blocks: dict[int, Draw] = {}
        # Places of each block that are not in a batch yet.
        self._open: dict[int, set[int]] = {}
        self._next = 0
        self._taken: dict[int, list[tuple[int, int]]] = {}

    def fill(self, batches: int, first: int = 0) -> None:
        """Draw and submit all blocks before number `batches`, but none before `first`: they are trained on."""
        self._next = max(self._next, first)
        while self._next < batches:
            number = self._next
            self._next += 1
            draw = self._draw(number)
            self._blocks[number] = draw
            self._open[number] = set(range(len(draw.rows)))
            if self.stream is not None:
                self.stream.submit((number, place, self._row(number, place)) for place in range(len(draw.rows)))

    def _row(self, block: int, place: int) -> dict[str, Any]:
        row: dict[str, Any] = self.dataset[int(self._blocks[block].rows[place])]
        return row

    def take(self, number: int, step: int, offset: int) -> tuple[Draw, list[StreamedRollout], Tensor]:
        """Generation batch `number`: its prompts, and the rollouts and rewards of all ranks. Collective.

        Args:
            number: of the generation batch.
            step: optimizer steps taken.
            offset: micro-batches since then.
        """

        def wait() -> Any:
            assert self.stream is not None
            return self.stream.take(number, step, offset)

        found = None
        # With each call there is as much time again for a server that fails.
        while found is None:
            found = self.engine.persist(lambda: self.engine.by_main(wait))
        places = [(block, place) for block, place, _ in found]
        self._taken[number] = places
        for block, place in places:
            self._open[block].remove(place)
        rollouts = [rollout for *_, group in found for rollout in group]
        return self._composed(places), rollouts, torch.tensor([each.rewards for each in rollouts])

    def _composed(self, places: Sequence[tuple[int, int]]) -> Draw:
        """The draw of a batch whose prompts come from several blocks; its metrics are their mean."""
        draws = [self._blocks[block] for block, _ in places]
        rows = torch.stack([draw.rows[place] for draw, (_, place) in zip(draws, places, strict=True)])
        ratios = [draw.ratio[place] for draw, (_, place) in zip(draws, places, strict=True) if draw.ratio is not None]
        names = draws[0].metrics
        metrics = {name: sum(draw.metrics[name] for draw in draws) / len(draws) for name in names}
        return Draw(rows, torch.stack(ratios) if len(ratios) == len(draws) else None, metrics)

    def settle(self, number: int) -> None:
        """Generation batches before `number` are trained on."""
        self._taken = {each: places for each, places in self._taken.items() if each >= number}
        needed = {block for places in self._taken.values() for block, _ in places}
        for block in [block for block, places in self._open.items() if not places and block not in needed]:
            del self._open[block], self._blocks[block]
        if self.stream is not None:
            self.stream.settle(number)

    def give_back(self, number: int) -> None:
        """Generation batches from `number` on are not trained on: their groups are ready to be taken again."""
        for each in [each for each in self._taken if each >= number]:
            for block, place in self._taken.pop(each):
                self._open[block].add(place)
        if self.stream is not None:
            self.stream.give_back(number)

    def state_dict(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "blocks": {number: (draw.rows, draw.ratio, draw.metrics) for number, draw in self._blocks.items()},
            "open": {number: sorted(places) for number, places in self._open.items()},
            "pace": vars(replace(self.pace, seconds=0.0)),
            "groups": None if self.stream is None else self.stream.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result. Rollouts of a run with another pace are drawn again: they may be too old."""
        self._next = int(state["next"])
        self._blocks = {int(number): Draw(*fields) for number, fields in state["blocks"].items()}
        self._open = {int(number): set(places) for number, places in state["open"].items()}
        self._taken = {}
        if self.stream is not None:
            known = state["pace"] == vars(replace(self.pace, seconds=0.0))
            groups = [each if known else {**each, "rollouts": None} for each in state["groups"]]
            self.stream.load_state_dict(groups, self._row)
