"""Called by `test_two_ranks.py` on one or two ranks: trains each baseline on given rollouts and returns the advantages.

Beside that, what else the ranks must agree on: a KL loss of our own, the noise of the gradient, and when to stop.

The rollouts depend only on the global row, so that one rank and two see the same; six rows a rank and groups of four
make one group straddle the ranks.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import torch

from basis_rl.baselines import BASELINES, BatchMean, Rloo
from basis_rl.samplers import Dynamic, Frontier
from examples.custom_objective import simple
from tests.support.tiny import Keeps, Tokenwise, named_baseline, sums, tiny_trainer

ROWS, GROUP = 12, 4


def reward(completions, completion_ids, **kwargs):
    """0 or 1 by the rollout, missing for some."""
    return [None if ids[0] % 5 == 0 else float(sum(ids) % 2) for ids in completion_ids]


def wide_reward(completions, completion_ids, **kwargs):
    """-1 or 3, so that beliefs have a range to learn."""
    return [found if found is None else 4 * found - 1 for found in reward(completions, completion_ids)]


# They learn the range from the first batch, and the second one's advantages depend on it.
LEARN_A_RANGE = {"basis_history", "spo"}
# Signals that the policy and its gradients compute, in another order on two ranks.
OF_POLICY = {"energies", "entropies", "gradient_energies", "hidden_states", "log_probs", "values"}


class GivenRollouts(Keeps):
    """Completions by global row, of different lengths on different ranks; keeps the advantages of every batch."""

    def _generate_single_turn(self, prompt_ids, images, multimodal, num_generations, **kwargs):
        if num_generations == 1:  # the greedy rollouts: by prompt, whatever the rank
            return [[21 + sum(ids) % 50, 20 + len(ids)] for ids in prompt_ids], None
        first = self.accelerator.process_index * len(prompt_ids) + ROWS * self._generation_batch
        rows = range(first, first + len(prompt_ids))
        return [[20 + (row * 7 + k * k) % 50 for k in range(1 + row % (3 + row // 6))] for row in rows], None

    def noted(self, inputs, output, local):
        width = self._pending.newest.action_mask.shape[1]
        wide = torch.nn.functional.pad(local, (0, width - local.shape[1])) if local.ndim == 2 else local
        return self._pending.newest, self.accelerator.gather(wide).clone()


class Ragged(GivenRollouts):
    """Groups of unequal size, whose rollouts are drawn one by one."""

    def _generate_single_turn(self, prompt_ids, images, multimodal, num_generations, **kwargs):
        assert num_generations == 1
        return super()._generate_single_turn(prompt_ids, images, multimodal, GROUP, **kwargs)


class Noise(GivenRollouts):
    """Keeps the gradient of each micro-batch of this rank, before it is averaged over ranks: ``(micro-batches, P)``."""

    def __init__(self, *args, **kwargs):
        self.gradients = []
        super().__init__(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        found = {}
        trained = list(self.model.parameters())
        hooks = [
            p.register_hook(lambda g, k=k: found.__setitem__(k, g.clone().flatten())) for k, p in enumerate(trained)
        ]
        loss = super().training_step(*args, **kwargs)
        for hook in hooks:
            hook.remove()
        self.gradients.append(torch.cat([found[k] for k in range(len(trained))]))
        return loss


class Stopped(GivenRollouts):
    """The last rank alone gets a signal in its second step."""

    def training_step(self, *args, **kwargs):
        last = self.accelerator.process_index == self.accelerator.num_processes - 1
        if self.state.global_step == 1 and last:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(*args, **kwargs)


def train(output: Path, model: str, ranks: int, name: str, cls=GivenRollouts, baseline=None, **given):
    shape = {"per_device_train_batch_size": ROWS // ranks, "steps_per_generation": 1, "num_generations": GROUP}
    rewards = wide_reward if name in LEARN_A_RANGE else reward
    own = {"model": model, "reward_funcs": rewards, "max_completion_length": 12}
    trainer = tiny_trainer(output / f"run-{name}", baseline or name, cls, **{**shape, **own, **given})
    assert trainer.accelerator.num_processes == ranks
    # How `Stopped` ends.
    with suppress(SystemExit):
        trainer.train()
    return trainer


# Losses that are put together beside TRL's: the KL term that is ours, and objectives that are not TRL's.
LOSSES = {
    "k2": {"objective": "grpo", "kl_estimator": "k2"},
    "k2 over all tokens": {"objective": "dapo", "kl_estimator": "k2"},
    "gpg": {"objective": "gpg", "kl_estimator": "k2"},
    "own": {"objective": simple, "entropy_coef": 0.1},
}


def losses(output: Path, model: str, ranks: int) -> dict:
    """What a few steps with each of `LOSSES` log, and the policy they end with.

    By SGD: Adam's steps hardly depend on the size of a gradient.
    """
    results = {}
    for name, chosen in LOSSES.items():
        shape = {"num_iterations": 2, "max_steps": 4, "beta": 0.5, "epsilon": 0.05}
        trainer = train(output, model, ranks, "batch_mean", optim="sgd", learning_rate=1.0, **shape, **chosen)
        policy = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
        results[name] = {"log": trainer.state.log_history, "policy": policy}
    return results


def noise(output: Path, model: str, ranks: int) -> dict:
    """What is logged of the gradient's noise, and the gradients of all ranks, each scaled to the whole step's."""
    each = ROWS // ranks // 3
    shape = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": each, "steps_per_generation": each}
    settings = {"log_gradient_variance": True, "max_grad_norm": 1e-3, "max_steps": 2, **shape}
    trainer = train(output, model, ranks, "rloo", Noise, **settings)
    own = torch.stack(trainer.gradients).reshape(2, each, -1) * each
    gradients = trainer.accelerator.gather(own.transpose(0, 1).contiguous()).transpose(0, 1).clone()
    logged = [row for row in trainer.state.log_history if "gradient/variance" in row]
    return {"gradients": gradients, "logged": logged}


class Refilled(Keeps):
    """Keeps the global batches, of rollouts that are really sampled."""

    def noted(self, inputs, output, local):
        batch = self._pending.newest
        sums = self.accelerator.gather((output["completion_ids"] * output["completion_mask"]).sum(1))
        return {"prompt_ids": batch.prompt_ids, "rewards": batch.rewards, "sums": sums}


def refilled(output: Path, model: str, ranks: int) -> dict:
    """Batches of whole groups on each rank, drawn by the sampler that draws groups without variance anew."""
    settings = {"num_generations": 2, "max_steps": 3, "seed": 5}
    trainer = train(output, model, ranks, "rloo", Refilled, prompt_sampler=Dynamic(max_refills=40), **settings)
    return {"batches": trainer.kept, "rollouts": trainer.spending.rollouts}


# One for each optional field of a batch, and for each kind of advantage.
SELECTED, SAMPLER = "frontier, corrected", Frontier(correct=True)
UNEQUAL = "groups of unequal size"
FEW = ["rloo", "basis", "otb", "ppo", "remax", "bv_blend", "tokenwise", "targeted", SELECTED, UNEQUAL]
REST = [name for name in BASELINES if name not in FEW]


def main(output: Path, model: str, ranks: int, names: list[str]) -> tuple[dict, dict]:
    """Train with the baselines `names`; what else there is is done beside `FEW`."""
    results = {}
    for name in names:
        own = {"tokenwise": {"baseline": Tokenwise()}, SELECTED: {"baseline": Rloo(), "prompt_sampler": SAMPLER}}
        # It learns the gradients of the first batch, and the second one's advantages depend on them.
        own["targeted"] = {"baseline": BatchMean("optimal_token")}
        own[UNEQUAL] = {"baseline": named_baseline("basis", sums()), "max_generations": 7, "cls": Ragged}
        trainer = train(output, model, ranks, name, **own.get(name, {}))
        results[name] = [
            {
                "advantages": advantages,
                "rewards": batch.rewards,
                "group_ids": batch.group_ids,
                "prompt_ids": batch.prompt_ids,
                "action_mask": batch.action_mask,
                "of_policy": bool(OF_POLICY & (trainer.baseline.requires | trainer.baseline.learns_from)),
            }
            for batch, advantages in trainer.kept
        ]
    if names != FEW:
        return results, {}
    stopped = train(output, model, ranks, "rloo", Stopped, max_steps=4)
    return results, {
        "losses": losses(output, model, ranks),
        "noise": noise(output, model, ranks),
        "refilled": refilled(output, model, ranks),
        "stopped": stopped.state.global_step,
    }
