"""`check_baseline`: one conformance matrix, run over every registered baseline and over anybody's own.

It feeds an object batches that a trainer will feed it sooner or later (ragged groups, unscored rollouts, equal rewards,
rows in another order, padding) and says which promise of the contract (`basis_rl.baselines.base.Baseline`) it breaks.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, LearnedBaseline, TokenLevel
from basis_rl.names import article
from basis_rl.types import Advantages, RolloutBatch

_TOLERANCE = 1e-5
# What a batch can have beside what it always has. KL is there by the run's settings, not by `requires`.
_OPTIONAL = frozenset(
    {"energies", "rollout_weights", "values", "log_probs", "reward_parts", "greedy_rewards", "prompt_texts"}
)


Rewards = Literal["binary", "graded", "negative"]
_LOW_AND_HIGH: dict[Rewards, tuple[float, float]] = {
    "binary": (0.0, 1.0),
    "graded": (0.1, 0.9),
    "negative": (-1.0, 1.0),
}


class BaselineError(AssertionError):
    """A baseline breaks its contract; the message says which promises, and what was seen."""


class _NoBatchError(BaselineError):
    """What the baseline declares fits no batch: reported once, with its declarations."""


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
        BaselineError: the baseline requires a field that no batch has, or groups that are not.
    """
    if messages := _wrong_batch(baseline):
        raise _NoBatchError(f"{type(baseline).__name__} {'; '.join(messages)}")
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
        "rollout_weights": torch.rand((n, t), generator=generator) * mask,
        "values": torch.rand((n, t), generator=generator) * mask,
        "log_probs": -torch.rand((n, t), generator=generator) * mask,
        "reward_parts": _parts(rewards),
        "greedy_rewards": torch.randint(0, 2, (len(sizes),), generator=generator).float()[group_ids],
        "prompt_texts": [f"What is {prompt_id}?" for prompt_id in ids],
    }
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
    ids = prompt_ids or _known_prompts(built)
    ids = ids if len(ids) >= 4 else [f"prompt-{i}" for i in range(8)]
    cases = [
        _Case(build, ids, "binary", warm=False),
        _Case(build, ids, "binary", warm=True),
        _Case(build, ids, "graded", warm=False),
        _Case(build, ids, "negative", warm=True),
    ]
    broken: dict[str, str] = {}  # by its cause, which is reported once, however many promises it breaks
    for check in _CHECKS:
        for case in cases:
            for cause, message in _outcome(check, case):
                broken.setdefault(cause, f"{check.__name__.removeprefix('_check_')}: {message}")
    if broken:
        count = f"{len(broken)} of the promises" if len(broken) > 1 else "a promise"
        raise BaselineError(f"{type(built).__name__} breaks {count} of a baseline:\n- " + "\n- ".join(broken.values()))
    return [check.__name__.removeprefix("_check_") for check in _CHECKS]


@dataclass(frozen=True)
class _Case:
    """A baseline as it is built or after some batches (`warm`), and the rewards that it is fed."""

    build: Callable[[], Baseline]
    ids: list[str]
    kind: Rewards
    warm: bool

    @property
    def description(self) -> str:
        rewards = {"binary": "", "graded": "rewards between 0 and 1", "negative": "rewards between -1 and 1"}[self.kind]
        words = ", ".join(filter(None, ["after some batches" if self.warm else "", rewards]))
        return f" ({words})" if words else ""

    def make(self) -> Baseline:
        return self.after_some_batches() if self.warm else self.build()

    def after_some_batches(self) -> Baseline:
        """It has learnt from four: as they come, without any reward, with equal rewards, as they come."""
        baseline = self.build()
        for step in range(4):
            batch = self.batch(baseline, seed=20 + step, step=step)
            if step in (1, 2):
                low, high = _LOW_AND_HIGH[self.kind]
                same = torch.nan if step == 1 else low if self.kind == "negative" else high
                batch = with_rewards(batch, torch.full_like(batch.rewards, same))
            baseline.update(batch)
        return baseline

    def batch(self, baseline: Baseline, **given: Any) -> RolloutBatch:
        return example_batch(baseline, self.ids, kind=self.kind, **given)


def _known_prompts(built: Baseline) -> list[str]:
    """Some ids of the table that the baseline keeps, if there is one and it can be read."""
    try:
        return list(getattr(getattr(built, "values", None), "prompt_ids", ()))[:8]
    except Exception:  # an attribute of that name may be anything, and is nobody's promise
        return []


def _builder(make: Any) -> Callable[[], Baseline]:
    """A function that builds the object again.

    Raises:
        BaselineError: nothing does.
    """
    name = type(make).__name__
    again: Callable[[], Any] = make
    done, way_out = "built", " (`basis-rl check NAME --ARGUMENT VALUE` gives arguments)"
    if isinstance(make, Baseline):
        again = functools.partial(copy.deepcopy, make)
        done, way_out = "copied", ". Give its class, or a function that builds it each time"
    elif callable(make):
        named = make.func if isinstance(make, functools.partial) else make
        name = getattr(named, "__name__", type(named).__name__)
    else:
        raise BaselineError(f"This is {_kind(make)}, not a baseline. Give a subclass of basis_rl.baselines.Baseline.")

    def build(time: str = "again") -> Baseline:
        try:
            built = again()
        except (Exception, SystemExit) as error:
            raise BaselineError(f"{name} cannot be {done}{time and ' '}{time}: {_text(error)}{way_out}.") from error
        if not isinstance(built, Baseline):
            raise BaselineError(f"{name} builds {_kind(built)}, no subclass of basis_rl.baselines.Baseline.")
        return built

    build(time="")
    return build


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{article(name)} {name}"


def _text(error: BaseException) -> str:
    """An exception in one line: it is anybody's, and may have anything to say."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text[:300]}"


def _outcome(check: Callable[[_Case], None], case: _Case) -> Iterator[tuple[str, str]]:
    """What is broken, by its cause and in words; an exception of the object's is that too."""
    try:
        check(case)
    except _NoBatchError:
        return
    except BaselineError as error:
        yield str(error), f"{error}{case.description}"
    except (Exception, SystemExit) as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename != __file__]
        where = f" in `{frames[0].name}` ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""
        hint = " (optional fields of a batch are there only if `requires` names them)"
        asked = isinstance(error, (AttributeError, TypeError, AssertionError))
        yield (
            f"{type(error).__name__}{where or _text(error)}",
            f"raises {_text(error)}{where}{case.description}{hint if asked else ''}",
        )


def with_rewards(batch: RolloutBatch, rewards: Tensor) -> RolloutBatch:
    """The batch with other rewards ``(N,)``, those of the functions along with them."""
    parts = None if batch.reward_parts is None else _parts(rewards)
    return replace(batch, rewards=rewards, reward_parts=parts)


def _advantages(baseline: Baseline, batch: RolloutBatch) -> Advantages:
    """Those of a copy of the batch: what is written into it is reported by `_check_no_side_effect` alone."""
    return _accepted(baseline.advantages(copy.deepcopy(batch)))


def _accepted(found: Any) -> Advantages:
    if not isinstance(found, Advantages):
        raise BaselineError(f"returns {_kind(found)} from `advantages`, not Advantages")
    for name in ("values", "baseline"):
        tensor = getattr(found, name)
        if not isinstance(tensor, Tensor):
            raise BaselineError(f"returns {name} that are {_kind(tensor)}, not a tensor")
        if tensor.requires_grad:
            raise BaselineError(f"returns {name} that require a gradient (`detach` them: they are constants)")
    return found


def _learn(baseline: Baseline, batch: RolloutBatch) -> None:
    baseline.update(copy.deepcopy(batch))


def _check_finite(found: Advantages, when: str) -> None:
    for name, tensor in (("values", found.values), ("baseline", found.baseline)):
        if not bool(tensor.isfinite().all()):
            raise BaselineError(f"returns {name} that are not finite {when}")


def _check_metrics(metrics: Any) -> None:
    """Those of a batch as they come; of one without rewards they may be undefined."""
    if not isinstance(metrics, Mapping):
        raise BaselineError(f"returns metrics that are {_kind(metrics)}, not a dict")
    if bad := [name for name, value in metrics.items() if not isinstance(value, (int, float))]:
        raise BaselineError(f"returns metrics that are not plain numbers: {bad}")
    if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise BaselineError(f"returns metrics that are not finite: {bad} (rows without a reward are NaN in `rewards`)")


def _ordinary(case: _Case, baseline: Baseline) -> bool:
    """Whether it gives numbers for a batch as they come: if not, `_check_shape_and_zeros` tells it, and no other."""
    found = _advantages(baseline, case.batch(baseline))
    return bool(found.values.isfinite().all() and found.baseline.isfinite().all())


def _some_rows(batch: RolloutBatch) -> range:
    """Some eight rows, of different groups: what is tried with each is the same."""
    return range(0, len(batch.rewards), max(1, len(batch.rewards) // 8))


def _silent_rows(batch: RolloutBatch) -> Tensor:
    """Rows without a reward or a token; found here once more, not by what the baselines themselves use."""
    return batch.rewards.isnan() | ~batch.action_mask.any(dim=1)


def _close(a: Tensor, b: Tensor, within: float = _TOLERANCE) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=within, atol=within, equal_nan=True)


def _wrong_batch(baseline: Baseline) -> list[str]:
    """What it declares from which no batch can be made."""
    messages, requires, least = [], baseline.requires, baseline.min_group_size
    if not isinstance(requires, (set, frozenset)):
        messages.append(f"says requires = {requires!r}, not a set of names as in `frozenset({{'energies'}})`")
    elif unknown := sorted(map(str, requires - _OPTIONAL)):
        way_out = " (say `reads_kl = True` for KL)" if "kl" in unknown else ""
        messages.append(f"requires {unknown}; a batch can have {sorted(_OPTIONAL)}{way_out}")
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        messages.append(f"says min_group_size = {least!r}, not a whole number of at least 1")
    return messages


def _check_declarations(case: _Case) -> None:
    baseline = case.build()
    messages = _wrong_batch(baseline)
    requires: Any = baseline.requires
    if isinstance(requires, (set, frozenset)) and "values" in requires and not isinstance(baseline, LearnedBaseline):
        messages.append("requires ['values'], which are there for a `LearnedBaseline` only")
    if baseline.token_level not in get_args(TokenLevel):
        messages.append(f"says token_level = {baseline.token_level!r}, not one of {', '.join(get_args(TokenLevel))}")
    for name in ("uses_own_reward", "reads_kl"):
        if not isinstance(getattr(baseline, name), bool):
            messages.append(f"says {name} = {getattr(baseline, name)!r}, not True or False")
    if messages:
        raise BaselineError("; ".join(messages))


def _check_shape_and_zeros(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    result = _advantages(baseline, batch)
    n, t = batch.action_mask.shape
    for name, tensor in (("values", result.values), ("baseline", result.baseline)):
        if tuple(tensor.shape) not in {(n,), (n, t)}:
            raise BaselineError(f"returns {name} of shape {tuple(tensor.shape)}, not ({n},) or ({n}, {t})")
    _check_finite(result, "(rows without a reward are NaN in `rewards`)")
    zero = _silent_rows(batch)
    if result.values.ndim == 2:
        zero = zero[:, None] | ~batch.action_mask
    if bool((result.values[zero] != 0).any()):
        raise BaselineError("gives an advantage that is not 0 where the reward is NaN or the mask is 0")
    _check_metrics(result.metrics)


def _check_token_level(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    kl = torch.full(batch.action_mask.shape, 0.1) * batch.action_mask
    for placed, given in (("out", None), *((("", kl),) if baseline.reads_kl else ())):
        tokens = _advantages(baseline, replace(batch, kl=given)).values.ndim == 2
        declared = baseline.token_level == "always" or (baseline.token_level == "with_kl" and given is not None)
        if tokens != declared:
            raise BaselineError(
                f"says token_level = '{baseline.token_level}', but returns advantages of "
                f"{'tokens' if tokens else 'rollouts'} with{placed} KL in the reward",
            )


def _check_all_unscored(case: _Case) -> None:
    baseline = case.make()
    if not _ordinary(case, baseline):
        return
    batch = case.batch(baseline)
    unscored = with_rewards(batch, torch.full_like(batch.rewards, torch.nan))
    result = _advantages(baseline, unscored)
    if bool((result.values != 0).any()) or not bool(result.baseline.isfinite().all()):
        raise BaselineError("does not give advantage 0 and a finite baseline when no rollout has a reward")
    _check_after(case, baseline, unscored, "in which no rollout has a reward")


def _check_one_scored_row(case: _Case) -> None:
    baseline = case.make()
    if not _ordinary(case, baseline):
        return
    batch = case.batch(baseline, unscored=False)
    rewards = torch.full_like(batch.rewards, torch.nan)
    rewards[0] = 1.0
    alone = with_rewards(batch, rewards)
    result = _advantages(baseline, alone)
    _check_finite(result, "when one rollout alone has a reward")
    if baseline.min_group_size > 1 and bool((result.values != 0).any()):
        raise BaselineError("gives an advantage to the only scored rollout of a group, though it needs two")
    _check_after(case, baseline, alone, "in which one rollout alone has a reward")


def _check_equal_rewards(case: _Case) -> None:
    for reward in _LOW_AND_HIGH[case.kind]:
        baseline = case.make()
        if not _ordinary(case, baseline):
            return
        batch = case.batch(baseline, unscored=False)
        equal = with_rewards(batch, torch.full_like(batch.rewards, reward))
        _check_finite(_advantages(baseline, equal), "when all rewards are equal (their deviation is 0)")
        _check_after(case, baseline, equal, "in which all rewards are equal (their deviation is 0)")


def _check_after(case: _Case, baseline: Baseline, batch: RolloutBatch, which: str) -> None:
    """Learn from `batch`; what is given for the next one is finite."""
    _learn(baseline, batch)
    _check_finite(_advantages(baseline, case.batch(baseline, seed=7, step=1)), f"after a batch {which}")


def _check_no_side_effect(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    batch = batch.take(torch.arange(len(batch.rewards)).flip(0))  # in no order that sorting would leave as it is
    kept = copy.deepcopy(batch)
    before = _serialized(baseline)
    first = _accepted(baseline.advantages(batch))
    _check_not_written(kept, batch, "")
    if _serialized(baseline) != before:
        raise BaselineError("changes its state in `advantages` (state belongs in `update`)")
    if not _same(first, _advantages(baseline, batch)):
        raise BaselineError(
            "gives other advantages when it is given the same batch again (by chance, or what it keeps)"
        )
    baseline.update(batch)
    _check_not_written(kept, batch, " in `update`")


def _check_not_written(kept: RolloutBatch, batch: RolloutBatch, when: str) -> None:
    for name in (each.name for each in fields(RolloutBatch)):
        old, new = getattr(kept, name), getattr(batch, name)
        if not (_close(old, new, 0.0) if isinstance(old, Tensor) else old == new):
            raise BaselineError(f"writes into the batch's `{name}`{when}")


def _check_row_order(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(1))
    straight, shuffled = _advantages(baseline, batch), _advantages(baseline, batch.take(order))
    if not _close(straight.values[order], shuffled.values) or not _close(straight.baseline[order], shuffled.baseline):
        raise BaselineError("depends on the order of the rows (`group_ids` defines the groups, not the position)")


def _check_group_names(case: _Case) -> None:
    baseline = case.make()
    batch = case.batch(baseline)
    renamed = replace(batch, group_ids=1000 - 7 * batch.group_ids)
    if not _close(_advantages(baseline, batch).values, _advantages(baseline, renamed).values):
        raise BaselineError("depends on the numbers in `group_ids`, not only on which rows share one")


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
                raise BaselineError("gives an advantage to padding")
            wide = wide[:, left : left + t]
        if not _close(values, wide):
            raise BaselineError("depends on how far the batch is padded")


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
            raise BaselineError("has a baseline that depends on the own reward; say `uses_own_reward = True` if meant")


def _check_sign(case: _Case) -> None:
    """A higher own reward gives a higher own advantage, over all rollouts; with history it gives one at all."""
    baseline = case.make()
    rises = _rise(case, baseline)
    if rises < -_TOLERANCE:
        raise BaselineError("lowers the advantage of a rollout for a higher reward (is it b - r?)")
    if rises < _TOLERANCE and not case.warm:
        rises = _rise(case, case.after_some_batches())
    if rises < _TOLERANCE:
        raise BaselineError("gives the same advantage whatever the reward: nothing would be learnt")


def _rise(case: _Case, baseline: Baseline) -> float:
    """By how much the advantages of some rollouts rise with their own rewards, in sum."""
    batch = case.batch(baseline, unscored=False)
    rises = 0.0
    for row in _some_rows(batch):
        own = []
        for reward in _LOW_AND_HIGH[case.kind]:
            rewards = batch.rewards.clone()
            rewards[row] = reward
            own.append(float(_advantages(baseline, with_rewards(batch, rewards)).values[row].double().sum()))
        rises += own[1] - own[0]
    return rises


def _check_row_order_of_update(case: _Case) -> None:
    """In two other orders: one of them alone may leave the first or the last row where it is."""
    straight = case.make()
    batch = case.batch(straight, seed=5)
    after = case.batch(straight, seed=6, step=1)
    _learn(straight, batch)
    expected = _advantages(straight, after)
    n = len(batch.rewards)
    for order in (torch.randperm(n, generator=torch.Generator().manual_seed(2)), torch.arange(n).flip(0)):
        shuffled = case.make()
        _learn(shuffled, batch.take(order))
        found = _advantages(shuffled, after)
        if not _close(expected.values, found.values) or not _close(expected.baseline, found.baseline):
            raise BaselineError("learns something else in `update` from the same rows in another order")


def _check_kl_in_the_reward(case: _Case) -> None:
    baseline = case.make()
    if not baseline.reads_kl or not _ordinary(case, baseline):
        return
    batch = case.batch(baseline, unscored=False)
    kl = 0.1 + 0.1 * torch.arange(batch.action_mask.numel()).reshape(batch.action_mask.shape) * batch.action_mask
    without = _advantages(baseline, replace(batch, kl=None)).values
    zero = _advantages(baseline, replace(batch, kl=torch.zeros_like(kl))).values
    if zero.ndim == 2 and without.ndim == 1:
        without = without[:, None] * batch.action_mask
    if not _close(zero, without):
        raise BaselineError("changes its advantages for a KL penalty of 0 in the reward")
    penalised = _advantages(baseline, replace(batch, kl=kl)).values
    if not bool(penalised.isfinite().all()):
        raise BaselineError("returns values that are not finite with KL in the reward")
    if _close(penalised, zero):
        raise BaselineError("says reads_kl = True, but a KL penalty in the reward does not change its advantages")


def _check_loss_of_rows(case: _Case) -> None:
    baseline = case.make()
    if not isinstance(baseline, LearnedBaseline):
        return
    batch = case.batch(baseline)
    predicted = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    loss = baseline.loss(predicted, batch)
    if loss.per_token.shape != predicted.shape or not bool(loss.per_token[loss.counts].isfinite().all()):
        raise BaselineError(f"has a loss that is not finite, or not of the shape {tuple(predicted.shape)}")
    if bool((loss.counts & (~batch.action_mask | _silent_rows(batch)[:, None])).any()):
        raise BaselineError("learns from tokens that are not actions, or whose rollout has no reward")
    (gradient,) = torch.autograd.grad((loss.per_token * loss.counts).sum(), predicted)
    if bool((gradient[~loss.counts] != 0).any()) or not bool((gradient != 0).any()):
        raise BaselineError("has a loss whose gradient is 0 everywhere, or is not where the token does not count")
    rows = torch.arange(len(batch.rewards)).flip(0)[1::2]
    part = baseline.loss(predicted[rows], batch.take(rows))
    if not _close(loss.per_token[rows].detach(), part.per_token.detach()):
        raise BaselineError("has a loss of a rollout that depends on which others are there")


def _check_finite_state(case: _Case) -> None:
    """No number of its state that was one turns NaN."""
    baseline = case.build()
    before = dict(_tensors(_state(baseline)))
    for name, after in _tensors(_state(case.after_some_batches())):
        old = before.get(name)
        if old is not None and old.shape == after.shape and bool((after.isnan() & ~old.isnan()).any()):
            raise BaselineError(f"has a state that turns NaN in `update`: {name}")


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All numbers of a state with their names, as tensors."""
    if isinstance(state, (Tensor, int, float)):
        yield name, torch.as_tensor(state)
    elif isinstance(state, (Mapping, list, tuple)):
        entries = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in entries:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _check_state_round_trip(case: _Case) -> None:
    baseline = case.make()
    for step in range(3):
        _learn(baseline, case.batch(baseline, seed=step, step=step))
    try:
        state = torch.load(io.BytesIO(_serialized(baseline)), weights_only=True)
    except pickle.UnpicklingError as error:
        raise BaselineError("has a state with more in it than tensors, numbers, strings and dicts of them") from error
    restored = case.make()
    restored.load_state_dict(state)
    batch = case.batch(baseline, seed=9, step=3)
    if not _same(_advantages(baseline, batch), _advantages(restored, batch)):
        raise BaselineError("does not come back the same from state_dict and load_state_dict")
    wrong: list[dict[str, Any]] = [{**state, "not_a_key": 1}]
    wrong += [{k: v for k, v in state.items() if k != gone} for gone in state]
    for bad in wrong:
        try:
            case.make().load_state_dict(bad)
        except ValueError:
            continue
        raise BaselineError(f"loads a state with the keys {sorted(bad)} without a ValueError")


def _state(baseline: Baseline) -> dict[str, Any]:
    state: Any = baseline.state_dict()
    if not isinstance(state, dict):
        raise BaselineError(f"returns {_kind(state)} from `state_dict`, not a dict")
    return state


def _serialized(baseline: Baseline) -> bytes:
    state = _state(baseline)
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
    except Exception as error:
        raise BaselineError(f"has a state that cannot be saved: {_text(error)}") from error
    return buffer.getvalue()


def _same(a: Advantages, b: Advantages) -> bool:
    return _close(a.values, b.values, 0.0) and _close(a.baseline, b.baseline, 0.0)


_CHECKS = (
    _check_declarations,
    _check_shape_and_zeros,
    _check_token_level,
    _check_all_unscored,
    _check_one_scored_row,
    _check_equal_rewards,
    _check_no_side_effect,
    _check_row_order,
    _check_group_names,
    _check_padding,
    _check_own_reward,
    _check_sign,
    _check_row_order_of_update,
    _check_kl_in_the_reward,
    _check_loss_of_rows,
    _check_finite_state,
    _check_state_round_trip,
)
