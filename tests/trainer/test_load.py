"""Who waits for whom in a stream, on a clock that the test turns; and the line that says what a batch waits for."""

import random
from types import SimpleNamespace

import pytest

from basis_rl.trainer import stream
from basis_rl.trainer.stream import Group, Load, Stream


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=1000.0)
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now.time))
    return now


def test_the_first_batch_is_all_waiting(clock):
    """What came before the first request, such as loading the model, does not count; nothing was trained on yet."""
    load = Load()
    clock.time += 500.0
    with load.request():
        clock.time += 8.0
    load.count(160)
    load.waited += 8.0
    found = load.take(160)
    assert found == {
        "rollout/waited": 8.0,
        "rollout/waited_share": 1.0,
        "rollout/server_waited": 0.0,
        "rollout/server_waited_share": 0.0,
        "rollout/server_tokens_per_second": 20.0,
    }


def test_each_side_is_measured_by_a_plain_timeline(clock):
    """Requests at random times, against a loop over small slices of time."""
    drawn = random.Random(0)
    load = Load()
    with load.request():
        pass
    load.take(1)
    for batch in range(1, 20):
        requests = sorted(drawn.sample(range(100), 6))
        begins, ends = requests[::2], requests[1::2]
        waited = drawn.randrange(50)
        opened = []
        busy = 0
        for slice_ in range(100):
            for _ in range(begins.count(slice_)):
                opened.append(load.request())
                opened[-1].__enter__()
            for _ in range(ends.count(slice_)):
                opened.pop().__exit__(None, None, None)
                load.count(10)
            busy += bool(opened)
            clock.time += 0.5
        assert not opened
        load.waited += 0.5 * waited
        found = load.take(1000 * (batch + 1))
        idle = 0.5 * (100 - busy)
        assert found["rollout/waited"] == 0.5 * waited
        assert found["rollout/waited_share"] == pytest.approx(waited / 100)
        assert found["rollout/server_waited"] == pytest.approx(idle)
        assert found["rollout/server_waited_share"] == pytest.approx(idle / 50)
        assert found["rollout/server_tokens_per_second"] == pytest.approx(30 / (50 - idle))
        # The time since the last call was spent on the batch before.
        trained = 1 if batch == 1 else 1000 * batch
        assert found["rollout/trainer_tokens_per_second"] == pytest.approx(trained / (50 - 0.5 * waited))


def test_requests_at_the_same_time_and_across_batches_leave_the_server_no_pause(clock):
    load = Load()
    with load.request():
        clock.time += 1.0
        with load.request():
            clock.time += 1.0
        assert load.take(5)["rollout/server_waited"] == 0.0
        clock.time += 3.0
    clock.time += 4.0
    assert load.take(5)["rollout/server_waited"] == 4.0
    clock.time += 2.0
    assert load.take(5)["rollout/server_waited"] == 2.0, "a pause counts for both batches between which it lies"


def described(groups, ended=0, seconds=30.0):
    made = SimpleNamespace(
        _groups=groups, _ended=[None] * ended, size=8, engine=SimpleNamespace(served_step=9), num_generations=2
    )
    return Stream.described(made, seconds)


def waiting(step, *phases, there=0, ended=False):
    """A group whose first rollouts are there and whose others are in these phases."""
    group = Group(0, 0, {}, [SimpleNamespace()] * there + [None] * len(phases), step=step, ended=ended)
    group.conversations = [SimpleNamespace(phase=phase) for phase in ("reward",) * there + phases]
    return group


def test_the_line_says_where_rollouts_are_and_how_old_the_oldest_is():
    groups = [waiting(8, *["server"] * 12), waiting(5, *["tools"] * 3, there=1), waiting(7, there=1)]
    groups.append(waiting(1, there=2, ended=True))
    said = described(groups, ended=5)
    assert said == "waiting 30 s, 5/8 prompts: 12 at server, 3 in tools, 1 in grading, oldest 4 steps"
    assert described([]) == "waiting 30 s, 0/8 prompts: none under way, oldest 0 steps"
    many = [waiting(8, *["server"] * 512, *["environment"] * 100), waiting(6, there=64)]
    assert len(described(many, seconds=1800.0)) <= 96


def metrics_of(rollouts, step, others=()):
    """Of a batch whose groups have these rollouts, G = 2, while `others` are under way."""
    groups = [Group(0, place, {}, rollouts[place * 2 : place * 2 + 2]) for place in range(len(rollouts) // 2)]
    load = Load()
    load.take(1)
    made = SimpleNamespace(_taken={7: groups}, _groups=[*others], _load=load, num_generations=2)
    return Stream.metrics(made, step, 7)


def test_staleness_is_of_the_models_own_tokens():
    """Tools' tokens and rollouts that failed have no age; one token weighs as much as another."""
    drawn = random.Random(2)
    rollouts = []
    ages = []
    for _ in range(6):
        steps = sorted(drawn.choices(range(3, 8), k=1 + drawn.randrange(9)))
        mask = [1, *drawn.choices([0, 1], k=len(steps) - 1)]
        rollouts.append(SimpleNamespace(steps=steps, tool_mask=mask, failure=""))
        ages += [8 - drew for drew, own in zip(steps, mask, strict=True) if own]
    rollouts += [SimpleNamespace(steps=[], tool_mask=[0], failure="it took too long")] * 2
    found = metrics_of(rollouts, 8, others=[waiting(5, "server", "tools"), waiting(5, there=2, ended=True)])
    assert found["rollout/staleness"] == pytest.approx(sum(ages) / len(ages))
    assert found["rollout/staleness_max"] == max(ages)
    assert found["rollout/failed"] == 2 / 8
    assert found["rollout/in_flight"] == 2
