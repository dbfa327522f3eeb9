"""The simulated server and trainer against times that can be computed by hand."""

import dataclasses
from collections import deque

import pytest

from benchmarks import stream_simulated
from benchmarks.stream_simulated import Rates, Regime, Rollout, Run, Scale, Server, Variant, outcome

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


def test_rows_slow_each_other_down_and_wait_for_a_place():
    one, two = RATES.step(1), RATES.step(2)
    assert ends_of([[100.0], [300.0]]) == pytest.approx([100 * two, 100 * two + 200 * one])
    assert ends_of([[100.0], [300.0]], gpus=2) == pytest.approx([100 * one, 100 * one + 200 * RATES.step(0.5)])
    assert ends_of([[100.0], [300.0]], capacity=1) == pytest.approx([100 * one, 400 * one])


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


def test_quick_run():
    found = stream_simulated.main(["--quick", "--rate", "push=1", "capacity=8"])
    assert found["rates"]["push"] == 1.0
    assert found["rates"]["capacity"] == 8
    assert all(each["sync groups"]["relative"] == 1.0 for each in found["variants"].values())
