"""`check_baseline`: one conformance matrix, run over every registered baseline and over anybody's own.

It feeds an object batches that a trainer will feed it sooner or later (ragged groups, unscored rollouts, rows in
another order, padding) and says which promise of the contract (`basis_rl.baselines.base.Baseline`) it breaks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, LearnedBaseline, scorable_rows
from basis_rl.types import Advantages, RolloutBatch

_TOLERANCE = 1e-5


class BaselineError(AssertionError):
    """A baseline breaks its contract; the message says which promise, and what was seen."""


def example_batch(
    baseline: Baseline, prompt_ids: list[str], *, seed: int = 0, step: int = 0, unscored: bool = True
) -> RolloutBatch:
    """A ragged batch over `prompt_ids`: groups of the baseline's minimum or more, 0/1 rewards, some missing."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [baseline.min_group_size + i % 3 for i in range(len(prompt_ids))]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    n, t = int(group_ids.numel()), 7
    rewards = torch.randint(0, 2, (n,), generator=generator).float()
    lengths = torch.randint(1, t + 1, (n,), generator=generator)
    mask = torch.arange(t)[None] < lengths[:, None]
    if unscored:
        rewards[0] = rewards[n // 2] = torch.nan
        mask[-1] = False
    ids = [prompt_ids[g] for g in group_ids.tolist()]
    optional: dict[str, Any] = {
        "energies": torch.rand((n, t), generator=generator) * mask,
        "kl": 0.1 * torch.randn((n, t), generator=generator) * mask,
        "rollout_weights": torch.rand((n, t), generator=generator) * mask,
        "values": torch.rand((n, t), generator=generator) * mask,
        "greedy_rewards": torch.randint(0, 2, (len(sizes),), generator=generator).float()[group_ids],
        "prompt_texts": [f"What is {prompt_id}?" for prompt_id in ids],
    }
    return RolloutBatch(
        rewards=rewards,
        group_ids=group_ids,
        prompt_ids=ids,
        action_mask=mask,
        step=step,
        **{name: optional[name] for name in baseline.requires},
    )


def check_baseline(make: Callable[[], Baseline], prompt_ids: list[str] | None = None) -> list[str]:
    """Run the conformance matrix on the baseline that `make` builds.

    Args:
        make: builds a fresh object each time it is called.
        prompt_ids: ids that the baseline knows, at least 4, if it keeps a table of its own; any names otherwise.

    Returns:
        The names of the checks that were run and passed.

    Raises:
        BaselineError: on the first promise that is broken.
    """
    ids = prompt_ids or [f"prompt-{i}" for i in range(8)]
    for check in _CHECKS:
        check(make, ids)
    return [check.__name__.removeprefix("_check_") for check in _CHECKS]


def _fail(baseline: Baseline, what: str) -> BaselineError:
    return BaselineError(f"{type(baseline).__name__} {what}")


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _check_shape_and_zeros(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    result = baseline.advantages(batch)
    n, t = batch.action_mask.shape
    for name, tensor in (("values", result.values), ("baseline", result.baseline)):
        if tuple(tensor.shape) not in {(n,), (n, t)}:
            raise _fail(baseline, f"returns {name} of shape {tuple(tensor.shape)}, not ({n},) or ({n}, {t})")
        if not bool(tensor.isfinite().all()):
            raise _fail(baseline, f"returns {name} that are not finite (rows without a reward are NaN in `rewards`)")
    zero = ~scorable_rows(batch)
    if result.values.ndim == 2:
        zero = zero[:, None] | ~batch.action_mask
    if bool((result.values[zero] != 0).any()):
        raise _fail(baseline, "gives an advantage that is not 0 where the reward is NaN or the mask is 0")
    bad = [name for name, value in result.metrics.items() if not isinstance(value, (int, float))]
    if bad:
        raise _fail(baseline, f"returns metrics that are not plain numbers: {bad}")


def _check_token_level(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    kl = torch.full(batch.action_mask.shape, 0.1) * batch.action_mask
    for placed, given in (("out", None), *((("", kl),) if baseline.reads_kl else ())):
        tokens = baseline.advantages(replace(batch, kl=given)).values.ndim == 2
        declared = baseline.token_level == "always" or (baseline.token_level == "with_kl" and given is not None)
        if tokens != declared:
            raise _fail(
                baseline,
                f"says token_level = '{baseline.token_level}', but returns advantages of "
                f"{'tokens' if tokens else 'rollouts'} with{placed} KL in the reward",
            )


def _check_all_unscored(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    result = baseline.advantages(replace(batch, rewards=torch.full_like(batch.rewards, torch.nan)))
    if bool((result.values != 0).any()) or not bool(result.baseline.isfinite().all()):
        raise _fail(baseline, "does not give advantage 0 and a finite baseline when no rollout has a reward")


def _check_one_scored_row(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids, unscored=False)
    rewards = torch.full_like(batch.rewards, torch.nan)
    rewards[0] = 1.0
    result = baseline.advantages(replace(batch, rewards=rewards))
    if not bool(result.values.isfinite().all()):
        raise _fail(baseline, "returns advantages that are not finite when one rollout alone has a reward")
    if baseline.min_group_size > 1 and bool((result.values != 0).any()):
        raise _fail(baseline, "gives an advantage to the only scored rollout of a group, though it needs two")


def _check_no_side_effect(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    kept = copy.deepcopy(batch)
    before = _serialized(baseline)
    first, second = baseline.advantages(batch), baseline.advantages(batch)
    if _serialized(baseline) != before or not _same(first, second):
        raise _fail(baseline, "changes its state in `advantages` (state belongs in `update`)")
    for name in (
        "rewards",
        "group_ids",
        "action_mask",
        "energies",
        "kl",
        "rollout_weights",
        "values",
        "greedy_rewards",
    ):
        old, new = getattr(kept, name), getattr(batch, name)
        if old is not None and not torch.equal(torch.nan_to_num(old.double()), torch.nan_to_num(new.double())):
            raise _fail(baseline, f"writes into the batch's `{name}`")


def _check_row_order(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(1))
    straight, shuffled = baseline.advantages(batch), baseline.advantages(batch.take(order))
    if not _close(straight.values[order], shuffled.values) or not _close(straight.baseline[order], shuffled.baseline):
        raise _fail(baseline, "depends on the order of the rows (groups are told by `group_ids`, not by position)")


def _check_group_names(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    renamed = replace(batch, group_ids=1000 - 7 * batch.group_ids)
    if not _close(baseline.advantages(batch).values, baseline.advantages(renamed).values):
        raise _fail(baseline, "depends on the numbers in `group_ids`, not only on which rows share one")


def _check_padding(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    batch = example_batch(baseline, ids)
    values = baseline.advantages(batch).values
    t = batch.action_mask.shape[1]
    for left, right in ((0, 5), (3, 0)):
        padded: dict[str, Any] = {}
        for name in ("action_mask", "energies", "kl", "rollout_weights", "values"):
            value: Tensor | None = getattr(batch, name)
            padded[name] = None if value is None else torch.nn.functional.pad(value, (left, right))
        wide = baseline.advantages(replace(batch, **padded)).values
        if values.ndim == 2:
            if bool((wide[:, :left] != 0).any() or (wide[:, left + t :] != 0).any()):
                raise _fail(baseline, "gives an advantage to padding")
            wide = wide[:, left : left + t]
        if not _close(values, wide):
            raise _fail(baseline, "depends on how far the batch is padded")


def _check_scope(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    if baseline.scope != "group":
        return
    batch = example_batch(baseline, ids)
    whole = baseline.advantages(batch).values
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero().flatten()
        if not _close(whole[rows], baseline.advantages(batch.take(rows)).values):
            raise _fail(baseline, "says scope = 'group', but a group's advantages depend on other groups")


def _check_own_reward(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    if baseline.uses_own_reward:
        return
    batch = example_batch(baseline, ids, unscored=False)
    before = baseline.advantages(batch).baseline
    for row in range(len(batch.rewards)):
        rewards = batch.rewards.clone()
        rewards[row] = 1.0 - rewards[row]
        if not _close(before[row], baseline.advantages(replace(batch, rewards=rewards)).baseline[row]):
            raise _fail(
                baseline, "has a baseline that depends on the own reward; say `uses_own_reward = True` if meant"
            )


def _check_kl_in_the_reward(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    if not baseline.reads_kl:
        return
    batch = example_batch(baseline, ids, unscored=False)
    kl = 0.1 + 0.1 * torch.arange(batch.action_mask.numel()).reshape(batch.action_mask.shape) * batch.action_mask
    without = baseline.advantages(replace(batch, kl=None)).values
    zero = baseline.advantages(replace(batch, kl=torch.zeros_like(kl))).values
    if zero.ndim == 2 and without.ndim == 1:
        without = without[:, None] * batch.action_mask
    if not _close(zero, without):
        raise _fail(baseline, "changes its advantages for a KL penalty of 0 in the reward")
    penalised = baseline.advantages(replace(batch, kl=kl)).values
    if not bool(penalised.isfinite().all()) or _close(penalised, zero):
        raise _fail(baseline, "says reads_kl = True, but a KL penalty in the reward does not change its advantages")


def _check_loss_of_rows(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    if not isinstance(baseline, LearnedBaseline):
        return
    batch = example_batch(baseline, ids)
    predicted = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss = baseline.loss(predicted, batch)
    if loss.per_token.shape != predicted.shape or not bool(loss.per_token[loss.counts].isfinite().all()):
        raise _fail(baseline, f"has a loss that is not finite, or not of the shape {tuple(predicted.shape)}")
    if bool((loss.counts & ~(batch.action_mask & scorable_rows(batch)[:, None])).any()):
        raise _fail(baseline, "learns from tokens that are no actions, or whose rollout has no reward")
    (gradient,) = torch.autograd.grad((loss.per_token * loss.counts).sum(), predicted)
    if bool((gradient[~loss.counts] != 0).any()) or not bool((gradient != 0).any()):
        raise _fail(baseline, "has a loss whose gradient is 0 everywhere, or is not where the token does not count")
    rows = torch.arange(len(batch.rewards)).flip(0)[1::2]
    part = baseline.loss(predicted[rows], batch.take(rows))
    if not _close(loss.per_token[rows].detach(), part.per_token.detach()):
        raise _fail(baseline, "has a loss of a rollout that depends on which others are there")


def _check_state_round_trip(make: Callable[[], Baseline], ids: list[str]) -> None:
    baseline = make()
    for step in range(3):
        baseline.update(example_batch(baseline, ids, seed=step, step=step))
    buffer = io.BytesIO()
    torch.save(baseline.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    restored = make()
    restored.load_state_dict(state)
    batch = example_batch(baseline, ids, seed=9, step=3)
    if not _same(baseline.advantages(batch), restored.advantages(batch)):
        raise _fail(baseline, "does not come back the same from state_dict and load_state_dict")
    wrong: list[dict[str, Any]] = [{**state, "not_a_key": 1}]
    wrong += [{k: v for k, v in state.items() if k != gone} for gone in state]
    for bad in wrong:
        try:
            make().load_state_dict(bad)
        except ValueError:
            continue
        raise _fail(baseline, f"loads a state with the keys {sorted(bad)} without a ValueError")


def _serialized(baseline: Baseline) -> bytes:
    buffer = io.BytesIO()
    torch.save(baseline.state_dict(), buffer)
    return buffer.getvalue()


def _same(a: Advantages, b: Advantages) -> bool:
    return torch.equal(a.values, b.values) and torch.equal(a.baseline, b.baseline)


_CHECKS = (
    _check_shape_and_zeros,
    _check_token_level,
    _check_all_unscored,
    _check_one_scored_row,
    _check_no_side_effect,
    _check_row_order,
    _check_group_names,
    _check_padding,
    _check_scope,
    _check_own_reward,
    _check_kl_in_the_reward,
    _check_loss_of_rows,
    _check_state_round_trip,
)
