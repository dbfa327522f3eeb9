"""The global batch and a rank's part of it, without a training."""

import math
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from basis_rl.trainer import BasisTrainer, trainer
from basis_rl.trainer.gather import gather_batch
from tests.support.ranks import Ranks

IDS = [f"id {i // 2}" for i in range(4)]
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]])


def test_a_batch_has_all_that_was_given_and_nothing_outside_the_mask():
    texts = [f"question {i // 2}" for i in range(4)]
    numbers = 1.0 + torch.arange(12.0).reshape(4, 3)
    fields = {name: numbers + k for k, name in enumerate(("energies", "kl", "rollout_weights", "values", "log_probs"))}
    batch = gather_batch(
        Accelerator(cpu=True),
        rewards=torch.tensor([1.0, math.nan, 0.0, 1.0], dtype=torch.float64),
        prompt_ids=IDS,
        action_mask=MASK,
        group_ids=torch.tensor([0, 0, 1, 1]),
        step=5,
        signals={
            **fields,
            "reward_parts": torch.arange(8.0).reshape(4, 2).double(),
            "reward_weights": torch.tensor([1.0, 2.0]),
            "greedy_rewards": torch.tensor([0.5, 0.5, 1.0, 1.0]),
            "prompt_texts": texts,
        },
    )
    assert batch.rewards.dtype == torch.float32
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.prompt_ids == IDS
    assert batch.prompt_texts == texts
    assert torch.equal(batch.action_mask, MASK.bool())
    for name, values in fields.items():
        assert torch.equal(getattr(batch, name), values * MASK), name
    assert batch.reward_parts.tolist() == torch.arange(8.0).reshape(4, 2).tolist()
    assert batch.reward_weights.tolist() == [1.0, 2.0]
    assert batch.greedy_rewards.tolist() == [0.5, 0.5, 1.0, 1.0]
    assert batch.step == 5


def test_rewards_of_turns_come_with_their_rows_from_every_rank(monkeypatch):
    """Also from one where no function has given any; with the weights of the functions."""
    ranks = Ranks(2)
    monkeypatch.setattr(trainer, "gather_object", ranks.gather_object)
    masks = [torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 0, 1]]), torch.tensor([[1, 1, 1], [0, 0, 0]])]
    # Of each rollout, two functions' lists.
    given = [[[[1.0, 2.0], [0.5]], [[], [1.0, 0.0, 4.0, 3.0]]], [[[], []], [[], []]]]

    def on(rank, rewards):
        run = SimpleNamespace(_turn_rewards=rewards, reward_weights=torch.tensor([1.0, 10.0]))
        return BasisTrainer._rewards_of_turns(run, {"completion_mask": masks[rank]})

    found = ranks.run(lambda rank: on(rank, given[rank]))
    assert found[0].tolist() == [[0.0, 6.0, 0.0, 0.0, 2.0], [10.0, 0.0, 0.0, 0.0, 70.0]]
    assert found[1].tolist() == torch.zeros(2, 3).tolist()
    # As none of both ranks, or of a batch that was resampled.
    assert ranks.run(lambda rank: on(rank, [given[1], []][rank])) == [None, None]
