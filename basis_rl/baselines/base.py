"""The contract of a baseline.

Every rank receives the same global batch in the same order and runs the same deterministic code. So a baseline holds no
collective, cannot deadlock, does not depend on the world size, and can be tested on one CPU.

A baseline that predicts with a network (`LearnedBaseline`) keeps to this: it reads the network's predictions from the
batch like any other field, and only says which network, and what its loss is on given rows.
"""

from __future__ import annotations

import copy
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from basis_rl.functional.segments import leave_one_out_mean, segment_count
from basis_rl.registry import Configured
from basis_rl.types import Advantages, RolloutBatch, RunContext

TokenLevel = Literal["never", "with_kl", "always"]


class Baseline(Configured, ABC):
    """How the advantage of a rollout is estimated: ``A = (r - b) / s``. Batches and advantages are on the CPU.

    Subclasses implement `advantages`; those with state also `update`, and `kept` or
    `state_dict` and `load_state_dict`.

    Class attributes:
        requires: optional fields of `RolloutBatch` that it reads: ``{"energies", "greedy_rewards", ...}``. An object's
            own may depend on its parameters.
        learns_from: optional fields that only `update` reads, because they come from the policy's own update. An
            object's own may depend on its parameters.
        min_group_size: how many scored rollouts of a prompt it needs, checked against ``num_generations`` when the
            trainer is built. An object's own may depend on its parameters.
        uses_own_reward: whether ``b_i`` depends on ``r_i``. If it does, the gradient is biased (by a factor such as
            ``1 - 1/G`` for a group mean), which is a choice to be made knowingly. An object's own may depend on its
            parameters.
        reads_kl: whether it takes a KL penalty in the reward (``batch.kl``), by `basis_rl.functional.gae`. An
            object's own may depend on its parameters.
        scales: whether it divides advantages by a deviation or the like; refused with ``scale_rewards="none"``. An
            object's own may depend on its parameters.
        token_level: when its advantages are ``(N, T)``, one of each token: never, only with KL in the reward, or
            always. Objectives that would average them away are refused with it. An object's own may depend on its
            parameters.
        kept: the attributes that are the state, such as ``("step", "range.ends")``: tensors, numbers, strings, and
            lists, tuples and dicts of numbers and strings.
    """

    requires: frozenset[str] = frozenset()
    learns_from: frozenset[str] = frozenset()
    min_group_size: int = 1
    uses_own_reward: bool = False
    reads_kl: bool = False
    scales: bool = False
    token_level: TokenLevel = "never"
    kept: tuple[str, ...] = ()

    @abstractmethod
    def advantages(self, batch: RolloutBatch) -> Advantages:
        """Advantages of one generation batch. Must not change the object's state."""

    def update(self, batch: RolloutBatch) -> None:
        """Learn from a batch. Called once, after the policy was updated on it, in training only."""

    def validate(self, run: RunContext) -> None:
        """Check the run before anything is spent.

        Raises:
            ValueError: if the baseline cannot serve this run; names the thing and the way out.
        """

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings from which `load_state_dict` restores the object exactly: what is `kept`."""
        return {name: _copied(operator.attrgetter(name)(self)) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result.

        Raises:
            ValueError: on a missing or an unexpected key.
        """
        check_state_keys(self, state, expected=self.state_dict())
        for name in self.kept:
            *path, last = name.split(".")
            setattr(functools.reduce(getattr, path, self), last, _copied(state[name]))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How the module of a `LearnedBaseline` is trained: AdamW without weight decay, at a constant rate.

    Attributes:
        rate: learning rate, > 0.
        epochs: passes over each generation batch, >= 1.
    """

    rate: float
    epochs: int = 1


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A loss of each token; what is minimised is its mean over the tokens that count, over all rows and ranks.

    Attributes:
        per_token: ``(N, T)``, with gradient.
        counts: ``(N, T)`` bool, the tokens that count: actions of rollouts that have a reward.
        metrics: ``(N, T)`` each; their means over those tokens are logged.
    """

    per_token: Tensor
    counts: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class LearnedBaseline(Baseline):
    """A baseline with a module that predicts a value for each token, and that learns from each batch.

    Why the contract is wider here: such a module may be as large as the policy. Running it on the whole batch on every
    rank, in `update`, would waste all ranks but one, and a baseline must hold no collective with which they could share
    the work. So the work is divided. The baseline says what is predicted with (`build_module`) and what is minimised
    (`loss`, a pure function of rows that does not depend on which other rows are there). The trainer runs the module on
    the rows of each rank, gathers its predictions into ``batch.values``, averages the gradients over all ranks, keeps
    the optimizer, and writes both into checkpoints. `advantages` stays a function of the global batch alone.

    Class attributes:
        reads_hidden_states: whether the module is called with ``hidden_states=(B, T, H)``, the policy's last hidden
            states before each completion token, detached; else with ``input_ids`` and ``attention_mask``, ``(B, L)``,
            of prompt and completion, and ``tokens=T``, how many of the last columns are the completion. Where its
            `forward` takes ``packing`` and ``position_ids`` as that of `basis_rl.baselines.ppo.ValueModel` does, and
            its ``backbone`` allows it, rows come without padding. An object's own may depend on its parameters.
    """

    requires: frozenset[str] = frozenset({"values"})
    reads_hidden_states: bool = True

    @property
    @abstractmethod
    def learning(self) -> Learning:
        """How the module is trained."""

    @abstractmethod
    def build_module(self, policy: Any, tokenizer: Any) -> nn.Module:
        """The module, called as `reads_hidden_states` says, which returns ``(B, T)`` float32 values before each token.

        Called once a run, under a seed that all ranks share; the module must be the same on all of them.

        Args:
            policy: the policy as transformers loads it; where it is sharded, only its configuration may be read.
            tokenizer: the policy's.

        Raises:
            ValueError: no such module, or one that cannot serve this policy.
        """

    @abstractmethod
    def module_parameters(self, policy_config: Any) -> int:
        """How many parameters the module will have, from configurations alone: for estimates before a run.

        Raises:
            ValueError: no such module.
        """

    def frozen_parameters(self, policy_config: Any) -> int:
        """How many of `module_parameters` never learn, and need neither gradients nor an optimizer's state."""
        return 0

    @abstractmethod
    def loss(self, predicted: Tensor, batch: RolloutBatch) -> TokenLoss:
        """The module's loss on some rows of a batch.

        Args:
            predicted: ``(M, T)`` of the module as it is, with gradient.
            batch: M rows of a batch that `advantages` has seen, with the predictions of that time in ``batch.values``.
        """

    def policy_waits(self, step: int) -> bool:
        """Whether only the module learns from the generation batch with that index, and the policy stays as it is."""
        return False


def check_state_keys(owner: object, state: Mapping[str, Any], expected: Collection[str]) -> None:
    """Raise ValueError unless the keys of `state` are exactly `expected`."""
    missing = sorted(set(expected) - set(state))
    unexpected = sorted(set(state) - set(expected))
    if missing or unexpected:
        name = type(owner).__name__
        raise ValueError(f"The state is not one of this {name}: missing keys {missing}, unexpected keys {unexpected}.")


def scorable_rows(batch: RolloutBatch) -> Tensor:
    """``(N,)`` bool: the reward is not NaN and the policy sampled at least one token of the row."""
    return ~batch.rewards.isnan() & batch.action_mask.any(dim=1)


def returns(batch: RolloutBatch) -> Tensor:
    """``(N,)`` float64: the reward, less the KL penalty of all action tokens where it is placed in the reward."""
    penalty = 0.0 if batch.kl is None else torch.where(batch.action_mask, batch.kl.double(), 0.0).sum(dim=1)
    return batch.rewards.double() - penalty


def where_scorable(batch: RolloutBatch, values: Tensor) -> Tensor:
    """`values`, ``(N,)`` or ``(N, T)``, and 0 where a row is not scorable, a token no action or a value NaN."""
    rows = scorable_rows(batch)
    kept = rows if values.ndim == 1 else rows[:, None] & batch.action_mask
    return torch.where(kept, torch.nan_to_num(values, nan=0.0), 0.0)


def less_baseline(rewards: Tensor, baseline: Tensor) -> Tensor:
    """``r - b``, ``(N,)`` or ``(N, T)`` as `baseline` is."""
    return rewards.double().reshape(-1, *[1] * (baseline.ndim - 1)) - baseline


def mean_of_others(batch: RolloutBatch) -> Tensor:
    """``(N,)`` float64 ``mean_{j != i} r_j`` over the batch; of a single rollout 0."""
    rewards = batch.rewards.double()
    others = leave_one_out_mean(rewards, torch.zeros(len(rewards), dtype=torch.long))
    return torch.nan_to_num(others, nan=0.0)


def with_room(table: Tensor, rows: int) -> Tensor:
    """`table`, ``(P, ...)``; if it has fewer than `rows` rows, a copy with 1.5 times as many, the new ones undefined.

    So a table that grows row by row is copied a few times in a run and not in every batch.
    """
    if rows <= len(table):
        return table
    grown = table.new_empty((rows + rows // 2, *table.shape[1:]))
    grown[: len(table)] = table
    return grown


class CenterScale(Baseline):
    """``A_i = (r_i - center_i) / (scale_i + eps)``: an estimator that is a center and a scale, one value per rollout.

    With KL in the reward, ``r_i`` is the rollout's return, its reward less the KL of all its tokens.

    Subclasses give `center` and, where they scale, `scale`, each ``(N,)`` float64. A row without a reward, or
    for which the center or the scale is undefined (NaN), or whose group has fewer than `min_group_size` scored
    rollouts, gets ``A = 0``; the share of such rows among the scored ones is the metric ``undefined``.
    """

    reads_kl: bool = True
    eps: float = 0.0

    @abstractmethod
    def center(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """``(N,)`` the baseline of each row, NaN where undefined."""

    def scale(self, rewards: Tensor, group_ids: Tensor) -> Tensor | None:
        """``(N,)`` what to divide by, NaN where undefined; None divides by nothing."""
        return None

    def advantages(self, batch: RolloutBatch) -> Advantages:
        rewards = returns(batch)
        scorable = scorable_rows(batch)
        center = self.center(rewards, batch.group_ids)
        scale = self.scale(rewards, batch.group_ids)
        values = rewards - center
        if scale is not None:
            values = values / (scale + self.eps)
        undefined = scorable & (values.isnan() | (segment_count(rewards, batch.group_ids) < self.min_group_size))
        values = torch.where(scorable & ~undefined, values, 0.0)
        share = float(undefined.sum() / scorable.sum().clamp(min=1))
        return Advantages(values=values, baseline=torch.nan_to_num(center, nan=0.0), metrics={"undefined": share})
