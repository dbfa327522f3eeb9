"""Our baselines in verl, by `register_adv_est`.

verl asks an estimator with ``index``, the ``uid`` of each row, which is drawn anew whenever a prompt is. So what
believes something about prompts needs to be told which prompt a ``uid`` is. Each batch of prompts passes verl's agent
loop manager with the ``uid`` and all columns of the dataset; `VerlEstimator.manager` notes them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from basis_rl.adapters.base import Estimator
from basis_rl.baselines import Baseline


class VerlEstimator(Estimator):
    """What verl calls with each batch; see `register`."""

    def __init__(self, baseline: Baseline | str, state_file: str | Path | None = None) -> None:
        super().__init__(baseline, "verl", state_file=state_file)
        # ``uid`` -> id of its prompt, of those that were not trained on yet.
        self.prompts: dict[str, str] = {}
        self.is_told = False

    def __call__(
        self, token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, ``(N, T)`` each.

        Raises:
            ValueError: the reward has a KL penalty in it, or nobody has told which prompts these are.
        """
        if getattr(config, "use_kl_in_reward", False):
            raise ValueError("algorithm.use_kl_in_reward: a baseline of ours takes none here; use actor.use_kl_loss.")
        if hasattr(self.baseline, "believed") and not self.is_told:
            key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
            raise ValueError(f"'{self.name}' needs to know the prompts: name a class of `manager` as {key}.")
        rewards = token_level_rewards.sum(dim=-1)
        # verl's padding rows have a ``uid`` of their own, and in an asynchronous run that was resumed, so do rollouts
        # that had ended before: to a belief they are prompts that it has not met.
        known = {uid: self.prompts.pop(uid, uid) for uid in set(index)}
        advantages = self.estimate(rewards, response_mask, list(index), [known[uid] for uid in index])
        return advantages, rewards[:, None] * response_mask

    def manager(self, base: type, column: str = "prompt_id") -> type:
        """A subclass of the agent loop manager `base` that tells this estimator the prompt of each ``uid``.

        Args:
            base: ``verl.trainer.ppo.v1.AgentLoopManagerTQ``, or with ``trainer.use_v1=False``
                ``verl.experimental.agent_loop.AgentLoopManager``.
            column: of the dataset, with the ids of the prompts (`basis_rl.identity.prompt_id`).
        """
        estimator = self

        class PromptIdManager(base):
            def generate_sequences(self, prompts: Any) -> Any:
                # A DataProto, or a TensorDict of the columns.
                columns = getattr(prompts, "non_tensor_batch", prompts)
                if column not in columns:
                    raise ValueError(f"The dataset has no column '{column}' with the ids of the prompts.")
                estimator.is_told = True
                estimator.prompts.update(zip(map(str, columns["uid"]), map(str, columns[column]), strict=True))
                return super().generate_sequences(prompts)

        return PromptIdManager


def register(name: str, baseline: Baseline | str, state_file: str | Path | None = None) -> VerlEstimator:
    """Make `baseline` known to verl as ``algorithm.adv_estimator=NAME``, in this process.

    Args:
        name: that verl does not have yet.
        baseline: see `Estimator`.
        state_file: see `Estimator`; verl's checkpoints have no place for it.

    Raises:
        ValueError: the baseline does not work in verl, or verl has that name.
    """
    from verl.trainer.ppo.core_algos import register_adv_est

    estimator = VerlEstimator(baseline, state_file)
    register_adv_est(name)(estimator)
    return estimator
