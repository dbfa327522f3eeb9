"""One greedy rollout for each distinct prompt, scored without a trace in the logs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import gather_object
from torch import Tensor

from basis_rl.trainer.gather import row_prompt_id
from basis_rl.trainer.ports import GeneratingRun
from basis_rl.trainer.rewarding import total_rewards


def greedy_rewards(run: GeneratingRun, inputs: Sequence[dict[str, Any]]) -> Tensor:
    """``(N,)`` reward of the greedy rollout of each row's prompt, in the global row order, the same on every rank.

    Each rank generates for the distinct prompts among its own rows. Generation is collective (ZeRO-3, the vLLM server),
    so all ranks ask for the same number: a rank with fewer repeats its last one.
    """
    names = [row_prompt_id(row) for row in inputs]
    rows = [names.index(name) for name in dict.fromkeys(names)]
    counts = run.accelerator.gather(torch.tensor([len(rows)], device=run.accelerator.device))
    rows += [rows[-1]] * (int(counts.max()) - len(rows))
    asked = [dict(inputs[row]) for row in rows]
    prompts = [copy.deepcopy(row["prompt"]) for row in asked]
    with _greedy(run):
        rollouts, token_ids, tokens = run.rollouts_apart(prompts)
    drawn = torch.tensor([len(rows), tokens], device=run.accelerator.device)
    run.spending.draw(*run.accelerator.reduce(drawn, reduction="sum").tolist())
    scores = run.scores_apart(asked, prompts, rollouts, token_ids)
    rewards = total_rewards(scores, run.reward_weights).tolist()
    by_name = dict(zip(gather_object([names[row] for row in rows]), rewards, strict=True))
    return torch.tensor([by_name[name] for name in gather_object(names)], dtype=torch.float32)


def _greedy(run: GeneratingRun) -> AbstractContextManager[Any]:
    """Within it the run's generation is greedy, whichever engine it has."""
    if run.use_vllm:
        return patch.multiple(run.vllm_generation, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    config = copy.deepcopy(run.generation_config)
    config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
    return patch.object(run, "generation_config", config)
