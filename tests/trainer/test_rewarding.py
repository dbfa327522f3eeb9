"""Reward functions that fail: one message, on every rank, before anything is learnt from them."""

import asyncio
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from basis_rl.rewards.call import WrongScores, scores_of
from basis_rl.run import checkpoint
from basis_rl.run.errors import RewardFailed
from basis_rl.trainer import rewarding
from basis_rl.trainer.rewarding import RewardGuard, UniformRewards, total_rewards
from tests.support.ranks import Ranks
from tests.support.tiny import parity_reward
from tests.trainer.test_faults import build

SIZE = 3


@pytest.mark.parametrize(
    "returned", [[1, 0.5, None], (1, 0.5, math.nan), np.array([1, 0.5, math.nan]), torch.tensor([1, 0.5, math.nan])]
)
def test_numbers_and_none_in_any_list_are_rewards(returned):
    found, _ = scores_of(returned, SIZE)
    assert found[:2] == [1.0, 0.5]
    assert math.isnan(found[2])


def test_the_reward_of_a_list_is_its_sum():
    returned = [[1, 0.5], 2.0, None, [], [math.nan, 1.0], (0.25,)]
    found, by_turn = scores_of(returned, 6)
    assert [found[index] for index in (0, 1, 3, 5)] == [1.5, 2.0, 0.0, 0.25]
    assert math.isnan(found[2])
    assert math.isnan(found[4])
    assert by_turn == [[1.0, 0.5], [], [], [], [], [0.25]]


@pytest.mark.parametrize("of", [np.array, torch.tensor])
def test_an_array_of_numbers_is_a_list_of_them(of):
    returned = [of([1.0, 0.5]), of([0.25]), of(2.0)]
    assert scores_of(returned, SIZE) == ([1.5, 0.25, 2.0], [[1.0, 0.5], [0.25], []])


WRONG = {
    "nothing": (None, "returned a NoneType, not a list"),
    "a text": ("abc", "returned a str, not a list"),
    "a mapping": ({0: 1.0, 1: 1.0, 2: 1.0}, "returned a dict, not a list"),
    "a matrix": (torch.ones(3, 1), "returned a Tensor, not a list"),
    "too few": ([1.0, 2.0], "returned 2 rewards for 3 rollouts"),
    "texts": ([1.0, "0.5", 2.0], r"returned '0.5' for row 1, which is neither"),
    "a turn without a number": ([1.0, [1.0, None], 1.0], r"returned \[1.0, None\] for row 1, which is neither"),
    "an infinite turn": ([1.0, 2.0, [math.inf, -math.inf]], "returned inf for row 2, which is infinite"),
    "infinite in float32": ([1.0, 1e39, 2.0], r"returned 1e\+39 for row 1, which is infinite as the float32"),
    "an integer without bounds": ([1.0, 10**400, 2.0], "for row 1, which is neither"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_reward_is_named(case):
    returned, message = WRONG[case]
    with pytest.raises(WrongScores, match=message):
        scores_of(returned, SIZE)


def good(completions, **given):
    return [1.0] * len(completions)


def bad(completions, **given):
    raise KeyError("solution")


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}, set()])
def test_a_failure_on_one_rank_is_the_same_message_on_all(failing, monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(rewarding, "gather_object", ranks.gather_object)

    def on(rank):
        guard = RewardGuard(ranks.accelerator(rank))
        first, second = guard.guarded([good, bad if rank in failing else good], ["first", "second"])
        scored = [function(completions=["a"] * SIZE) for function in (first, second)]
        ranks.exchange(scored)  # TRL's collective, which every rank reaches
        guard.check()
        return scored

    found = ranks.run(on)
    if not failing:
        assert found == [[[1.0] * SIZE] * 2] * 2
        return
    assert {type(each) for each in found} == {RewardFailed}
    assert len({str(each) for each in found}) == 1
    said = str(found[0])
    assert said.startswith("The reward function 'second' raised KeyError: 'solution' (test_rewarding.py, line ")
    assert f"on rank {min(failing)}" in said
    assert ("1 more such failure(s)" in said) == (len(failing) == 2)


async def late(completions, **given):
    return [1.0, None, 1.0]


class Later:
    def __init__(self, error=None):
        self.error = error

    async def __call__(self, completions, **given):
        if self.error:
            raise self.error
        return [0.5] * len(completions)


def test_asynchronous_functions_and_objects_are_awaited_and_fail_as_others_do():
    guard = RewardGuard(SimpleNamespace(process_index=0, num_processes=1))
    functions = guard.guarded([late, Later(), Later(KeyError("x")), good], "abcd")
    assert [inspect.iscoroutinefunction(each) for each in functions] == [True, True, True, False]  # as TRL asks
    first, *others = [asyncio.run(each(completions=["a"] * SIZE)) for each in functions[:3]]
    assert math.isnan(first[1])
    assert others == [[0.5] * SIZE, [0.0] * SIZE]
    with pytest.raises(RewardFailed, match="'c' raised KeyError: 'x'"):
        guard.check()
    guard.check()


def test_the_weighted_sum_must_be_finite_too():
    rewards, nan = torch.tensor([[1.0, 2.0], [3e38, 3e38]]), math.nan
    assert total_rewards(rewards, torch.tensor([0.5, 0.25])).tolist() == pytest.approx([1.0, 2.25e38])
    missing = total_rewards(torch.tensor([[nan, 2.0], [1.0, nan], [nan, nan]]), torch.tensor([0.5, 3.0]))
    assert missing.tolist() == pytest.approx([6.0, 0.5, nan], nan_ok=True)
    with pytest.raises(RewardFailed, match=r"row 1 of the batch is infinite: a 3e\+38 x weight 1, b 3e\+38 x weight 1"):
        total_rewards(rewards, torch.ones(2), ["a", "b"])
    with pytest.raises(RewardFailed, match=r"row 1 .* infinite: .*b 3e\+38 x weight 10\."):
        total_rewards(rewards, torch.tensor([0.0, 10.0]), ["a", "b"])
    with pytest.raises(
        RewardFailed, match=r"row 0 .* infinite: .*b inf x weight 0"
    ):  # whose product is NaN, not infinite
        total_rewards(torch.tensor([[1.0, math.inf]]), torch.tensor([1.0, 0.0]), ["a", "b"])
    with pytest.raises(RewardFailed, match="function 0 inf"):
        total_rewards(torch.tensor([[math.inf, nan]]), torch.ones(2))


@pytest.mark.parametrize("row", [[0.5] * 4, [math.nan] * 4])
def test_batches_without_a_difference_are_one_warning_or_the_end(row, caplog):
    counting = UniformRewards(None)
    uniform, mixed = torch.tensor(row), torch.tensor([0.0, 1.0, math.nan, 0.0])
    for _ in range(9):
        counting.check(uniform)
    counting.check(mixed)
    for _ in range(25):
        counting.check(uniform)
    assert len(caplog.messages) == 1
    assert "In 10 generation batches in a row" in caplog.text
    resumed = UniformRewards(27)
    resumed.load_state_dict(counting.state_dict())
    resumed.check(uniform)
    with pytest.raises(RewardFailed, match="In 27 generation batches in a row"):
        resumed.check(uniform)


def test_a_reward_that_fails_ends_a_run_with_a_checkpoint(tmp_path):
    """A step's rewards are lost with it; those before are in the checkpoint, and the run resumes there."""
    settings = {"save_strategy": "steps", "save_steps": 100, "steps_per_generation": 1}
    trained = build(tmp_path, None, **settings)

    def breaks(completions, **given):
        if given["trainer_state"].global_step == 3:
            raise KeyError("solution")
        return parity_reward(completions, **given)

    trained.reward_funcs = [breaks]
    with pytest.raises(RewardFailed, match="'parity_reward' raised KeyError: 'solution'"):
        trained.train()
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"
    again = build(tmp_path, None, max_uniform_batches=2, **settings)
    again.reward_funcs = [good]
    with pytest.raises(RewardFailed, match="2 generation batches in a row all rewards were 1"):
        again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 4
