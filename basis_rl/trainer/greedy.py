"""One greedy rollout for each distinct prompt, scored without a trace in the logs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from basis_rl.trainer.rewarding import total_rewards

GreedyRollouts = tuple[list[Any], list[list[int]], int]


def greedy_rewards(
    accelerator: Accelerator,
    inputs: Sequence[dict[str, Any]],
    names: Sequence[str],
    generate: Callable[[list[Any]], GreedyRollouts],
    score: Callable[[Sequence[Any], list[Any], list[Any], list[list[int]]], Tensor],
    weights: Tensor,
) -> tuple[Tensor, tuple[int, int]]:
    """``(N,)`` reward of the greedy rollout of each row's prompt, in the global row order, the same on every rank.

    Each rank generates for the distinct prompts among its own rows. Generation is collective (ZeRO-3, the vLLM server),
    so all ranks ask for the same number: a rank with fewer repeats its last one.

    Args:
        accelerator: gathers.
        inputs: this rank's rows of the dataset, one per rollout.
        names: their prompt ids.
        generate: prompts -> greedy rollouts, their token ids, and how many tokens are the model's own.
        score: rows, prompts, rollouts, token ids -> ``(N, F)`` of all ranks' rollouts.
        weights: ``(F,)`` of the reward functions.

    Returns:
        The rewards; and how many rollouts of how many tokens were generated on all ranks.
    """
    rows = [names.index(name) for name in dict.fromkeys(names)]
    counts = accelerator.gather(torch.tensor([len(rows)], device=accelerator.device))
    rows += [rows[-1]] * (int(counts.max()) - len(rows))
    asked = [dict(inputs[row]) for row in rows]
    # TRL adds turns to a prompt in place.
    prompts = [copy.deepcopy(row["prompt"]) for row in asked]
    rollouts, token_ids, tokens = generate(prompts)
    generated = accelerator.reduce(torch.tensor([len(rows), tokens], device=accelerator.device), reduction="sum")
    rewards = total_rewards(score(asked, prompts, rollouts, token_ids), weights).tolist()
    by_name = dict(zip(gather_object([names[row] for row in rows]), rewards, strict=True))
    found = torch.tensor([by_name[name] for name in gather_object(list(names))], dtype=torch.float32)
    rollout_count, token_count = generated.tolist()
    return found, (rollout_count, token_count)
