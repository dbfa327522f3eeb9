"""The contract of an objective: a pure function from `LossInputs` to `LossOutputs`, and what it declares.

TRL's own losses are objectives as well (`TrlObjective`), but stay TRL's code. Letters: M rollouts of a micro-batch, T
tokens of a rollout. Not to be confused with a baseline, which estimates the advantage: an objective only says how an
advantage becomes a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from basis_rl.functional.objectives import AGGREGATIONS, Aggregation


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of the run that an objective may read.

    Attributes:
        epsilon_low: how far below 1 a ratio may be before it is clipped (``epsilon``).
        epsilon_high: how far above 1 (``epsilon_high``; without it ``epsilon``).
        delta: upper bound of a two-sided clip, or None.
        max_completion_length: tokens that a rollout may have.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    max_completion_length: int = 256


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What an objective may read of a micro-batch. Each ``(M, T)`` tensor is exactly 0 where the mask is.

    Attributes:
        log_probs: ``(M, T)`` log-probabilities of the sampled tokens under the present policy, with gradient.
        old_log_probs: ``(M, T)`` under the policy as it was when the batch was generated; equal to `log_probs`,
            without gradient, where it is still that policy, and for an objective that declares ``on_policy``. For one
            that declares ``from_rollout`` they are the engine's, where it gave them.
        advantages: ``(M,)``, or ``(M, T)`` from a baseline of tokens, if the objective declares that it takes them.
        mask: ``(M, T)`` bool, True on the tokens that the policy sampled: no padding, no output of tools.
        entropy: ``(M, T)`` of the policy at each token, in nats, with gradient.
        settings: of the run.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor
    settings: LossSettings = field(default_factory=LossSettings)

    @property
    def ratio(self) -> Tensor:
        """``(M, T)`` of each token, ``pi / pi_old``, with gradient; 1 outside the mask."""
        return torch.exp(self.log_probs - self.old_log_probs)

    @property
    def token_advantages(self) -> Tensor:
        """``(M, T)`` or ``(M, 1)``: the advantages in a shape that multiplies tensors of tokens."""
        return self.advantages if self.advantages.ndim == 2 else self.advantages[:, None]

    def only_actions(self) -> LossInputs:
        """The same with exact zeros outside the mask, so that nothing there can have an influence."""
        mask = self.mask.bool()
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and x.ndim == 2}
        zeroed: dict[str, Any] = {name: torch.where(mask, x, 0.0) for name, x in tensors.items()}
        return replace(self, **{**zeroed, "mask": mask})


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """What an objective returns.

    Attributes:
        per_token: ``(M, T)`` losses, to be minimised; what stands outside the mask does not count.
        aggregation: how they become one number, a name of `basis_rl.functional.objectives.AGGREGATIONS`.
        metrics: tensors without gradient, logged as ``objective/NAME``: of ``(M, T)`` the mean over the action tokens
            of all ranks, of a scalar the mean over ranks. The same names in each call.
    """

    per_token: Tensor
    aggregation: Aggregation
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss of one's own: a pure function and what it declares. `objective` makes one of a function.

    The trainer multiplies its losses by the mask of high entropy (``top_entropy_quantile``), by the mask of sequences
    that are too far off-policy (``off_policy_mask_threshold``) and by the weights of the rollout correction, as TRL
    does with its own; KL, entropy bonus and the router's auxiliary loss are added to it.

    Attributes:
        name: what cards and records call it.
        function: returns the losses. It keeps no state, draws no random numbers, and changes none of its inputs.
        token_advantages: whether each token's own advantage reaches its gradient. If not, the objective is refused
            with a baseline that gives an advantage to each token.
        on_policy: whether it takes the present policy for the one that sampled, so that each ratio is 1.
        from_rollout: whether its ratios are those to the engine that sampled, of whatever step (verl's bypass mode).
            They correct for all that lies between, so there are no further weights.
        by_micro_batch: whether the losses of a rollout depend on the others of its micro-batch.
    """

    name: str
    function: Callable[[LossInputs], LossOutputs]
    token_advantages: bool
    on_policy: bool = False
    from_rollout: bool = False
    by_micro_batch: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The losses of `inputs`, whatever stands outside their mask.

        Raises:
            ValueError: the function returned something else than losses ``(M, T)`` and a known aggregation.
        """
        outputs = self.function(inputs.only_actions())
        returned = f"Objective '{self.name}' returned"
        if not isinstance(outputs, LossOutputs):
            raise ValueError(f"{returned} a {type(outputs).__name__}, not LossOutputs.")
        if outputs.aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise ValueError(f"{returned} the aggregation '{outputs.aggregation}'. Known: {known}.")
        shape = tuple(inputs.mask.shape)
        if outputs.per_token.shape != shape:
            raise ValueError(f"{returned} losses of shape {tuple(outputs.per_token.shape)}, not (M, T) = {shape}.")
        for name, value in outputs.metrics.items():
            if value.ndim and value.shape != shape:
                wrong = f"the metric '{name}' of shape {tuple(value.shape)}"
                raise ValueError(f"{returned} {wrong}, which is neither a scalar nor (M, T) = {shape}.")
        return outputs


def objective(
    *, token_advantages: bool, **declared: bool
) -> Callable[[Callable[[LossInputs], LossOutputs]], Objective]:
    """Make an `Objective` of a function; the arguments are its declarations. Its name is ``module:function``."""

    def made(function: Callable[[LossInputs], LossOutputs]) -> Objective:
        name = f"{function.__module__}:{function.__name__}"
        return Objective(name=name, function=function, token_advantages=token_advantages, **declared)

    return made


@dataclass(frozen=True)
class TrlObjective:
    """A loss that TRL computes, by its two settings.

    Attributes:
        loss_type: TRL's.
        importance_sampling_level: TRL's: ``token``, or ``sequence`` for one ratio of the whole rollout.
    """

    loss_type: str
    importance_sampling_level: str = "token"

    @property
    def name(self) -> str:
        """The two settings in words."""
        level = self.importance_sampling_level
        return self.loss_type if level == "token" else f"{self.loss_type} with {level} ratios"

    @property
    def token_advantages(self) -> bool:
        """Whether each token's own advantage reaches its gradient.

        With one ratio a rollout, the gradient passes through the ratio: each token gets the mean of the advantages.
        ``cispo`` and ``vespo`` only weigh by the ratio, without gradient; theirs passes through each token's
        ``A_t log pi_t``.
        """
        return self.importance_sampling_level == "token" or self.loss_type in ("cispo", "vespo")
