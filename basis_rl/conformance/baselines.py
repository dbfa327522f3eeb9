"""`check_baseline`: one conformance matrix, run over every registered baseline and over yours.

It feeds an object batches that a trainer will feed it sooner or later (ragged groups, unscored rollouts, equal rewards,
rows in another order, padding) and says which promise of the contract (`basis_rl.baselines.base.Baseline`) it breaks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from basis_rl.baselines.base import Baseline, LearnedBaseline, TokenLevel
from basis_rl.conformance.promises import (
    PromiseError,
    builder,
    check_promises,
    close,
    require,
    require_restored,
    require_unwritten,
    saved,
)
from basis_rl.names import kind_of
from basis_rl.samplers import ValueBelief
from basis_rl.types import OF_UPDATE, SIGNALS, Advantages, RolloutBatch
from basis_rl.values import ValueTable

_TOLERANCE = 1e-5
# What a batch can have beside what it always has. KL is there by the run's settings, not by `requires`, and weights of
# the reward functions come with their rewards.
_OPTIONAL = frozenset(SIGNALS) - OF_UPDATE - {"kl", "reward_weights"}
_ORDINARY = "(rows without a reward are NaN in `rewards`)"
_EQUAL = "all rewards are equal (their deviation is 0)"
# The largest advantage, in ranges of the rewards.
_MOST = 1000

Range = tuple[float, float]
# What is special about a case -> least and largest reward, whether there are others in between, and whether the
# baseline has learnt from some batches.
_CASES: dict[str, tuple[Range, bool, bool]] = {
    "": ((0.0, 1.0), False, False),
    "after some batches": ((0.0, 1.0), False, True),
    "rewards between 0 and 1": ((0.1, 0.9), True, False),
    "after some batches, rewards between -1 and 1": ((-1.0, 1.0), True, True),
}


class BaselineError(PromiseError):
    """A baseline breaks its contract; the message says which promises, and what was seen."""

    kind = "baseline"
    hint = " (optional fields of a batch are there only if `requires` names them)"


def example_batch(
    baseline: Baseline,
    prompt_ids: list[str],
    *,
    seed: int = 0,
    step: int = 0,
    unscored: bool = True,
    ends: Range = (0.0, 1.0),
    graded: bool = False,
) -> RolloutBatch:
    """A ragged batch over `prompt_ids`: groups of the baseline's minimum or more, some rewards missing.

    Rewards are the `ends` of a range, or anything between them (`graded`).
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [baseline.min_group_size + i % 3 for i in range(len(prompt_ids))]
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    n = int(group_ids.numel())
    t = 7
    drawn = torch.rand(n, generator=generator)
    rewards = ends[0] + (ends[1] - ends[0]) * (drawn if graded else drawn.round())
    lengths = torch.randint(1, t + 1, (n,), generator=generator)
    mask = torch.arange(t)[None] < lengths[:, None]
    if unscored:
        rewards[0] = rewards[n // 2] = torch.nan
        mask[-1] = False
    ids = [prompt_ids[g] for g in group_ids.tolist()]
    tokens = ("turn_rewards", "energies", "gradient_energies", "rollout_weights", "values", "log_probs", "entropies")
    optional: dict[str, Any] = {name: torch.rand((n, t), generator=generator) * mask for name in tokens}
    optional["log_probs"] = -optional["log_probs"]
    optional["hidden_states"] = torch.randn((n, 2, 4), generator=generator)
    optional["reward_parts"] = _parts(rewards)
    optional["greedy_rewards"] = torch.randint(0, 2, (len(sizes),), generator=generator).float()[group_ids]
    optional["prompt_texts"] = [f"What is {prompt_id}?" for prompt_id in ids]
    return RolloutBatch(
        rewards=rewards,
        group_ids=group_ids,
        prompt_ids=ids,
        action_mask=mask,
        step=step,
        reward_weights=torch.tensor([1.0, 0.5]) if "reward_parts" in baseline.requires else None,
        **{name: optional[name] for name in baseline.requires | baseline.learns_from},
    )


def _parts(rewards: Tensor) -> Tensor:
    """``(N, 2)`` rewards of two functions, weighed 1 and 0.5, that make up `rewards`."""
    second = (torch.arange(len(rewards)) % 3).float()
    return torch.stack([rewards - 0.5 * second, torch.where(rewards.isnan(), torch.nan, second)], dim=1)


def _with_rewards(batch: RolloutBatch, rewards: Tensor | float) -> RolloutBatch:
    """The batch with other rewards, one for all or ``(N,)``, those of the functions along with them."""
    rewards = torch.zeros_like(batch.rewards) + rewards
    return replace(batch, rewards=rewards, reward_parts=None if batch.reward_parts is None else _parts(rewards))


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
    build = builder(make, Baseline, BaselineError)
    built = build()
    table = vars(built).get("values")
    ids = prompt_ids or (table.prompt_ids[:8] if isinstance(table, ValueTable) else [])
    ids = ids if len(ids) >= 4 else [f"prompt-{i}" for i in range(8)]
    cases = {words: functools.partial(_Promises, build, built, ids, *case) for words, case in _CASES.items()}
    return check_promises(BaselineError, type(built).__name__, _Promises, cases)


def try_ragged(baseline: Baseline, prompt_ids: list[str]) -> None:
    """Give a copy of the baseline groups of unequal size, of prompts that it knows.

    Raises:
        PromiseError: what a rollout gets depends on where it stands.
        Exception: whatever the baseline raises.
    """
    batch = example_batch(baseline, prompt_ids, unscored=False)
    order = torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(1))
    tried = copy.deepcopy(baseline)
    straight, shuffled = (_advantages(tried, each) for each in (batch, batch.take(order)))
    same = _same(_of_rows(straight, order), shuffled)
    require(same, "what a rollout gets depends on where it stands, not only on `group_ids`")


def _advantages(baseline: Baseline, batch: RolloutBatch, when: str = _ORDINARY) -> Advantages:
    """Those of a copy of the batch: what is written into it is reported by `no_side_effect` alone.

    As in a run, the copy does not have what comes from the policy's update.
    """
    return _accepted(baseline.advantages(copy.deepcopy(_before_the_update(batch))), when)


def _before_the_update(batch: RolloutBatch) -> RolloutBatch:
    none: dict[str, Any] = dict.fromkeys(OF_UPDATE)
    return replace(batch, **none)


def _accepted(found: Any, when: str = _ORDINARY) -> Advantages:
    if not isinstance(found, Advantages):
        raise PromiseError(f"returns {kind_of(found)} from `advantages`, not Advantages")
    for name in ("values", "baseline"):
        tensor = getattr(found, name)
        require(isinstance(tensor, Tensor), f"returns {name} that are {kind_of(tensor)}, not a tensor")
        require(not tensor.requires_grad, f"returns {name} that require a gradient (`detach` them: they are constants)")
        require(tensor.isfinite().all(), f"returns {name} that are not finite {when}")
    return found


def _of_rows(found: Advantages, rows: Tensor | int) -> Advantages:
    return replace(found, values=found.values[rows], baseline=found.baseline[rows])


def _same(a: Advantages, b: Advantages, within: float = _TOLERANCE) -> bool:
    return close(a.values, b.values, within) and close(a.baseline, b.baseline, within)


def _silent_rows(batch: RolloutBatch) -> Tensor:
    """Rows without a reward or a token; found here once more, not by what the baselines themselves use."""
    return batch.rewards.isnan() | ~batch.action_mask.any(dim=1)


def _no_batch(baseline: Baseline) -> list[str]:
    """What it declares from which no batch can be made."""
    requires: Any = baseline.requires
    least: Any = baseline.min_group_size
    messages = []
    if not isinstance(requires, (set, frozenset)):
        messages.append(f"says requires = {requires!r}, not a set of names as in `frozenset({{'energies'}})`")
    elif unknown := sorted(map(str, requires - _OPTIONAL)):
        way_out = " (say `reads_kl = True` for KL)" if "kl" in unknown else ""
        messages.append(f"requires {unknown}; a batch can have {sorted(_OPTIONAL)}{way_out}")
    elif "values" in requires and not isinstance(baseline, LearnedBaseline):
        messages.append("requires ['values'], which are there for a `LearnedBaseline` only")
    if not isinstance(baseline.learns_from, (set, frozenset)) or baseline.learns_from - OF_UPDATE:
        messages.append(f"says learns_from = {baseline.learns_from!r}, not a set with some of {sorted(OF_UPDATE)}")
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        messages.append(f"says min_group_size = {least!r}, not a whole number of at least 1")
    return messages


@dataclass(frozen=True)
class _Promises:
    """A method for each promise of the contract, tried on a baseline that nothing else was tried on.

    Attributes:
        build: builds a baseline.
        built: one that was never used, for what it declares.
        ids: of the prompts.
        ends: least and largest of the rewards that it is fed.
        graded: whether there are others in between.
        warm: whether it has learnt from some batches.
    """

    build: Callable[[], Baseline]
    built: Baseline
    ids: list[str]
    ends: Range
    graded: bool
    warm: bool

    @functools.cached_property
    def _baseline(self) -> Baseline:
        return self._another()

    @functools.cached_property
    def _batch(self) -> RolloutBatch:
        return self._next()

    @functools.cached_property
    def _scored(self) -> RolloutBatch:
        """A batch without missing rewards."""
        return self._next(unscored=False)

    def _next(self, **given: Any) -> RolloutBatch:
        wrong = _no_batch(self.built)
        require(not wrong, "; ".join(wrong))
        return example_batch(self.built, self.ids, ends=self.ends, graded=self.graded, **given)

    def _another(self) -> Baseline:
        return self._after_some_batches() if self.warm else self.build()

    def _after_some_batches(self) -> Baseline:
        """It has learnt from four: as they come, without any reward, with equal rewards, as they come."""
        baseline = self.build()
        low, high = self.ends
        equal = {1: torch.nan, 2: low if low < 0 else high}
        for step in range(4):
            batch = self._next(seed=20 + step, step=step)
            baseline.update(_with_rewards(batch, equal.get(step, batch.rewards)))
        return baseline

    def _survives(self, batch: RolloutBatch, rewards: Tensor | float, what: str) -> Tensor:
        """Values of the batch with other rewards; they are finite, and so is what comes after learning from it."""
        baseline = self._another()
        _advantages(baseline, self._batch)
        batch = _with_rewards(batch, rewards)
        found = _advantages(baseline, batch, f"when {what}")
        baseline.update(copy.deepcopy(batch))
        _advantages(baseline, self._next(seed=7, step=1), f"after a batch in which {what}")
        return found.values

    def _low_and_high(self, baseline: Baseline) -> Iterator[list[Advantages]]:
        """What some eight rollouts of different groups get for the least reward of their own, and for the largest."""
        n = len(self._scored.rewards)
        for row in range(0, n, max(1, n // 8)):
            own = torch.arange(n) == row
            batches = [_with_rewards(self._scored, self._scored.rewards.masked_fill(own, end)) for end in self.ends]
            yield [_of_rows(_advantages(baseline, each), row) for each in batches]

    def _rise(self, baseline: Baseline) -> float:
        """By how much the advantages of these rollouts rise with their own rewards, in sum."""
        return sum(float((high.values - low.values).double().sum()) for low, high in self._low_and_high(baseline))

    def declarations(self) -> None:
        baseline = self.built
        messages = _no_batch(baseline)
        levels = get_args(TokenLevel)
        if baseline.token_level not in levels:
            messages.append(f"says token_level = {baseline.token_level!r}, not one of {', '.join(levels)}")
        for name in ("uses_own_reward", "reads_kl"):
            if not isinstance(getattr(baseline, name), bool):
                messages.append(f"says {name} = {getattr(baseline, name)!r}, not True or False")
        require(not messages, "; ".join(messages))

    def shape_and_zeros(self) -> None:
        batch = self._batch
        found = _advantages(self._baseline, batch)
        n, t = batch.action_mask.shape
        for name, tensor in (("values", found.values), ("baseline", found.baseline)):
            shape = tuple(tensor.shape)
            require(shape in {(n,), (n, t)}, f"returns {name} of shape {shape}, not ({n},) or ({n}, {t})")
        zero = _silent_rows(batch)
        if found.values.ndim == 2:
            zero = zero[:, None] | ~batch.action_mask
        silent = (found.values[zero] == 0).all()
        require(silent, "gives an advantage that is not 0 where the reward is NaN or the mask is 0")
        metrics: Any = found.metrics
        require(isinstance(metrics, Mapping), f"returns metrics that are {kind_of(metrics)}, not a dict")
        bad = [name for name, x in metrics.items() if not (isinstance(x, (int, float)) and math.isfinite(x))]
        require(not bad, f"returns metrics that are not plain finite numbers: {bad} {_ORDINARY}")

    def token_level(self) -> None:
        level = self._baseline.token_level
        mask = self._batch.action_mask
        for with_kl in (False, True) if self._baseline.reads_kl else (False,):
            batch = replace(self._batch, kl=0.1 * mask if with_kl else None)
            tokens = _advantages(self._baseline, batch).values.ndim == 2
            found = "tokens" if tokens else "rollouts"
            placed = "with" if with_kl else "without"
            message = f"says token_level = '{level}', but returns advantages of {found} {placed} KL in the reward"
            require(tokens == (level == "always" or (level == "with_kl" and with_kl)), message)

    def all_unscored(self) -> None:
        values = self._survives(self._batch, torch.nan, "no rollout has a reward")
        require((values == 0).all(), "does not give advantage 0 when no rollout has a reward")

    def one_scored_row(self) -> None:
        rewards = torch.full_like(self._scored.rewards, torch.nan)
        rewards[0] = 1.0
        values = self._survives(self._scored, rewards, "one rollout alone has a reward")
        message = "gives an advantage to the only scored rollout of a group, though it needs two"
        require(self._baseline.min_group_size == 1 or (values == 0).all(), message)

    def equal_rewards(self) -> None:
        for reward in self.ends:
            self._survives(self._scored, reward, _EQUAL)

    def bounded(self) -> None:
        """Also for prompts that it has not met, when others have told it which rewards there are."""
        low, high = self.ends
        few, others = (replace(self, ids=ids)._next(unscored=False) for ids in (self.ids[:2], self.ids[2:]))
        for _ in range(2):
            for rewards, when in ((low, f"when {_EQUAL}"), (high, f"when {_EQUAL}"), (others.rewards, _ORDINARY)):
                found = _advantages(self._baseline, _with_rewards(others, rewards), when)
                message = f"more than {_MOST:,} times the range of the rewards (is it divided by a deviation near 0?)"
                small = found.values.abs().max() <= _MOST * (high - low)
                require(small, f"gives an advantage of {message}")
            self._baseline.update(copy.deepcopy(few))

    def no_side_effect(self) -> None:
        # In no order that sorting would leave as it is.
        batch = _before_the_update(self._batch.take(torch.arange(len(self._batch.rewards)).flip(0)))
        kept = copy.deepcopy(batch)
        before = saved(self._baseline)
        believed = self._believed()
        first = _accepted(self._baseline.advantages(batch))
        require_unwritten(kept, batch)
        same = saved(self._baseline) == before
        require(same, "changes its state in `advantages` (state belongs in `update`)")
        same = all(torch.equal(old, new) for old, new in zip(believed, self._believed(), strict=True))
        require(same, "changes in `advantages` what it believes (state belongs in `update`)")
        same = _same(first, _advantages(self._baseline, batch), 0.0)
        require(same, "gives other advantages when it is given the same batch again (by chance, or what it keeps)")
        self._baseline.update(batch)
        require_unwritten(kept, batch, " in `update`")

    def _believed(self) -> tuple[Tensor, ...]:
        """What it says of the prompts: it may rest on what no `state_dict` has."""
        return self._baseline.believed(self.ids) if isinstance(self._baseline, ValueBelief) else ()

    def row_order(self) -> None:
        order = torch.randperm(len(self._batch.rewards), generator=torch.Generator().manual_seed(1))
        straight, shuffled = (_advantages(self._baseline, each) for each in (self._batch, self._batch.take(order)))
        same = _same(_of_rows(straight, order), shuffled)
        require(same, "depends on the order of the rows (`group_ids` defines the groups, not the position)")

    def group_names(self) -> None:
        renamed = replace(self._batch, group_ids=1000 - 7 * self._batch.group_ids)
        same = _same(_advantages(self._baseline, self._batch), _advantages(self._baseline, renamed))
        require(same, "depends on the numbers in `group_ids`, not only on which rows share one")

    def padding(self) -> None:
        batch = self._batch
        values = _advantages(self._baseline, self._batch).values
        names = [name for name, shape in {"action_mask": "NT", **SIGNALS}.items() if shape == "NT"]
        given = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
        for sides in ((0, 5), (3, 0)):
            padded: dict[str, Any] = {name: torch.nn.functional.pad(x, sides) for name, x in given.items()}
            wide = _advantages(self._baseline, replace(batch, **padded)).values
            expected = torch.nn.functional.pad(values, sides) if values.ndim == 2 else values
            same = close(expected, wide, _TOLERANCE)
            require(same, "depends on how far the batch is padded, or gives an advantage to padding")

    def own_reward(self) -> None:
        for low, high in () if self._baseline.uses_own_reward else self._low_and_high(self._baseline):
            same = close(low.baseline, high.baseline, _TOLERANCE)
            require(same, "has a baseline that depends on the own reward; say `uses_own_reward = True` if meant")

    def sign(self) -> None:
        """A higher own reward gives a higher own advantage, over all rollouts; with history it gives one at all."""
        rises = self._rise(self._baseline)
        require(rises > -_TOLERANCE, "lowers the advantage of a rollout for a higher reward (is it b - r?)")
        if rises < _TOLERANCE and not self.warm:
            rises = self._rise(self._after_some_batches())
        require(rises > _TOLERANCE, "gives the same advantage whatever the reward: nothing would be learnt")

    def row_order_of_update(self) -> None:
        """In two other orders: one of them alone may leave the first or the last row where it is."""
        batch = self._next(seed=5)
        after = self._next(seed=6, step=1)
        rows = torch.arange(len(batch.rewards))
        found = []
        for order in (rows, rows.flip(0), torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))):
            baseline = self._another()
            baseline.update(batch.take(order))
            found.append(_advantages(baseline, after))
        same = all(_same(found[0], each) for each in found)
        require(same, "learns something else in `update` from the same rows in another order")

    def kl_in_the_reward(self) -> None:
        baseline = self._baseline
        if not baseline.reads_kl:
            return
        batch = self._scored
        mask = batch.action_mask
        kl = 0.1 + 0.1 * torch.arange(mask.numel()).reshape(mask.shape) * mask
        without = _advantages(baseline, batch).values
        zero = _advantages(baseline, replace(batch, kl=torch.zeros_like(kl))).values
        if zero.ndim == 2 and without.ndim == 1:
            without = without[:, None] * mask
        same = close(zero, without, _TOLERANCE)
        require(same, "changes its advantages for a KL penalty of 0 in the reward")
        penalised = _advantages(baseline, replace(batch, kl=kl), "with KL in the reward").values
        message = "says reads_kl = True, but a KL penalty in the reward does not change its advantages"
        require(not close(penalised, zero, _TOLERANCE), message)

    def turn_rewards(self) -> None:
        """It gives each turn its own reward, where there is one, or does not ask for them."""
        batch = self._scored
        given = torch.nan_to_num(batch.rewards)[:, None] * batch.action_mask
        is_last = batch.action_mask.long().cumsum(dim=1) == batch.action_mask.sum(dim=1, keepdim=True)
        is_first = batch.action_mask.long().cumsum(dim=1) == 1
        whole, late, early = (
            _advantages(self._baseline, replace(batch, turn_rewards=rewards))
            for rewards in (None, given * is_last, given * is_first)
        )
        sums = _same(whole, late) and _same(whole, early)
        if "turn_rewards" not in self._baseline.requires:
            require(sums, "reads `turn_rewards`, which it does not require")
            return
        require(not sums, "requires `turn_rewards`, but does not use them")
        require(_same(whole, late), "gives other advantages if the whole reward is said to be that of the last turn")

    def loss_of_rows(self) -> None:
        baseline = self._baseline
        batch = self._batch
        mask = self._batch.action_mask
        if not isinstance(baseline, LearnedBaseline):
            return
        predicted = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
        loss = baseline.loss(predicted, batch)
        fits = loss.per_token.shape == mask.shape and bool(loss.per_token[loss.counts].isfinite().all())
        require(fits, f"has a loss that is not finite, or not of the shape {tuple(mask.shape)}")
        wrong = loss.counts & (~mask | _silent_rows(batch)[:, None])
        require(not wrong.any(), "learns from tokens that are not actions, or whose rollout has no reward")
        (gradient,) = torch.autograd.grad((loss.per_token * loss.counts).sum(), predicted)
        acts = bool((gradient != 0).any()) and bool((gradient[~loss.counts] == 0).all())
        require(acts, "has a loss whose gradient is 0 everywhere, or is not where the token does not count")
        rows = torch.arange(len(mask)).flip(0)[1::2]
        part = baseline.loss(predicted[rows], batch.take(rows)).per_token
        same = close(loss.per_token[rows], part, _TOLERANCE)
        require(same, "has a loss of a rollout that depends on which others are there")

    def discarded_groups(self) -> None:
        """What a sampler discards reaches beliefs as rewards, groups and prompts, with texts if they are asked for."""
        baseline = self._baseline
        batch = self._batch
        if not isinstance(baseline, ValueBelief):
            return
        none: dict[str, Any] = {name: None for name in SIGNALS if name != "prompt_texts"}
        baseline.update(replace(batch, action_mask=batch.action_mask[:, :0], **none))
        for tensor in baseline.believed(self.ids):
            require(tensor.isfinite().all(), "believes what is not finite after rollouts that are not trained on")

    def state_round_trip(self) -> None:
        for step in range(3):
            self._baseline.update(self._next(seed=step, step=step))
        batch = self._next(seed=9, step=3)

        def same(one: Baseline, other: Baseline) -> bool:
            return _same(_advantages(one, batch), _advantages(other, batch), 0.0)

        require_restored(self._baseline, self._another, same)
