"""How much of a run would be spent on groups that teach nothing, before it is paid for."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from statistics import fmean

import torch
from torch import Tensor

from basis_rl.functional.passk import fit_beta, without_variance
from basis_rl.samplers import SAMPLERS, PromptSampler, sampler_name
from basis_rl.text import aligned

GROUPS = (1, 2, 4, 8, 16)
# Of each sampler: enough that the shares are within a percent or two.
_DRAWS = 100
# Below this the shares are hardly known.
_FEW = 16


class CountedBelief:
    """A value belief from k right rollouts of n, under the prior that all prompts together suggest.

    Attributes:
        a, b: ``(P,)`` of the beta distribution of each prompt's chance of being solved.
    """

    reward_range = (0.0, 1.0)

    def __init__(self, successes: Tensor, counts: Tensor) -> None:
        self.prior = fit_beta(successes, counts)
        self.a = self.prior[0] + successes.double()
        self.b = self.prior[1] + (counts - successes).double()

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See `ValueBelief.believed`; the ids are the numbers of the prompts."""
        rows = [int(name) for name in prompt_ids]
        a = self.a[rows]
        b = self.b[rows]
        return a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1))


def waste(rewards: Sequence[Sequence[float]], share: float, own: PromptSampler) -> str:
    """The share of groups without variance by size and sampler, as a table.

    Args:
        rewards: of some rollouts of each of P prompts.
        share: of all prompts that a generation batch takes, in (0, 1].
        own: the run's sampler.
    """
    scored = [[reward for reward in row if not isnan(reward)] for row in rewards]
    rewards = [row for row in scored if row]
    values = {reward for row in rewards for reward in row}
    if not values <= {0.0, 1.0}:
        return "Groups without variance are only estimated for rewards that are 0 or 1."
    if len(rewards) < _FEW or max(map(len, rewards)) < 2:
        return f"{len(rewards)} prompts are too few to say how many groups would have no variance: take more rollouts."
    successes = torch.tensor([sum(row) for row in rewards])
    counts = torch.tensor([len(row) for row in rewards])
    belief = CountedBelief(successes, counts)
    chances = {size: without_variance(belief.a, belief.b, size) for size in GROUPS}
    samplers = {name: kind() for name, kind in SAMPLERS.items() if name != "dynamic"}
    if not own.in_dataset_order:
        samplers[f"{sampler_name(own)} (this run)"] = own
    size = max(1, round(share * len(rewards)))
    lines = [_line(name, sampler, belief, size, chances) for name, sampler in samplers.items()]
    head = ["sampler", "mean value", *(f"G = {size}" for size in GROUPS), "effective prompts"]
    mean = float(successes.sum() / counts.sum())
    return (
        f"Of {len(rewards)} prompts, {float(counts.double().mean()):.3g} rollouts each, mean reward {mean:.3f}. Groups "
        "of G rollouts whose rewards are all equal, before the model has learnt anything:\n"
        f"{aligned([head, *lines])}\n"
        "A baseline that compares the rollouts of a group (grpo, rloo, ...) learns nothing from such a group. With "
        "num_generations 1 every group is one: take a baseline with a value of the prompt (basis_history, basis, spo)."
    )


def _line(name: str, sampler: PromptSampler, belief: CountedBelief, size: int, chances: dict[int, Tensor]) -> list[str]:
    """A sampler's draws by this belief: mean value, shares of groups without variance, effective prompts."""
    generator = torch.Generator().manual_seed(0)
    ids = [str(i) for i in range(len(belief.a))]
    draws = [sampler.draw(ids, belief, size, generator) for _ in range(_DRAWS)]
    rows = torch.cat([draw.rows for draw in draws])
    mean = float((belief.a / (belief.a + belief.b))[rows].mean())
    effective = [draw.metrics["effective_prompts"] for draw in draws if "effective_prompts" in draw.metrics]
    shares = [f"{float(chance[rows].mean()):.0%}" for chance in chances.values()]
    return [name, f"{mean:.2f}", *shares, f"{fmean(effective):.0%}" if effective else "not known"]
