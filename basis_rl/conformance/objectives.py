"""`check_objective`: the promises of an objective's contract, run over every own objective and over anybody's.

It feeds an objective micro-batches that a trainer will feed it sooner or later (ragged rollouts, tool output between
the tokens, ratios far from 1, advantages of tokens) and says which promises (`basis_rl.objectives.base`) it breaks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from basis_rl.conformance.promises import PromiseError, check_promises, close, require, require_unwritten
from basis_rl.functional.objectives import aggregate
from basis_rl.objectives import AnyObjective, build_objective, objective_name
from basis_rl.objectives.base import LossInputs, LossOutputs, LossSettings, Objective

# The last rollout has no action token, as a truncated one that is masked.
_LENGTHS = (7, 4, 6, 1, 0)


class ObjectiveError(PromiseError):
    """An objective breaks its contract; the message says which promises, and what was seen."""

    kind = "objective"


def example_inputs(objective: Objective, *, seed: int = 0, token_advantages: bool = False) -> LossInputs:
    """A ragged micro-batch in float64: ratios around 1 (exactly 1 where it declares ``on_policy``), tool output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    m = len(_LENGTHS)
    t = max(_LENGTHS)
    mask = torch.arange(t)[None] < torch.tensor(_LENGTHS)[:, None]
    mask[0, 2] = mask[2, 3] = False
    log_probs = -normal(m, t).abs()
    old = log_probs.clone() if objective.on_policy else log_probs + 0.3 * normal(m, t)
    return LossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old,
        advantages=normal(m, t) if token_advantages else normal(m),
        mask=mask,
        entropy=normal(m, t).abs(),
        settings=LossSettings(max_completion_length=t),
    )


def reads_delta(objective: AnyObjective) -> bool:
    """Whether `LossSettings.delta` changes its losses."""
    if not isinstance(objective, Objective):
        return objective.loss_type not in ("cispo", "sapo", "vespo")
    inputs = example_inputs(objective)
    bounded = replace(inputs, settings=replace(inputs.settings, delta=0.5))
    return not torch.equal(objective(inputs).per_token, objective(bounded).per_token)


def check_objective(objective: str | AnyObjective | Callable[..., Any]) -> list[str]:
    """Check the promises of an own objective.

    Args:
        objective: an `Objective`, a registered name that is not one of TRL's losses, or ``module:function``.

    Returns:
        The names of the checks that were run and passed.

    Raises:
        ValueError: it is no objective, or one that TRL computes.
        ObjectiveError: every promise that is broken.
    """
    own = build_objective(objective)
    if not isinstance(own, Objective):
        raise ValueError(f"Objective '{objective_name(own)}' is a loss of TRL's; there is nothing to check.")
    name = f"Objective '{objective_name(own)}'"
    return check_promises(ObjectiveError, name, _Promises, {"": functools.partial(_Promises, own)})


def _loss(outputs: LossOutputs, inputs: LossInputs) -> Tensor:
    mask = inputs.mask
    length = inputs.settings.max_completion_length
    settings: dict[str, Any] = {"accumulation": 1.0, "max_length": length, "tokens": mask.sum()}
    return aggregate(outputs.per_token, mask, outputs.aggregation, **settings)


def _loss_and_gradient(objective: Objective, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The aggregated loss and its gradient with respect to ``log_probs``, ``(M, T)``."""
    loss = _loss(objective(inputs), inputs)
    return loss.detach(), torch.autograd.grad(loss, inputs.log_probs)[0]


def _close(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(close(a, b, 1e-6) for a, b in pairs)


def _tensors(inputs: LossInputs) -> dict[str, Tensor]:
    return {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}


class _Promises:
    """A method for each promise of the contract."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.inputs = example_inputs(objective)

    def finite(self) -> None:
        inputs = self.inputs
        outputs = self.objective(inputs)
        # exp(30 * 0.3) is a ratio of some thousands.
        for spread in (1.0, 30.0):
            far = torch.where(inputs.mask, spread * (inputs.old_log_probs - inputs.log_probs), 0.0).detach()
            old = inputs.log_probs.detach() + far
            found = _loss_and_gradient(self.objective, replace(inputs, old_log_probs=old))
            message = f"the loss or its gradient is not finite, with log-ratios up to {float(far.abs().max()):.1f}"
            require(all(bool(each.isfinite().all()) for each in found), message)
        counted = {name: value[inputs.mask] if value.ndim else value for name, value in outputs.metrics.items()}
        bad = [name for name, value in counted.items() if not bool(value.isfinite().all())]
        require(not bad, f"metrics that are not finite: {bad}")

    def masked_tokens(self) -> None:
        loss, gradient = _loss_and_gradient(self.objective, self.inputs)
        for sides in ((0, 5), (3, 0)):
            pad = functools.partial(torch.nn.functional.pad, pad=sides)
            padded: dict[str, Any] = {n: pad(x.detach()) for n, x in _tensors(self.inputs).items() if x.ndim == 2}
            padded["log_probs"].requires_grad_()
            wide, wide_gradient = _loss_and_gradient(self.objective, replace(self.inputs, **padded))
            same = _close((wide, loss), (wide_gradient, pad(gradient)))
            message = "the loss or its gradient depends on how far the micro-batch is padded (count by the mask)"
            require(same, message)

    def gradient_at_ratio_1(self) -> None:
        self._is_reinforce(self.inputs, "")

    def token_advantages(self) -> None:
        if not self.objective.token_advantages:
            return
        inputs = self.inputs
        repeated = replace(inputs, advantages=inputs.advantages[:, None].expand(inputs.mask.shape))
        found, expected = (_loss_and_gradient(self.objective, each) for each in (repeated, inputs))
        same = _close(*zip(found, expected, strict=True))
        require(same, "the same advantage at all tokens of a rollout gives another loss than as one number")
        inputs = example_inputs(self.objective, token_advantages=True)
        self._is_reinforce(inputs, "it declares token_advantages = True, but with an advantage of each token ")

    def _is_reinforce(self, inputs: LossInputs, lead: str) -> None:
        """With ratios of 1 the gradient is ``c`` times that of ``-A_t log pi_t``, c > 0."""
        present = inputs.log_probs.detach()
        inputs = replace(inputs, old_log_probs=present)
        outputs = self.objective(inputs)
        plain = replace(outputs, per_token=-inputs.log_probs * inputs.token_advantages)
        (expected,) = torch.autograd.grad(_loss(plain, inputs), inputs.log_probs)
        (found,) = torch.autograd.grad(_loss(outputs, inputs), inputs.log_probs)
        factor = (found * expected).sum() / (expected * expected).sum()
        gradient = f"{lead}the gradient at ratio 1"
        require(factor > 0, f"{gradient} does not raise what has a positive advantage (is a sign wrong?)")
        require(_close((found / factor, expected)), f"{gradient} is not REINFORCE's, up to a factor")

    def row_order(self) -> None:
        inputs = self.inputs
        order = torch.tensor([3, 0, 4, 2, 1])
        moved: dict[str, Any] = {name: x[order] for name, x in _tensors(inputs).items()}
        straight, shuffled = (self.objective(each).per_token for each in (inputs, replace(inputs, **moved)))
        same = _close(((straight * inputs.mask)[order], shuffled * inputs.mask[order]))
        require(same, "the losses depend on the order of the rollouts")

    def purity(self) -> None:
        inputs = self.inputs.only_actions()
        kept = copy.copy(inputs)
        vars(kept).update({name: x.detach().clone() for name, x in _tensors(inputs).items()})
        first = self.objective.function(inputs)
        second = self.objective.function(inputs)
        require_unwritten(kept, inputs)
        same = first.aggregation == second.aggregation and torch.equal(first.per_token, second.per_token)
        require(same, "the same inputs give other losses the second time")
        attached = [name for name, value in first.metrics.items() if value.requires_grad]
        require(not attached, f"metrics with gradient, which keep the whole graph: {attached}")
