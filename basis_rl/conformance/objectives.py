"""`check_objective`: the promises of an objective's contract, run over every own objective and over anybody's.

It feeds an objective micro-batches that a trainer will feed it sooner or later (ragged rollouts, tool output between
the tokens, ratios far from 1, advantages of tokens) and says which promises (`basis_rl.objectives.base`) it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from basis_rl.functional.objectives import aggregate
from basis_rl.objectives.base import LossInputs, LossOutputs, LossSettings, Objective
from basis_rl.objectives.registry import AnyObjective, build_objective, objective_name

_TOLERANCE = 1e-6
_LENGTHS = (7, 4, 6, 1, 0)  # the last rollout has no action token, as a truncated one that is masked


class ObjectiveError(AssertionError):
    """An objective breaks its contract; the message says which promises, and what was seen."""


def example_inputs(objective: Objective, *, seed: int = 0, token_advantages: bool = False) -> LossInputs:
    """A ragged micro-batch in float64: ratios around 1 (exactly 1 where it declares ``on_policy``), tool output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    m, t = len(_LENGTHS), max(_LENGTHS)
    mask = torch.arange(t)[None] < torch.tensor(_LENGTHS)[:, None]
    mask[0, 2] = mask[2, 3] = False
    log_probs = -normal(m, t).abs()
    old = log_probs.clone() if objective.on_policy else log_probs + 0.3 * normal(m, t)
    weights = 0.5 + torch.rand(m, t, generator=generator, dtype=torch.float64)
    return LossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old + 0.05 * normal(m, t),
        rollout_weights=weights if objective.weighs_rollouts else None,
        advantages=normal(m, t) if token_advantages else normal(m),
        mask=mask,
        entropy=normal(m, t).abs(),
        settings=LossSettings(max_completion_length=t),
    )


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
    broken = [
        f"{check.__name__.removeprefix('_check_')}: {what}" for check in _CHECKS if (what := _outcome(check, own))
    ]
    if broken:
        raise ObjectiveError(f"Objective '{objective_name(own)}' breaks its contract.\n  " + "\n  ".join(broken))
    return [check.__name__.removeprefix("_check_") for check in _CHECKS]


def _outcome(check: Callable[[Objective], str | None], objective: Objective) -> str | None:
    """What is broken; an exception of the objective's is that too."""
    try:
        return check(objective)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _loss(outputs: LossOutputs, inputs: LossInputs) -> Tensor:
    tokens = inputs.mask.sum()
    length = inputs.settings.max_completion_length
    return aggregate(
        outputs.per_token, inputs.mask, outputs.aggregation, accumulation=1.0, max_length=length, tokens=tokens
    )


def _loss_and_gradient(objective: Objective, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The aggregated loss and its gradient with respect to ``log_probs``, ``(M, T)``."""
    loss = _loss(objective(inputs), inputs)
    return loss.detach(), torch.autograd.grad(loss, inputs.log_probs)[0]


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _check_finite(objective: Objective) -> str | None:
    inputs = example_inputs(objective)
    outputs = objective(inputs)
    for spread in (1.0, 30.0):  # exp(30 * 0.3) is a ratio of some thousands
        far = torch.where(inputs.mask, spread * (inputs.old_log_probs - inputs.log_probs), 0.0).detach()
        loss, gradient = _loss_and_gradient(objective, replace(inputs, old_log_probs=inputs.log_probs.detach() + far))
        if not bool(loss.isfinite()) or not bool(gradient.isfinite().all()):
            return f"the loss or its gradient is not finite, with log-ratios up to {float(far.abs().max()):.1f}"
    counted = {name: value[inputs.mask] if value.ndim else value for name, value in outputs.metrics.items()}
    bad = [name for name, value in counted.items() if not bool(value.isfinite().all())]
    return f"metrics that are not finite: {bad}" if bad else None


def _check_masked_tokens(objective: Objective) -> str | None:
    inputs = example_inputs(objective)
    loss, gradient = _loss_and_gradient(objective, inputs)
    for rubbish in (torch.nan, 1e30, -1e30):
        spoilt = _map(inputs, lambda x, rubbish=rubbish: torch.where(inputs.mask, x, rubbish))  # type: ignore[misc]
        found = _loss_and_gradient(objective, spoilt)
        if not _close(found[0], loss) or not _close(found[1], gradient):
            return f"{rubbish} where the mask is 0 changes the loss or its gradient"
    for left, right in ((0, 5), (3, 0)):
        wide = _map(inputs, lambda x, by=(left, right): torch.nn.functional.pad(x, by))  # type: ignore[misc]
        wide = replace(wide, mask=torch.nn.functional.pad(inputs.mask, (left, right)))
        wider, wide_gradient = _loss_and_gradient(objective, wide)
        if not _close(wider, loss) or not _close(wide_gradient[:, left : left + gradient.shape[1]], gradient):
            return "the loss or its gradient depends on how far the micro-batch is padded (count by the mask)"
    return None


def _map(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """`change` made to every ``(M, T)`` tensor but the mask; the log-probabilities are a leaf again."""
    values = {each.name: getattr(inputs, each.name) for each in fields(inputs) if each.name not in ("mask", "settings")}
    changed: dict[str, Any] = {key: change(x) if x is not None and x.ndim == 2 else x for key, x in values.items()}
    changed["log_probs"] = changed["log_probs"].detach().requires_grad_()
    return replace(inputs, **changed)


def _check_gradient_at_ratio_1(objective: Objective) -> str | None:
    return _differs_from_reinforce(objective, token_advantages=False)


def _check_token_advantages(objective: Objective) -> str | None:
    if not objective.token_advantages:
        return None
    inputs = example_inputs(objective)
    repeated = replace(inputs, advantages=inputs.advantages[:, None].expand(inputs.mask.shape))
    found, expected = _loss_and_gradient(objective, repeated), _loss_and_gradient(objective, inputs)
    if not _close(found[0], expected[0]) or not _close(found[1], expected[1]):
        return "the same advantage at all tokens of a rollout gives another loss than as one number"
    differs = _differs_from_reinforce(objective, token_advantages=True)
    return f"it declares token_advantages = True, but with an advantage of each token {differs}" if differs else None


def _differs_from_reinforce(objective: Objective, *, token_advantages: bool) -> str | None:
    """With ratios and weights of 1 the gradient is ``c`` times that of ``-A_t log pi_t``, aggregated alike, c > 0."""
    inputs = example_inputs(objective, token_advantages=token_advantages)
    present = inputs.log_probs.detach()
    weights = None if inputs.rollout_weights is None else torch.ones_like(present)
    inputs = replace(inputs, old_log_probs=present, rollout_log_probs=present, rollout_weights=weights)
    outputs = objective(inputs)
    plain = replace(outputs, per_token=-inputs.log_probs * inputs.token_advantages)
    (expected,) = torch.autograd.grad(_loss(plain, inputs), inputs.log_probs)
    (found,) = torch.autograd.grad(_loss(outputs, inputs), inputs.log_probs)
    factor = (found * expected).sum() / (expected * expected).sum()
    if not factor > 0:
        return "the gradient at ratio 1 does not raise what has a positive advantage (is a sign wrong?)"
    if not _close(found / factor, expected):
        return "the gradient at ratio 1 is not REINFORCE's, up to a factor"
    return None


def _check_row_order(objective: Objective) -> str | None:
    inputs = example_inputs(objective)
    order = torch.tensor([3, 0, 4, 2, 1])
    values = {each.name: getattr(inputs, each.name) for each in fields(inputs) if each.name != "settings"}
    moved: dict[str, Any] = {key: None if x is None else x[order] for key, x in values.items()}
    shuffled = objective(replace(inputs, **moved))
    straight = objective(inputs)
    if not _close((straight.per_token * inputs.mask)[order], shuffled.per_token * inputs.mask[order]):
        return "the losses depend on the order of the rollouts"
    return None


def _check_rollout_weights(objective: Objective) -> str | None:
    if not objective.weighs_rollouts:
        return None
    inputs = example_inputs(objective)
    assert inputs.rollout_weights is not None
    one = _loss_and_gradient(objective, replace(inputs, rollout_weights=torch.ones_like(inputs.rollout_weights)))
    without = _loss_and_gradient(objective, replace(inputs, rollout_weights=None))
    if not _close(one[0], without[0]) or not _close(one[1], without[1]):
        return "weights of 1 give another loss than no weights"
    if _close(_loss_and_gradient(objective, inputs)[1], without[1]):
        return "it declares weighs_rollouts = True, but the weights do not change the gradient"
    return None


def _check_purity(objective: Objective) -> str | None:
    inputs = example_inputs(objective).only_actions()
    given = {each.name: getattr(inputs, each.name) for each in fields(inputs) if each.name != "settings"}
    kept = {key: x.detach().clone() for key, x in given.items() if x is not None}
    first, second = objective.function(inputs), objective.function(inputs)
    changed = [key for key, x in kept.items() if not torch.equal(x, getattr(inputs, key).detach())]
    if changed:
        return f"it writes into its inputs: {', '.join(changed)}"
    if first.aggregation != second.aggregation or not torch.equal(first.per_token, second.per_token):
        return "the same inputs give other losses the second time"
    attached = [name for name, value in first.metrics.items() if value.requires_grad]
    return f"metrics with gradient, which keep the whole graph: {attached}" if attached else None


_CHECKS = (
    _check_finite,
    _check_masked_tokens,
    _check_gradient_at_ratio_1,
    _check_token_advantages,
    _check_row_order,
    _check_rollout_weights,
    _check_purity,
)
