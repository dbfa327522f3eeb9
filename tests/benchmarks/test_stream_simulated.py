"""The simulated server and trainer against times that can be computed by hand."""

import dataclasses
import itertools
import math
from collections import deque

import pytest

from benchmarks import stream_simulated
from benchmarks.stream_simulated import Rates, Regime, Rollout, Run, Scale, Server, Variant, drawn, outcome

RATES = Rates(weights=0.01, row=4e-5, cache=6e-5, capacity=4, training=2e-4, push=3.0)


def ends_of(turns, delays=(), capacity=4, gpus=1):
    """When each of these rollouts ends."""
    ends = {}
    server = Server(
        dataclasses.replace(RATES, capacity=capacity), gpus, lambda each: ends.setdefault(each.unit, server.now)
    )
    for unit, tokens in enumerate(turns):
        server.submit(Rollout(unit, deque(tokens), deque(delays)))
    while len(ends) < len(turns):
        server.advance()
    return [ends[unit] for unit in range(len(turns))]


def test_a_step_is_bound_by_memory_then_by_products():
    rates = Rates(weights=0.01, row=1e-3, cache=1e-4)
    assert [rates.step(rows) for rows in (1, 10, 20)] == pytest.approx([0.0101, 0.011, 0.022])


def test_rows_slow_each_other_down_and_wait_for_a_place():
    one, two = RATES.step(1), RATES.step(2)
    assert ends_of([[100.0], [300.0]]) == pytest.approx([100 * two, 100 * two + 200 * one])
    assert ends_of([[100.0], [300.0]], gpus=2) == pytest.approx([100 * one, 100 * one + 200 * RATES.step(0.5)])
    assert ends_of([[100.0], [300.0]], capacity=1) == pytest.approx([100 * one, 400 * one])


def test_while_a_tool_works_other_rows_are_faster():
    one, two = RATES.step(1), RATES.step(2)
    waits = 50 * two + 2.0
    first = waits + 50 * two
    assert waits < 50 * two + 900 * one
    left = 1000 - 50 - 2.0 / one - 50
    assert ends_of([[50.0, 50.0], [1000.0]], [2.0]) == pytest.approx([first, first + left * one])


def test_a_synchronous_step_is_the_sum_of_its_phases():
    regime = Regime(1_000, 0.0, gpus=4, rollouts=16, rates=dataclasses.replace(RATES, capacity=100))
    found = outcome(regime, Variant(8, 0, 0, in_turns=True), 0, Scale(1, 3))
    drawing, training = 1_000 * RATES.step(4), 16 * 1_000 * 2e-4 / 4
    assert found["seconds"] == pytest.approx(3.0 + drawing + training)
    assert found["waits"] == pytest.approx(drawing / found["seconds"])
    assert found["largest"] == 0


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(("group", "batches", "staleness"), [(1, 1, 4), (1, 2, 4), (8, 2, 4), (1, 3, 3)])
def test_a_stream_uses_prompts_once_within_the_bound(group, batches, staleness, tools):
    regime = Regime(1_000, 2.0, tools=tools, gpus=2, rollouts=32)
    run = Run(regime, Variant(group, batches, staleness), 1, seed=0)
    ages = [age for _, _, each in run.take(40) for age in each]
    assert len(ages) == 40 * 32 // group
    assert max(ages) <= staleness
    assert len(run.began) == batches * 32 // group
    assert sum(ages) / len(ages) == pytest.approx(batches, abs=0.15)


def test_lengths_have_the_mean_and_the_spread():
    prompts = itertools.islice(drawn(Regime(1_000, 0.5), 8, seed=1), 2_000)
    lengths = [each.turns[0] for prompt in prompts for each in prompt]
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(1_000, rel=0.05)
    assert math.sqrt(sum((each - mean) ** 2 for each in lengths) / len(lengths)) / mean == pytest.approx(0.5, abs=0.05)


def test_quick_run():
    found = stream_simulated.main(["--quick", "--rate", "push=1", "capacity=8"])
    assert found["rates"]["push"] == 1.0
    assert found["rates"]["capacity"] == 8
    assert all(each["sync groups"]["relative"] == 1.0 for each in found["variants"].values())
