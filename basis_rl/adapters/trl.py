"""Our baselines in TRL's own `GRPOTrainer`: a class that stands before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from basis_rl.adapters.base import Estimator
from basis_rl.baselines import Baseline
from basis_rl.data.rows import problem_text
from basis_rl.identity import row_id
from basis_rl.types import action_mask

STATE_FILE = "baseline.pt"


class BaselineMixin:
    """``class Trainer(BaselineMixin, GRPOTrainer)`` is TRL's trainer with a baseline of ours; evaluations are TRL's.

    Checkpoints have the baseline's state in `STATE_FILE`, and a run that resumes from one in its ``output_dir`` goes on
    with it. Rows are the same prompt if their ``prompt_id`` is, or without this column all their columns are.

    Args:
        args, kwargs: of TRL's trainer.
        baseline: see `Estimator`.

    Raises:
        ValueError: the baseline does not work in TRL's trainer.
    """

    def __init__(self, *args: Any, baseline: Baseline | str, **kwargs: Any) -> None:
        self.estimator = Estimator(baseline, "TRL", given=["prompt_texts"])
        super().__init__(*args, **kwargs)
        self.add_callback(StateInCheckpoints(self.estimator))  # type: ignore[attr-defined]

    def _calculate_rewards(self, *args: Any) -> Tensor:
        self._rewards_per_func: Tensor = super()._calculate_rewards(*args)  # type: ignore[misc]
        return self._rewards_per_func

    def _generate_and_score_completions(self: Any, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # Before TRL merges what a rollout function returns into the rows.
        prompt_ids = [row_id(row, None) for row in inputs]
        texts = [problem_text(row.get("prompt", "")) for row in inputs]
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:
            output["advantages"] = self._estimated(output, gather_object(prompt_ids), gather_object(texts))
        return output

    def _estimated(self: Any, output: dict[str, Any], prompt_ids: list[str], texts: list[str]) -> Tensor:
        """This rank's advantages, ``(B,)`` or with a baseline of each token ``(B, T)``."""
        weighted = self._rewards_per_func * self.reward_weights.to(self._rewards_per_func.device)
        rewards = weighted.nansum(dim=1).masked_fill(weighted.isnan().all(dim=1), torch.nan)
        own = action_mask(output)
        mask = self.accelerator.gather(self.accelerator.pad_across_processes(own, dim=1))
        # TRL puts the rollouts of a prompt next to each other, over all ranks.
        groups = [row // self.num_generations for row in range(len(prompt_ids))]
        advantages = self.estimator.estimate(rewards, mask, groups, prompt_ids, prompt_texts=texts)
        if self.estimator.baseline.token_level != "always":
            # That of the first action is that of the rollout.
            advantages = advantages.gather(1, mask.argmax(dim=1, keepdim=True))[:, 0]
        for name, value in self.estimator.metrics.items():
            self._metrics["train"][f"baseline/{name}"].append(value)
        # They push out those that TRL has put there.
        self._logs["advantages"].extend(advantages.reshape(len(prompt_ids), -1).mean(dim=1).tolist())
        local = advantages.split(len(own))[self.accelerator.process_index]
        return local[:, : own.shape[1]] if local.ndim == 2 else local


class StateInCheckpoints(TrainerCallback):
    """Keeps an estimator's state in the checkpoints of a run, and restores it where the run resumes from one."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator

    def _path(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir, f"checkpoint-{state.global_step}", STATE_FILE)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            torch.save(self.estimator.state_dict(), self._path(args, state))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            self.estimator.load(self._path(args, state))
