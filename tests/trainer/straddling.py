"""Run by `test_two_ranks.py` on one or two ranks: trains each baseline on given rollouts and saves the advantages.

The rollouts depend only on the global row, so that one rank and two see the same; six rows a rank and groups of four
make one group straddle the ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from basis_rl.__main__ import leave
from basis_rl.baselines import BASELINES
from basis_rl.trainer import BasisTrainer
from examples.custom_objective import simple
from tests.support.tiny import Tokenwise, config, named_baseline, sums, tiny_tokenizer

ROWS, GROUP = 12, 4


def reward(completions, completion_ids, **kwargs):
    """0 or 1 by the rollout, missing for some."""
    return [None if ids[0] % 5 == 0 else float(sum(ids) % 2) for ids in completion_ids]


class GivenRollouts(BasisTrainer):
    """Completions by global row, of different lengths on different ranks; keeps the advantages of every batch."""

    def __init__(self, *args, **kwargs):
        self.kept = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, images, multimodal, num_generations, **kwargs):
        if num_generations == 1:  # the greedy rollouts: by prompt, whatever the rank
            return [[21 + sum(ids) % 50, 20 + len(ids)] for ids in prompt_ids], None
        first = self.accelerator.process_index * len(prompt_ids) + ROWS * self._generation_batch
        rows = range(first, first + len(prompt_ids))
        return [[20 + (row * 7 + k * k) % 50 for k in range(1 + row % (3 + row // 6))] for row in rows], None

    def _advantages(self, inputs, output):
        local = super()._advantages(inputs, output)
        width = torch.tensor([self._unlearnt[-1][1].action_mask.shape[1]])
        wide = local
        if local.ndim == 2:
            wide = torch.nn.functional.pad(local, (0, int(width) - local.shape[1]))
        self.kept.append((self._unlearnt[-1][1], self.accelerator.gather(wide).clone()))
        return local


# Losses that are put together beside TRL's: the KL term that is ours, and objectives that are not TRL's.
LOSSES = {
    "k2": {"objective": "grpo", "kl_estimator": "k2"},
    "k2 over all tokens": {"objective": "dapo", "kl_estimator": "k2"},
    "gpg": {"objective": "gpg", "kl_estimator": "k2"},
    "own": {"objective": simple, "entropy_coef": 0.1},
}


def losses(output: Path, model: str) -> dict:
    """What a few steps with each of `LOSSES` log, and the policy they end with."""
    results = {}
    for name, chosen in LOSSES.items():
        settings = {key: value for key, value in chosen.items() if key != "objective"}
        trainer = GivenRollouts(
            model=model,
            reward_funcs=reward,
            args=config(
                output / f"loss-{name}",
                per_device_train_batch_size=ROWS // int(sys.argv[3]),
                steps_per_generation=1,
                num_iterations=2,
                num_generations=GROUP,
                max_completion_length=12,
                max_steps=4,
                beta=0.5,
                optim="sgd",
                learning_rate=1.0,
                epsilon=0.05,
                **settings,
            ),
            train_dataset=sums(),
            processing_class=tiny_tokenizer(),
            baseline="batch_mean",
            objective=chosen["objective"],
        )
        trainer.train()
        policy = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
        results[name] = {"log": trainer.state.log_history, "policy": policy}
    return results


def main(output: Path, model: str) -> None:
    results = {}
    for name in [*BASELINES, "tokenwise"]:
        baseline = Tokenwise() if name == "tokenwise" else named_baseline(name, sums())
        args = config(
            output / f"run-{name}",
            per_device_train_batch_size=ROWS // int(sys.argv[3]),
            steps_per_generation=1,
            num_generations=GROUP,
            max_completion_length=12,
        )
        trainer = GivenRollouts(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=sums(),
            processing_class=tiny_tokenizer(),
            baseline=baseline,
        )
        assert trainer.accelerator.num_processes == int(sys.argv[3])
        trainer.train()
        results[name] = [
            {
                "advantages": advantages,
                "rewards": batch.rewards,
                "group_ids": batch.group_ids,
                "prompt_ids": batch.prompt_ids,
                "action_mask": batch.action_mask,
            }
            for batch, advantages in trainer.kept
        ]
        rank = trainer.accelerator.process_index
    torch.save((results, losses(output, model)), output / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave(0)
