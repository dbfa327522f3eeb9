"""`check_baseline`: one conformance matrix, run over every registered baseline and over anybody's own.

It feeds an object batches that a trainer will feed it sooner or later (ragged groups, unscored rollouts, rows in
another order, padding) and says which promise of the contract (`basis_rl.baselines.base.Baseline`) it breaks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, LearnedBaseline
from basis_rl.types import Advantages, RolloutBatch

_TOLERANCE = 1e-5


Rewards = Literal["binary", "graded", "negative"]


class BaselineError(AssertionError):
    """A baseline breaks its contract; the message says which promises, and what was seen."""


def example_batch(
    baseline: Baseline,
    prompt_ids: list[str],
    *,
    seed: int = 0,
    step: int = 0,
    unscored: bool = True,
    kind: Rewards = "binary",
) -> RolloutBatch:
    """A ragged batch over `prompt_ids`: groups of the baseline's minimum or more, some rewards missing.

    Rewards are 0 or 1, anything between (``graded``), or between -1 and 1 (``negative``).

    Raises:
        BaselineError: the baseline requires a field that no batch has.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [baseline.min_group_size + i % 3 for i in range(len(prompt_ids))]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    n, t = int(group_ids.numel()), 7
    rewards = torch.randint(0, 2, (n,), generator=generator).float()
    if kind != "binary":
        rewards = torch.rand(n, generator=generator) * (1.0 if kind == "graded" else 2.0) - float(kind == "negative")
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
        "log_probs": -torch.rand((n, t), generator=generator) * mask,
        "reward_parts": _parts(rewards),
        "greedy_rewards": torch.randint(0, 2, (len(sizes),), generator=generator).float()[group_ids],
        "prompt_texts": [f"What is {prompt_id}?" for prompt_id in ids],
    }
    unknown = sorted(set(baseline.requires) - set(optional))
    if unknown:
        raise _fail(baseline, f"requires {unknown}; a batch can have {sorted(optional)}")
    return RolloutBatch(
        rewards=rewards,
        group_ids=group_ids,
        prompt_ids=ids,
        action_mask=mask,
        step=step,
        reward_weights=torch.tensor([1.0, 0.5]) if "reward_parts" in baseline.requires else None,
        **{name: optional[name] for name in baseline.requires},
    )


def _parts(rewards: Tensor) -> Tensor:
    """``(N, 2)`` rewards of two functions, weighed 1 and 0.5, that make up `rewards`."""
    second = (torch.arange(len(rewards)) % 3).float()
    return torch.stack([rewards - 0.5 * second, torch.where(rewards.isnan(), torch.nan, second)], dim=1)


def check_baseline(make: Any, prompt_ids: list[str] | None = None) -> list[str]:
    """Run the conformance matrix on the baseline that `make` builds: as it is built, and after some batches.

    Args:
        make: builds a fresh object each time it is called (a class does), or an object, which is copied.
        prompt_ids: ids that the baseline knows, at least 4, if it keeps a table of its own; by default those of its
            value table, if it has one, else any names.

    Returns:
        The names of the promises, all of which it keeps.

    Raises:
        BaselineError: it breaks some of them; all are named.
    """
    build = _builder(make)
    built = build()
    ids = prompt_ids or list(getattr(getattr(built, "values", None), "prompt_ids", ()))[:8]
    ids = ids if len(ids) >= 4 else [f"prompt-{i}" for i in range(8)]
    cases = [
        _Case(build, ids, "binary", ""),
        _Case(lambda: _warm(build(), ids), ids, "binary", " (after some batches)"),
        _Case(build, ids, "graded", " (rewards between 0 and 1)"),
        _Case(lambda: _warm(build(), ids), ids, "negative", " (after some batches, rewards between -1 and 1)"),
    ]
    broken = []
    for check in _CHECKS:
        found = next((told for case in cases if (told := _outcome(check, case)) is not None), None)
        if found is not None:
            broken.append(f"{check.__name__.removeprefix('_check_')}: {found}")
        if found is not None and found.startswith("raises"):
            break  # the same would be told of all that follow
    if broken:
        count = f"{len(broken)} of the promises" if len(broken) > 1 else "a promise"
        raise BaselineError(f"{type(built).__name__} breaks {count} of a baseline:\n- " + "\n- ".join(broken))
    return [check.__name__.removeprefix("_check_") for check in _CHECKS]


@dataclass(frozen=True)
class _Case:
    """A baseline in some state, and the batches that it is fed."""

    make: Callable[[], Baseline]
    ids: list[str]
    kind: Rewards
    told: str

    def batch(self, baseline: Baseline, **given: Any) -> RolloutBatch:
        return example_batch(baseline, self.ids, kind=self.kind, **given)


def _builder(make: Any) -> Callable[[], Baseline]:
    """A function that builds the object again.

    Raises:
        BaselineError: nothing does.
    """
    if isinstance(make, Baseline):
        return lambda: copy.deepcopy(make)
    name = getattr(make, "__name__", type(make).__name__)
    if not callable(make):
        raise BaselineError(
            f"A {type(make).__name__} is not a baseline. Give a subclass of basis_rl.baselines.Baseline."
        )
    try:
        built = make()
    except Exception as error:
        raise BaselineError(
            f"{name} cannot be built: {type(error).__name__}: {error} (`basis-rl check NAME --ARGUMENT VALUE` gives "
            "arguments)."
        ) from error
    if not isinstance(built, Baseline):
        raise BaselineError(f"{name} builds a {type(built).__name__}, no subclass of basis_rl.baselines.Baseline.")
    return make


def _warm(baseline: Baseline, ids: list[str]) -> Baseline:
    """After three batches, the second of which has no reward at all."""
    for step in range(3):
        batch = example_batch(baseline, ids, seed=20 + step, step=step)
        baseline.update(with_rewards(batch, torch.full_like(batch.rewards, torch.nan)) if step == 1 else batch)
    return baseline


def _outcome(check: Callable[[_Case], None], case: _Case) -> str | None:
    """What is broken; an exception of the object's is that too."""
    try:
        check(case)
    except BaselineError as error:
        return f"{error}{case.told}"
    except Exception as error:
        what = f"raises {type(error).__name__}: {error}{case.told}"
        return f"{what} (optional fields of a batch are there only if `requires` names them)"
    return None


def with_rewards(batch: RolloutBatch, rewards: Tensor) -> RolloutBatch:
    """The batch with other rewards ``(N,)``, those of the functions along with them."""
    parts = None if batch.reward_parts is None else _parts(rewards)
    return replace(batch, rewards=rewards, reward_parts=parts)


def _advantages(baseline: Baseline, batch: RolloutBatch) -> Advantages:
    found: Any = baseline.advantages(batch)
    if not isinstance(found, Advantages):
        raise _fail(baseline, f"returns a {type(found).__name__} from `advantages`, not Advantages")
    for name in ("values", "baseline"):
        if not isinstance(getattr(found, name), Tensor):
            raise _fail(baseline, f"returns {name} that are a {type(getattr(found, name)).__name__}, not a tensor")
    return found


def _some_rows(batch: RolloutBatch) -> range:
    """Some eight rows, of different groups: what is tried with each is the same."""
    return range(0, len(batch.rewards), max(1, len(batch.rewards) // 8))


def _silent_rows(batch: RolloutBatch) -> Tensor:
    """Rows without a reward or a token; found here once more, not by what the baselines themselves use."""
    return batch.rewards.isnan() | ~batch.action_mask.any(dim=1)


def _fail(baseline: Baseline, what: str) -> BaselineError:
    return BaselineError(f"{type(baseline).__name__} {what}")


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _check_shape_and_zeros(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    result = _advantages(baseline, batch)
    n, t = batch.action_mask.shape
    for name, tensor in (("values", result.values), ("baseline", result.baseline)):
        if tuple(tensor.shape) not in {(n,), (n, t)}:
            raise _fail(baseline, f"returns {name} of shape {tuple(tensor.shape)}, not ({n},) or ({n}, {t})")
        if not bool(tensor.isfinite().all()):
            raise _fail(baseline, f"returns {name} that are not finite (rows without a reward are NaN in `rewards`)")
    zero = _silent_rows(batch)
    if result.values.ndim == 2:
        zero = zero[:, None] | ~batch.action_mask
    if bool((result.values[zero] != 0).any()):
        raise _fail(baseline, "gives an advantage that is not 0 where the reward is NaN or the mask is 0")
    bad = [name for name, value in result.metrics.items() if not isinstance(value, (int, float))]
    if bad:
        raise _fail(baseline, f"returns metrics that are not plain numbers: {bad}")


def _check_token_level(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    kl = torch.full(batch.action_mask.shape, 0.1) * batch.action_mask
    for placed, given in (("out", None), *((("", kl),) if baseline.reads_kl else ())):
        tokens = _advantages(baseline, replace(batch, kl=given)).values.ndim == 2
        declared = baseline.token_level == "always" or (baseline.token_level == "with_kl" and given is not None)
        if tokens != declared:
            raise _fail(
                baseline,
                f"says token_level = '{baseline.token_level}', but returns advantages of "
                f"{'tokens' if tokens else 'rollouts'} with{placed} KL in the reward",
            )


def _check_all_unscored(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    result = _advantages(baseline, with_rewards(batch, torch.full_like(batch.rewards, torch.nan)))
    if bool((result.values != 0).any()) or not bool(result.baseline.isfinite().all()):
        raise _fail(baseline, "does not give advantage 0 and a finite baseline when no rollout has a reward")


def _check_one_scored_row(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline, unscored=False)
    rewards = torch.full_like(batch.rewards, torch.nan)
    rewards[0] = 1.0
    result = _advantages(baseline, with_rewards(batch, rewards))
    if not bool(result.values.isfinite().all()):
        raise _fail(baseline, "returns advantages that are not finite when one rollout alone has a reward")
    if baseline.min_group_size > 1 and bool((result.values != 0).any()):
        raise _fail(baseline, "gives an advantage to the only scored rollout of a group, though it needs two")


def _check_no_side_effect(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    kept = copy.deepcopy(batch)
    before = _serialized(baseline)
    first, second = _advantages(baseline, batch), _advantages(baseline, batch)
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
        "log_probs",
        "reward_parts",
        "greedy_rewards",
    ):
        old, new = getattr(kept, name), getattr(batch, name)
        if old is not None and not torch.allclose(old.double(), new.double(), rtol=0, atol=0, equal_nan=True):
            raise _fail(baseline, f"writes into the batch's `{name}`")


def _check_row_order(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(1))
    straight, shuffled = _advantages(baseline, batch), _advantages(baseline, batch.take(order))
    if not _close(straight.values[order], shuffled.values) or not _close(straight.baseline[order], shuffled.baseline):
        raise _fail(baseline, "depends on the order of the rows (`group_ids` defines the groups, not the position)")


def _check_group_names(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    renamed = replace(batch, group_ids=1000 - 7 * batch.group_ids)
    if not _close(_advantages(baseline, batch).values, _advantages(baseline, renamed).values):
        raise _fail(baseline, "depends on the numbers in `group_ids`, not only on which rows share one")


def _check_padding(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    values = _advantages(baseline, batch).values
    t = batch.action_mask.shape[1]
    for left, right in ((0, 5), (3, 0)):
        padded: dict[str, Any] = {}
        for name in ("action_mask", "energies", "kl", "rollout_weights", "values", "log_probs"):
            value: Tensor | None = getattr(batch, name)
            padded[name] = None if value is None else torch.nn.functional.pad(value, (left, right))
        wide = _advantages(baseline, replace(batch, **padded)).values
        if values.ndim == 2:
            if bool((wide[:, :left] != 0).any() or (wide[:, left + t :] != 0).any()):
                raise _fail(baseline, "gives an advantage to padding")
            wide = wide[:, left : left + t]
        if not _close(values, wide):
            raise _fail(baseline, "depends on how far the batch is padded")


def _check_own_reward(case: _Case) -> None:
    baseline = case.make()
    if baseline.uses_own_reward:
        return
    batch = case.batch(baseline, unscored=False)
    before = _advantages(baseline, batch).baseline
    for row in _some_rows(batch):
        rewards = batch.rewards.clone()
        rewards[row] = 1.0 - rewards[row] if case.kind != "negative" else -rewards[row]
        if not _close(before[row], _advantages(baseline, with_rewards(batch, rewards)).baseline[row]):
            raise _fail(
                baseline, "has a baseline that depends on the own reward; say `uses_own_reward = True` if meant"
            )


def _check_sign(case: _Case) -> None:
    """A higher own reward gives a higher own advantage, over all rollouts; with history it gives one at all."""
    if case.kind != "binary":
        return
    baseline = case.make()
    batch = case.batch(baseline, unscored=False)
    rises = 0.0
    for row in _some_rows(batch):
        own = []
        for reward in (0.0, 1.0):
            rewards = batch.rewards.clone()
            rewards[row] = reward
            own.append(float(_advantages(baseline, with_rewards(batch, rewards)).values[row].double().sum()))
        rises += own[1] - own[0]
    if rises < -_TOLERANCE:
        raise _fail(baseline, "lowers the advantage of a rollout for a higher reward (is it b - r?)")
    if case.told and rises < _TOLERANCE:
        raise _fail(baseline, "gives the same advantage whatever the reward: nothing would be learnt")


def _check_row_order_of_update(case: _Case) -> None:
    straight, shuffled = case.make(), case.make()
    batch = case.batch(straight, seed=5)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(2))
    straight.update(batch)
    shuffled.update(batch.take(order))
    after = case.batch(straight, seed=6, step=1)
    a, b = _advantages(straight, after), _advantages(shuffled, after)
    if not _close(a.values, b.values) or not _close(a.baseline, b.baseline):
        raise _fail(straight, "learns something else in `update` from the same rows in another order")


def _check_kl_in_the_reward(case: _Case) -> None:
    baseline = case.make()
    if not baseline.reads_kl:
        return
    batch = case.batch(baseline, unscored=False)
    kl = 0.1 + 0.1 * torch.arange(batch.action_mask.numel()).reshape(batch.action_mask.shape) * batch.action_mask
    without = _advantages(baseline, replace(batch, kl=None)).values
    zero = _advantages(baseline, replace(batch, kl=torch.zeros_like(kl))).values
    if zero.ndim == 2 and without.ndim == 1:
        without = without[:, None] * batch.action_mask
    if not _close(zero, without):
        raise _fail(baseline, "changes its advantages for a KL penalty of 0 in the reward")
    penalised = _advantages(baseline, replace(batch, kl=kl)).values
    if not bool(penalised.isfinite().all()) or _close(penalised, zero):
        raise _fail(baseline, "says reads_kl = True, but a KL penalty in the reward does not change its advantages")


def _check_loss_of_rows(case: _Case) -> None:
    baseline = case.make()
    if not isinstance(baseline, LearnedBaseline):
        return
    batch = case.batch(baseline)
    predicted = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss = baseline.loss(predicted, batch)
    if loss.per_token.shape != predicted.shape or not bool(loss.per_token[loss.counts].isfinite().all()):
        raise _fail(baseline, f"has a loss that is not finite, or not of the shape {tuple(predicted.shape)}")
    if bool((loss.counts & (~batch.action_mask | _silent_rows(batch)[:, None])).any()):
        raise _fail(baseline, "learns from tokens that are not actions, or whose rollout has no reward")
    (gradient,) = torch.autograd.grad((loss.per_token * loss.counts).sum(), predicted)
    if bool((gradient[~loss.counts] != 0).any()) or not bool((gradient != 0).any()):
        raise _fail(baseline, "has a loss whose gradient is 0 everywhere, or is not where the token does not count")
    rows = torch.arange(len(batch.rewards)).flip(0)[1::2]
    part = baseline.loss(predicted[rows], batch.take(rows))
    if not _close(loss.per_token[rows].detach(), part.per_token.detach()):
        raise _fail(baseline, "has a loss of a rollout that depends on which others are there")


def _check_state_round_trip(case: _Case) -> None:
    baseline = case.make()
    for step in range(3):
        baseline.update(case.batch(baseline, seed=step, step=step))
    buffer = io.BytesIO()
    torch.save(baseline.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    restored = case.make()
    restored.load_state_dict(state)
    batch = case.batch(baseline, seed=9, step=3)
    if not _same(_advantages(baseline, batch), _advantages(restored, batch)):
        raise _fail(baseline, "does not come back the same from state_dict and load_state_dict")
    wrong: list[dict[str, Any]] = [{**state, "not_a_key": 1}]
    wrong += [{k: v for k, v in state.items() if k != gone} for gone in state]
    for bad in wrong:
        try:
            case.make().load_state_dict(bad)
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
    _check_own_reward,
    _check_sign,
    _check_row_order_of_update,
    _check_kl_in_the_reward,
    _check_loss_of_rows,
    _check_state_round_trip,
)
