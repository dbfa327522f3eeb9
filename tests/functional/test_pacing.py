"""The pace of a stream against trying every batch, and the mean age of its rollouts by Little's law."""

import itertools

import numpy as np
import pytest

from basis_rl.functional.pacing import batches_left, most_batches_ahead, next_batch


def in_time(left, size):
    """Whether batches of `size`, beginning with the next one, can use them all, by counting."""
    return min(left, default=0) >= 0 and all(sum(each <= d for each in left) <= (d + 1) * size for d in range(20))


def by_trying(ended, running, size):
    """Whether some batch of what has ended leaves nothing that is too old later."""
    for chosen in itertools.combinations(range(len(ended)), size):
        rest = [each for index, each in enumerate(ended) if index not in chosen]
        if in_time([each - 1 for each in (*rest, *running)], size):
            return True
    return False


@pytest.mark.parametrize("seed", range(300))
def test_it_waits_exactly_if_no_batch_leaves_the_others_in_time(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 4))
    left = [-1]
    while not in_time(left, size):
        left = rng.integers(0, 4, size * int(rng.integers(1, 4))).tolist()
    count = int(rng.integers(0, min(7, len(left)) + 1))
    found = next_batch(left[:count], left[count:], size)
    assert (found is not None) == by_trying(left[:count], left[count:], size)
    if found is not None:
        assert len(set(found)) == size
        assert in_time([each - 1 for index, each in enumerate(left) if index not in found], size)


PACES = tuple(itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2, 3)))


@pytest.mark.parametrize(("staleness", "every", "accumulation"), PACES)
def test_nothing_is_too_old_and_the_mean_age_is_the_number_of_batches_under_way(staleness, every, accumulation):
    """Whatever ends when: there are B batches whenever one is taken, so a rollout is there for B of them on average."""
    rng, size, count = np.random.default_rng(0), 3, 40
    for batches in range(1, most_batches_ahead(staleness, every, accumulation) + 1):
        ends = (5 * rng.pareto(0.8, batches * size)).tolist()
        began, used = [0] * len(ends), {}
        now = 0.0
        for number in range(count):
            step, offset = divmod(number * every, accumulation)
            ages = [step - each * every // accumulation for each in began]
            left = [batches_left(age, staleness, every, accumulation, offset) for age in ages]
            chosen = None
            while chosen is None:
                there = [each for each in range(len(ends)) if each not in used]
                ended = [each for each in there if ends[each] <= now]
                later = [each for each in there if ends[each] > now]
                chosen = next_batch([left[each] for each in ended], [left[each] for each in later], size)
                now = now if chosen else min(ends[each] for each in later)
            assert max(ages[ended[index]] for index in chosen) <= staleness
            used |= {ended[index]: number for index in chosen}
            ends += (now + 5 * rng.pareto(0.8, size)).tolist()
            began += [number] * size
            now += 5.0
        there = [used.get(each, count - 1) - began[each] for each in range(len(ends))]
        # The first ones were there for batch 0 as well.
        assert sum(there) + batches * size == count * batches * size


@pytest.mark.parametrize(("staleness", "served", "accumulation"), PACES)
def test_with_one_batch_more_a_rollout_would_be_too_old(staleness, served, accumulation):
    """The largest number of batches is the largest: with one more, rollouts that end in order exceed the bound."""
    most = most_batches_ahead(staleness, served, accumulation)
    for batches, within in ((most, True), (most + 1, False)):
        if batches == 0:
            continue
        steps = [(batch * served) // accumulation for batch in range(60)]
        # In order: the block that begins with batch k is used as batch k + batches.
        oldest = max(steps[k + batches] - steps[k] for k in range(60 - batches))
        assert (oldest <= staleness) == within


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
