"""Pacing of a stream, by simulation: nothing is too old, nothing is dropped, nobody waits without need."""

import itertools
import random

import pytest

from basis_rl.functional.pacing import batches_left, most_batches_ahead, next_batch


def simulated(draw, batches, size, max_staleness, generate_every, accumulation, steps=40):
    """Staleness of every rollout that is used, in the order of use, and how long each batch waited; `draw` tells when a
    rollout that begins now ends."""
    waiting, stale, waits = [], [], []
    clock, micro_batches, begun = 0.0, 0, 0

    def submit(count, step):
        nonlocal begun
        for _ in range(count):
            waiting.append((clock + draw(), step, begun))
            begun += 1

    submit(batches * size, 0)
    for _ in range(steps):
        step, offset = divmod(micro_batches, accumulation)
        began = clock
        while True:
            ended = sorted(each for each in waiting if each[0] <= clock)
            running = [each for each in waiting if each[0] > clock]
            pace = (max_staleness, generate_every, accumulation, offset)
            left = [[batches_left(step - drawn, *pace) for _, drawn, _ in each] for each in (ended, running)]
            chosen = next_batch(*left, size)
            if chosen is not None:
                break
            clock = min(running)[0]
        waits.append(clock - began)
        for index in chosen:
            waiting.remove(ended[index])
            stale.append((step - ended[index][1], ended[index][2]))
        submit(size, step)
        micro_batches += generate_every
        clock += 1.0
    return stale, waits


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_too_old_and_nothing_is_dropped(seed):
    numbers = random.Random(seed)
    size, staleness = numbers.randint(1, 6), numbers.randint(1, 6)
    served, accumulation = numbers.choice([1, 2, 3, 4]), numbers.choice([1, 2, 3, 4])
    most = most_batches_ahead(staleness, served, accumulation)
    if most == 0:
        # One generation batch alone outlasts the bound.
        assert served > staleness * accumulation
        return
    batches = numbers.randint(1, most)
    stale, _ = simulated(lambda: numbers.lognormvariate(0.0, 2.0), batches, size, staleness, served, accumulation)
    assert max(age for age, _ in stale) <= staleness
    used = [number for _, number in stale]
    assert len(set(used)) == len(used) == 40 * size


@pytest.mark.parametrize(("staleness", "served", "accumulation"), itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2, 3)))
def test_with_one_batch_more_a_rollout_would_be_too_old(staleness, served, accumulation):
    """The largest number of batches is the largest: with one more, rollouts that end in order exceed the bound."""
    most = most_batches_ahead(staleness, served, accumulation)
    size = 2
    for batches, within in ((most, True), (most + 1, False)):
        if batches == 0:
            continue
        steps = [(batch * served) // accumulation for batch in range(60)]
        # In order: the block that begins with batch k is used as batch k + batches.
        oldest = max(steps[k + batches] - steps[k] for k in range(60 - batches))
        assert (oldest <= staleness) or not within
        if not within:
            assert oldest > staleness
    if most:
        stale, _ = simulated(lambda: 0.5, most, size, staleness, served, accumulation)
        assert max(age for age, _ in stale) <= staleness


def test_a_slow_rollout_is_waited_for_only_when_it_would_be_too_old():
    """One rollout in eight takes long; with more under way than a batch has, and fewer than the bound allows, the
    others go ahead."""
    durations = itertools.cycle([0.1] * 7 + [2.5])
    _, waits = simulated(lambda: next(durations), 2, 8, 4, 1, 1)
    assert max(waits[1:]) == pytest.approx(0.0)
    durations = itertools.cycle([0.1] * 7 + [2.5])
    _, waits = simulated(lambda: next(durations), 1, 8, 1, 1, 1)
    assert min(waits[1:]) == pytest.approx(1.5)


def test_the_oldest_come_first_and_then_what_ended_first():
    assert next_batch([3, 0, 2, 0], [], 2) == [1, 3]
    assert next_batch([3, 0, 2, 3], [3], 2) == [1, 2]
    assert next_batch([3, 3, 2, 3], [3], 3) == [0, 1, 2]
    # Of a run that is resumed with a smaller bound, more may be too old than a batch has.
    assert next_batch([0, 0, 0], [], 2) == [0, 1]
    assert next_batch([3, 3], [0], 2) is None
    assert next_batch([3], [3, 3], 2) is None
    # Three that may let one more batch pass have no room in it: one of them goes now.
    assert next_batch([4, 4, 1], [1, 1], 2) == [0, 2]
