"""What rewards, tools and environments do to the generators of random numbers does not reach the policy's draws."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from basis_rl.trainer.random_numbers import OwnNumbers, random_numbers_kept
from tests.support import tooled
from tests.support.tiny import DEVICE, parity_reward, sums, tiny_trainer


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand((), device=DEVICE))


def reset():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def test_foreign_draws_are_new_ones_each_time_and_the_policys_go_on():
    numbers = OwnNumbers(torch.device(DEVICE))
    reset()
    expected = [draw()[1:] for _ in range(4)]
    reset()
    found, foreign = [draw()[1:]], []
    for resets in (False, True, False, False):
        with numbers.lent():
            foreign.append(draw())
            if resets:
                reset()
                with numbers.back():
                    found.append(draw()[1:])
                foreign.append(draw())
                reset()
    found += [draw()[1:], draw()[1:]]
    with numbers.back():
        assert draw()[1:] not in found
    assert found == expected
    assert len(set(foreign)) == len(foreign), "also where the policy draws nothing in between"


@pytest.mark.gpu
def test_random_numbers_are_put_back():
    reset()
    expected = draw()
    reset()
    with random_numbers_kept(torch.device(DEVICE)):
        assert draw() == expected
        draw()
    assert draw() == expected


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_a_reward_that_sets_seeds_changes_no_rollout(kind, tmp_path):
    def trained(folder, resets):
        seen = []

        def reward(completions, completion_ids, **kwargs):
            seen.append([*completion_ids])
            if resets:
                reset()
            return parity_reward(completions, completion_ids)

        async def later(**kwargs):
            return reward(**kwargs)

        settings = {"steps_per_generation": 1, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
        own = {"reward_funcs": reward if kind == "function" else later, "eval_dataset": sums(8)}
        trainer = tiny_trainer(folder, "remax", **own, **settings)
        seen.clear()
        trainer.train()
        return seen

    plain = trained(tmp_path / "a", False)
    assert plain == trained(tmp_path / "b", True)
    assert all(a != b for a, b in pairwise(plain))


class Board:
    """An environment whose beginning, tool and reward set seeds, or do not."""

    resets = False

    def _touched(self):
        if self.resets:
            reset()

    def reset(self, **row):
        self._touched()

    def look(self, expression: str) -> str:
        """Look.

        Args:
            expression: at what.
        """
        self._touched()
        return "7"

    def get_reward(self):
        self._touched()
        return float(self.resets in (True, False))


def test_tools_and_environments_that_set_seeds_change_no_rollout(tmp_path, monkeypatch):
    def by_rule(tok, ids, *args, **kwargs):
        message = tooled.by_rule(tok, ids)
        for call in message.get("tool_calls", []):
            call["function"]["name"] = "look"
        return message

    def trained(resets):
        monkeypatch.setattr(Board, "resets", resets)
        own = {"tools": (), "environment_factory": Board, "reward_funcs": tooled.last_turn, "max_steps": 3}
        trainer = tooled.trainer(tmp_path / str(resets), "rloo", **own)
        monkeypatch.setattr("basis_rl.trainer.turns.read_turn", by_rule)
        batches = []
        generate = trainer._generate
        monkeypatch.setattr(trainer, "_generate", lambda prompts: batches.append(generate(prompts)) or batches[-1])
        trainer.train()
        assert all(any(0 in mask for mask in batch[2]) for batch in batches), "in each batch a tool has answered"
        return [batch[1] for batch in batches]

    plain = trained(False)
    assert plain == trained(True)
    assert all(a != b for a, b in pairwise(plain))
