"""BASIS with history: shares rewards across the prompts of a batch and across the steps of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import check_state_keys, less_baseline, mean_of_others, where_scorable, with_room
from basis_rl.baselines.basis import Epsilon
from basis_rl.baselines.optimal import Target
from basis_rl.baselines.reward_range import RangedBelief
from basis_rl.functional import history as equations
from basis_rl.functional.regression import hashed_words, logistic_posterior, predicted_logits
from basis_rl.registry import Bounds, NotNegative, Positive
from basis_rl.types import Advantages, RolloutBatch, RunContext
from basis_rl.values.table import ValueTable

Prior = Literal["flat", "text"]
Belief = Literal["beta", "gaussian"]
PriorVariance = Annotated[float, Bounds("above 0, at most 10,000", lambda x: 0 < x <= 10_000)]
Deviations = Annotated[float, Bounds("of at least 0 and finite", lambda x: 0 <= x < math.inf)]
# Variance of the shift before the first reward: so wide that only the grid bounds it.
_UNKNOWN_SHIFT = 100.0
# Weights of the drifts remember about 1 / (1 - 0.97) = 33 batches: a run may stand still first and move later.
_FORGETTING = 0.97
# Of the text prior: places that words are hashed to, and how many of the last visits of prompts it is fitted to. At
# older ones the policy was another, and it does not learn all texts equally fast.
_WIDTH = 128
_WINDOW = 4096
# Candidates of the share of the prior's variance that texts explain: at 0 they tell nothing.
_SHARES = (0.0, 0.5, 0.75)
NO_TEXTS: Mapping[str, str] = {}


@dataclass(eq=False)
class BasisHistory(RangedBelief):
    """``A_i = r_i - b(V_i)``, ``V_i`` from a belief about prompt i that every reward of the run has sharpened.

    Each prompt has a belief with mean ``m_i`` and variance ``v_i`` about the logit of its value, which begins at the
    table's counts or at the prior. Rewards are shared across prompts and steps, as the BASIS paper's Limitations ask.

    1. All prompts of a batch share one shift s in logits, the ``1 / beta`` of the paper's Eq. 5. Its posterior mean
       ``s_i`` and variance ``u_i`` given the rewards of the OTHER rollouts are computed on a grid, and
       ``V_i = sigmoid((m_i + s_i) / sqrt(1 + pi u_i / 8))``, where ``m_i`` has already learnt from the other rollouts
       of the same prompt, if there are any. The own reward is excluded exactly.
    2. After the policy update, prompts learn from their own rewards, by a Beta
       (`basis_rl.functional.history.beta_update`) or an extended Kalman filter (``belief="gaussian"``). Per step ``v``
       grows by the drift, and the variance of s by `shift_drift`.
    3. ``drift="auto"`` runs a filter for each of six drifts d from 0 to 0.1, and ``V_i = sum_d w_d V_i^(d)`` with
       ``log w_d <- 0.97 log w_d + sum_i log p(r_i | V_i^(d))``. The shift comes from the mean belief over d.
    4. ``prior="text"`` runs these filters for each of three shares of the prior's variance, 0, 1/2 and 3/4, that texts
       may explain. All have a weight by how well they predict, so texts that tell nothing soon count for nothing.

    Metrics: ``shift``; ``beta = 1 / shift`` within the paper's grid [0.01, 5]; ``uncertainty``, the mean standard
    deviation of the beliefs, in logits; ``known``, the share of rollouts whose prompt has a belief of its own;
    ``drift``, the weighted mean ``sum_d w_d d``; ``told_by_texts``, that of the shares.

    Args:
        values: a table, its folder or Hub id, or None.
        smoothing: pseudo-rollouts at each end of the reward range, > 0, for the beliefs that the table gives.
        epsilon: values are kept in ``[epsilon, 1 - epsilon]``.
        accept_mismatch: see `Basis`.
        drift: variance that a prompt's logit gains per step, beside the common shift, or ``"auto"``.
        shift_drift: variance that the common shift gains per step.
        prior_variance: of a prompt without a table, at most 10,000.
        prior: ``flat``, or ``text``, without a table: ``m_i`` begins at, and moves with, what a regression on the words
            of all prompts expects of prompt i now (`TextPrior`).
        belief: ``beta`` or ``gaussian``: the form of the belief about a prompt's value. After n failures in a row the
            Beta's value falls about as ``1 / n``, the filter's as ``n^(-1/2)``.
        lcb: k >= 0: ``max(V_i - k sd_i, 0)`` takes the place of ``V_i`` on the scale from 0 to 1, sd as `believed`
            before the batch. Below the value, right rollouts weigh more than wrong ones (Arnal et al., 2506.20520);
            still unbiased.
        target: ``optimal`` takes for ``b_i`` the function of this value with the least variance of the gradient
            (`OptimalBaseline`), ``optimal_token`` one for each token, ``value`` the value itself. What `believed` says
            does not change.
        fixed_range: ``(low, high)`` of the rewards, for good. By default it is that of the table, or what the reward
            functions declare, or learnt, and rewards of earlier batches outside it widen it (`RewardRange`).
        ev_gate: use b only while V explains rewards (`VarianceGate`), else the mean of the batch's other rollouts.

    Raises:
        ValueError: a parameter out of its range, or a table that cannot be read.
    """

    values: ValueTable | str | Path | None = None
    smoothing: Positive = 0.5
    epsilon: Epsilon = 1e-6
    accept_mismatch: bool = False
    drift: NotNegative | Literal["auto"] = "auto"
    shift_drift: NotNegative = 0.02
    prior_variance: PriorVariance = 4.0
    prior: Prior = "flat"
    belief: Belief = "beta"
    lcb: Deviations = 0.0
    target: Target = "optimal"
    fixed_range: Sequence[float] | None = None
    ev_gate: bool = False
    kept = ("log_weights", "shift_mean", "shift_variance", "step", "range.ends", "optimal.moments", "gate.variances")

    def __post_init__(self) -> None:
        if self.prior == "text" and self.values is not None:
            both = "prior 'text' is for prompts whose values are not known, and a value table has those of all prompts"
            raise ValueError(f"basis_history: {both}. Leave out one of the two.")
        super().__post_init__()
        reads_texts = self.prior == "text"
        self.text_prior = TextPrior(self.prior_variance) if reads_texts else None
        self.requires = frozenset({"prompt_texts"} if reads_texts else ())
        shares = torch.tensor(_SHARES if reads_texts else (0.0,), dtype=torch.float64)
        drift = self.drift
        drifts = equations.drift_grid() if isinstance(drift, str) else torch.tensor([drift], dtype=torch.float64)
        # One filter for each share and drift, ``(D,)`` both: all drifts of the first share, then of the next.
        self.shares, self.drifts = torch.cartesian_prod(shares, drifts).unbind(1)
        self.log_weights = torch.full_like(self.drifts, -math.log(len(self.drifts)))
        self.shifts = equations.shift_grid()
        self.shift_mean = 0.0
        self.shift_variance = _UNKNOWN_SHIFT
        self.step = 0
        self._row = _rows(self.table.prompt_ids if self.table else [])
        # A row per prompt: ``mean_d, variance_d``, and the step at which it was last seen. It has room (`with_room`).
        self._table = self._first_beliefs()

    def _first_beliefs(self) -> Tensor:
        """The rows of the prompts that the value table knows."""
        mean = variance = torch.zeros(len(self._row), dtype=torch.float64)
        if self.table is not None:
            p = self.tabled(self.table, self.smoothing).clamp(self.epsilon, 1 - self.epsilon)
            mean = torch.logit(p)
            counts = self.table.counts(self.table.prompt_ids) + 2 * self.smoothing
            variance = 1.0 / (counts * p * (1 - p))
        filters = len(self.drifts)
        known = [mean.repeat(filters, 1), variance.repeat(filters, 1), torch.zeros_like(mean)[None]]
        return torch.cat(known).T.contiguous()

    @property
    def mean(self) -> Tensor:
        """``(D, P)`` logits of the prompts that have a belief of their own; with texts, less what their texts tell."""
        return self._table[: len(self._row), : len(self.drifts)].T

    @property
    def variance(self) -> Tensor:
        """``(D, P)`` variances of `mean` as they were when the prompts were last seen."""
        return self._table[: len(self._row), len(self.drifts) : -1].T

    def validate(self, run: RunContext) -> None:
        super().validate(run)
        if self.text_prior is not None:
            self.text_prior.know(run.texts)

    def _of_texts(self, prompt_ids: Sequence[str], texts: Mapping[str, str] = NO_TEXTS) -> tuple[Tensor, Tensor]:
        """Mean and variance of what the texts tell each filter of the logits, ``(D, N)``; flat ``(1, N)``, and 0."""
        if self.text_prior is None:
            nothing = torch.zeros((1, len(prompt_ids)), dtype=torch.float64)
            return nothing, nothing
        mean, variance = self.text_prior(prompt_ids, texts)
        drifts = len(self.drifts) // len(mean)
        return mean.repeat_interleave(drifts, dim=0), variance.repeat_interleave(drifts, dim=0)

    def _own(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of `_belief` beyond what the texts tell."""
        rows = torch.tensor(list(map(self._row.get, prompt_ids, itertools.repeat(-1))), dtype=torch.long)
        known = rows >= 0
        mean = torch.zeros((len(self.drifts), len(rows)), dtype=torch.float64)
        variance = (self.prior_variance * (1 - self.shares))[:, None].repeat(1, len(rows))
        own = self._table[rows[known]].T
        # A belief that was not updated has drifted in each step since.
        age = self.step - own[-1]
        mean[:, known] = own[: len(self.drifts)]
        variance[:, known] = own[len(self.drifts) : -1] + self.drifts[:, None] * age
        return mean, variance, known

    def _belief(self, prompt_ids: Sequence[str], texts: Mapping[str, str] = NO_TEXTS) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance now, ``(D, N)``, and who has a belief of its own, ``(N,)``. Others have the prior."""
        mean, variance, known = self._own(prompt_ids)
        told, uncertain = self._of_texts(prompt_ids, texts)
        return mean + told, variance + uncertain, known

    def believed(self, prompt_ids: Sequence[str], texts: Mapping[str, str] = NO_TEXTS) -> tuple[Tensor, Tensor]:
        """Mean and variance of the value of each prompt, in reward units. ``(P,), (P,)`` float64.

        ``x_i ~ N(m_i + s, v_i + u)`` under each drift, s and u being mean and variance of the shift: a mixture over the
        drifts, ``V_i = sum_d w_d E[sigmoid(x_i^(d))]``. A prompt without a belief of its own has the prior.
        """
        mean, variance, _ = self._belief(prompt_ids, texts)
        weights = self.log_weights.exp()
        mean = mean + self.shift_mean
        common = torch.full_like(mean, self.shift_variance + self.shift_drift)
        beta = self.belief == "beta"
        logit_variance = common if beta else variance + common
        values = equations.expected_sigmoid(mean, logit_variance)
        inside = equations.sigmoid_variance(mean, logit_variance)
        # A Beta's logit is that of its mean, so its own variance moves the value's variance alone.
        if beta:
            inside = inside + values * (1 - values) / (1 + 1 / (variance * values * (1 - values)))
        value = weights @ values
        # The law of total variance over the drifts.
        spread = weights @ (inside + values**2) - value**2
        low, high = self.reward_range
        return self.range.unscaled(value), (high - low) ** 2 * spread.clamp(min=0.0)

    def _log_prior(self) -> Tensor:
        # With no drift many rewards put all weight on one candidate: it stands for all shifts that are nearest to it.
        cell = float(self.shifts[:2].diff().square().sum()) / 12
        return -0.5 * (self.shifts - self.shift_mean) ** 2 / max(self.shift_variance + self.shift_drift, cell)

    def _log_likelihood(self, mean: Tensor, rewards: Tensor) -> Tensor:
        return equations.shift_log_likelihood(self.log_weights.exp() @ mean, rewards, self.shifts)

    def _values(
        self, prompt_ids: list[str], rewards: Tensor, mean: Tensor, variance: Tensor, likelihood: Tensor
    ) -> Tensor:
        """``V_i^(d)`` given all rewards of the batch except the own. ``(D, N)``."""
        shift, uncertainty = equations.leave_one_out_shift(likelihood, self._log_prior(), self.shifts)
        first = {prompt_id: k for k, prompt_id in reversed(list(enumerate(prompt_ids)))}
        index = torch.tensor([first[prompt_id] for prompt_id in prompt_ids], dtype=torch.long)
        # Sums of rewards and counts of the other rollouts of the same prompt: the own reward is taken out again.
        own = torch.stack([torch.nan_to_num(rewards, nan=0.0), (~rewards.isnan()).double()])
        total, count = torch.zeros_like(own).index_add(1, index, own)[:, index] - own
        values = equations.expected_sigmoid(mean + shift, uncertainty)
        # First the prompt's belief learns from the other rollouts, then its value is read.
        mean, _ = self._learn(mean, variance, values, total - count * values, count.expand_as(values))
        return equations.expected_sigmoid(mean + shift, uncertainty).clamp(self.epsilon, 1 - self.epsilon)

    def advantages(self, batch: RolloutBatch) -> Advantages:
        if not (self.range.known and self.gate.is_open):
            baseline, _ = self.optimal(mean_of_others(batch), batch.action_mask, None)
            values = where_scorable(batch, less_baseline(batch.rewards, baseline))
            return Advantages(values=values, baseline=baseline, metrics=self.range.metrics() | self.gate.metrics())
        rewards = self.range.scaled(batch.rewards)
        texts = _texts(batch)
        mean, variance, known = self._belief(batch.prompt_ids, texts)
        likelihood = self._log_likelihood(mean, rewards)
        weights = self.log_weights.exp()
        values = self._values(batch.prompt_ids, rewards, mean, variance, likelihood)
        shift, _ = equations.shift_posterior(likelihood, self._log_prior(), self.shifts)
        baseline = self._lowered(weights @ values, batch.prompt_ids, texts)
        baseline, told = self.optimal(baseline, batch.action_mask, self.reward_range)
        result = where_scorable(batch, less_baseline(batch.rewards, baseline))
        metrics = {
            "shift": float(shift),
            "beta": min(5.0, 1.0 / max(float(shift), 0.2)),
            "uncertainty": float((weights @ variance.sqrt()).mean()),
            "known": float(known.double().mean()),
            "drift": float(weights @ self.drifts),
            "told_by_texts": float(weights @ self.shares),
            **told,
            **self.range.metrics(),
            **self.gate.metrics(),
        }
        return Advantages(values=result, baseline=baseline, metrics=metrics)

    def _lowered(self, values: Tensor, prompt_ids: Sequence[str], texts: Mapping[str, str] = NO_TEXTS) -> Tensor:
        """``V - lcb sd`` within the range of the rewards, ``(N,)``, in their units, of V on the scale from 0 to 1."""
        lower = self.range.unscaled(values)
        if self.lcb > 0:
            lower = lower - self.lcb * self.believed(prompt_ids, texts)[1].sqrt()
        return lower.clamp(min=self.reward_range[0])

    def update(self, batch: RolloutBatch) -> None:
        if self.text_prior is not None:
            self.text_prior.meet(_texts(batch))
        if widened := self.range.widen(batch.rewards):
            self._rescale(*widened)
        rewards = self.range.scaled(batch.rewards)
        mean, variance, _ = self._belief(batch.prompt_ids)
        likelihood = self._log_likelihood(mean, rewards)
        shift, uncertainty = equations.shift_posterior(likelihood, self._log_prior(), self.shifts)
        values = torch.sigmoid(mean + shift)
        scored = ~rewards.isnan()
        rated = [name for name, use in zip(batch.prompt_ids, scored.tolist(), strict=True) if use]
        position = {name: k for k, name in enumerate(dict.fromkeys(rated))}
        index = torch.tensor([position[name] for name in rated], dtype=torch.long)
        zeros = torch.zeros((len(self.drifts), len(position)), dtype=torch.float64)
        if rated and self.range.known:
            # Before the beliefs learn: the drifts are weighted by what they predicted.
            predicted = self._values(batch.prompt_ids, rewards, mean, variance, likelihood)
            told = self._lowered(self.log_weights.exp() @ predicted, batch.prompt_ids)
            self.optimal.learn(told, batch.rewards, batch, self.reward_range)
            self.gate.learn(told, batch.rewards, scored)
            residual = zeros.index_add(1, index, (rewards - values)[:, scored])
            count = zeros.index_add(1, index, torch.ones_like(values)[:, scored])
            # What the text tells learns from the same rewards, so only the rest of the variance is a prompt's own.
            own_mean, own_variance, _ = self._own(batch.prompt_ids)
            before, spread, value = (zeros.index_copy(1, index, x[:, scored]) for x in (own_mean, own_variance, values))
            self._store(list(position), *self._learn(before, spread, value, residual, count))
            self.log_weights = equations.prequential_update(self.log_weights, predicted, rewards, _FORGETTING)
            self.shift_mean = float(shift)
            self.shift_variance = float(uncertainty)
            if self.text_prior is not None:
                total = torch.zeros_like(count[0]).index_add(0, index, rewards[scored])
                self.text_prior.update(list(position), total / count[0], count[0], self.shift_mean)
        else:
            self.shift_variance += self.shift_drift
        self.step += 1

    def _rescale(self, offset: float, factor: float) -> None:
        """Move the beliefs to a wider range, on which a value V is ``offset + factor V``.

        Every prompt keeps its value in reward units and the rollouts behind it, ``1 / (v V (1 - V))``; one that was
        never seen moves with the shift, and with what its text tells on the wider range.
        """
        self.optimal.rescale(offset, factor)
        old = torch.sigmoid(torch.tensor(self.shift_mean, dtype=torch.float64))
        new = (offset + factor * old).clamp(self.epsilon, 1 - self.epsilon)
        shift = float(torch.logit(new))
        names = list(self._row)
        logits = self.mean + self._of_texts(names)[0] + self.shift_mean
        before = torch.sigmoid(logits).clamp(self.epsilon, 1 - self.epsilon)
        after = (offset + factor * before).clamp(self.epsilon, 1 - self.epsilon)
        if self.text_prior is not None:
            self.text_prior.rescale(offset, factor, self.shift_mean, shift)
        drifts = len(self.drifts)
        self._table[: len(names), :drifts] = (torch.logit(after) - self._of_texts(names)[0] - shift).T
        self._table[: len(names), drifts:-1] *= (before * (1 - before) / (after * (1 - after))).T
        self.shift_mean = shift

    def _learn(
        self, mean: Tensor, variance: Tensor, value: Tensor, residual: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the beliefs after `count` more rollouts of each prompt.

        All ``(D, P)``; `value` is what was expected of them, `residual` the sum of reward less value.
        """
        if self.belief == "beta":
            value = value.clamp(self.epsilon, 1 - self.epsilon)
            return equations.beta_update(mean, variance, value, residual, count)
        return equations.filter_update(mean, variance, residual, count * value * (1 - value))

    def _store(self, prompts: list[str], mean: Tensor, variance: Tensor) -> None:
        rows = torch.tensor([self._row.setdefault(name, len(self._row)) for name in prompts], dtype=torch.long)
        self._table = with_room(self._table, len(self._row))
        seen = torch.full((1, len(prompts)), float(self.step), dtype=torch.float64)
        self._table[rows] = torch.cat([mean, variance, seen]).T

    def state_dict(self) -> dict[str, Any]:
        told = self.text_prior.state_dict() if self.text_prior is not None else None
        known = {"prompt_ids": list(self._row), "table": self._table[: len(self._row)].clone()}
        return {**super().state_dict(), **known, "text_prior": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys(self, state, self.state_dict())
        same_prior = (state["text_prior"] is None) == (self.text_prior is None)
        if not same_prior or state["log_weights"].shape != self.log_weights.shape:
            key = "drift" if same_prior else "prior"
            raise ValueError(f"The state was saved with another `{key}`: give the one that the run was started with.")
        if self.text_prior is not None:
            self.text_prior.load_state_dict(state["text_prior"])
        super().load_state_dict(state)
        self._row = _rows(state["prompt_ids"])
        self._table = state["table"].clone()


def _rows(prompt_ids: Sequence[str]) -> dict[str, int]:
    return {prompt_id: row for row, prompt_id in enumerate(prompt_ids)}


def _texts(batch: RolloutBatch) -> Mapping[str, str]:
    """The texts of the batch's prompts, by their ids."""
    return NO_TEXTS if batch.prompt_texts is None else dict(zip(batch.prompt_ids, batch.prompt_texts, strict=True))


class TextPrior:
    """What texts tell of the logit of prompt i, beside the shift that all have in common:
    ``w . phi_i ~ N(m . phi_i, phi_i S phi_i')``.

    ``phi`` are hashed words and pairs of words; ``w ~ N(m, S)`` is fitted to the last 4,096 visits of prompts by
    Bayesian logistic regression (`basis_rl.functional.regression.logistic_posterior`). There is one fit for each of K
    shares of the flat prior's variance, 0, 1/2 and 3/4, which is what texts may explain before the first batch; the
    rest is what no text tells. At 0 mean and variance stay 0.

    Args:
        variance: of the flat prior, > 0.
    """

    def __init__(self, variance: float) -> None:
        self.of_texts = variance * torch.tensor(_SHARES, dtype=torch.float64)
        self.mean = torch.zeros((len(_SHARES), _WIDTH), dtype=torch.float64)
        self.covariance = self.of_texts[:, None, None] * torch.eye(_WIDTH, dtype=torch.float64)
        # Of the last visits: features, and mean reward, number of rollouts and common shift beside each share's texts.
        self.seen = torch.zeros((0, _WIDTH), dtype=torch.float16)
        self.visits = torch.zeros((0, 2 + len(_SHARES)), dtype=torch.float64)
        self._row: dict[str, int] = {}
        # Prompts whose texts came with a batch: a resumed run does not get them before it meets the prompts again.
        self._met: list[str] = []
        # A million prompts are 256 MB.
        self._features = torch.zeros((0, _WIDTH), dtype=torch.float16)

    def know(self, texts: Mapping[str, str]) -> None:
        """Take in the texts of prompts, by their ids; for all calls to come."""
        new = {name: text for name, text in texts.items() if name not in self._row}
        if new:
            self._add(list(new), hashed_words(list(new.values()), _WIDTH).half())

    def meet(self, texts: Mapping[str, str]) -> None:
        """The same with the texts of a batch."""
        self._met += [name for name in texts if name not in self._row]
        self.know(texts)

    def _add(self, names: Sequence[str], features: Tensor) -> None:
        known = len(self._row)
        self._row.update({name: known + place for place, name in enumerate(names)})
        self._features = with_room(self._features, len(self._row))
        self._features[known : len(self._row)] = features

    def __call__(self, prompt_ids: Sequence[str], texts: Mapping[str, str] = NO_TEXTS) -> tuple[Tensor, Tensor]:
        """Mean and variance of ``w . phi`` for each share, ``(K, P), (K, P)`` float64.

        Args:
            prompt_ids: of the prompts.
            texts: of those that were not taken in; a prompt without a text has mean and variance of no words.
        """
        features = self._of(prompt_ids)
        new = [row for row, name in enumerate(prompt_ids) if name not in self._row and name in texts]
        if new:
            # Rounded as what is taken in.
            features[new] = hashed_words([texts[prompt_ids[row]] for row in new], _WIDTH).half().float()
        mean, variance = predicted_logits(self.mean.float(), self.covariance.float(), features)
        return mean.double(), variance.double()

    def _of(self, prompt_ids: Sequence[str]) -> Tensor:
        rows = torch.tensor([self._row.get(name, -1) for name in prompt_ids], dtype=torch.long)
        features = torch.zeros((len(rows), _WIDTH), dtype=torch.float32)
        features[rows >= 0] = self._features[rows[rows >= 0]].float()
        return features

    def update(self, prompt_ids: Sequence[str], rewards: Tensor, counts: Tensor, shift: float) -> None:
        """Learn from different prompts, ``(P,)``: their mean rewards in [0, 1], and of how many rollouts."""
        visits = torch.stack([rewards, counts, *[torch.full_like(rewards, shift)] * len(_SHARES)], dim=1)
        self.seen = torch.cat([self.seen, self._of(prompt_ids).half()])[-_WINDOW:]
        self.visits = torch.cat([self.visits, visits])[-_WINDOW:]
        self._fit()

    def rescale(self, offset: float, factor: float, shift: float, new_shift: float) -> None:
        """A wider range: a value V is ``offset + factor V`` there, and the common shift `new_shift` instead of `shift`.

        What was expected at each visit is the same in reward units, and what is expected now nearly.
        """

        def moved(logits: Tensor) -> Tensor:
            return torch.logit((offset + factor * torch.sigmoid(logits)).clamp(1e-6, 1 - 1e-6))

        if not len(self.visits):
            return
        seen = self.seen.double()
        told = seen @ self.mean.T
        shifts = moved(told + self.visits[:, 2:])
        self.visits[:, 0] = offset + factor * self.visits[:, 0]
        # The features of few texts do not span all directions: of the solutions, the smallest.
        self.mean[1:] = torch.linalg.lstsq(seen, moved(told + shift) - new_shift, driver="gelsd").solution.T[1:]
        self.visits[:, 2:] = shifts - seen @ self.mean.T
        self._fit()

    def _fit(self) -> None:
        seen, (rewards, counts, *shifts) = self.seen.double(), self.visits.unbind(dim=1)
        for k in range(1, len(_SHARES)):
            variance = float(self.of_texts[k])
            self.mean[k], self.covariance[k] = logistic_posterior(
                self.mean[k], seen, rewards, counts, shifts[k], variance
            )

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name).clone() for name in ("mean", "covariance", "seen", "visits")}
        return {**tensors, "met": list(self._met), "features": self._of(self._met).half()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state_keys(self, state, self.state_dict())
        for name in ("mean", "covariance", "seen", "visits"):
            setattr(self, name, state[name].clone())
        self._met = list(state["met"])
        new = [place for place, name in enumerate(self._met) if name not in self._row]
        self._add([self._met[place] for place in new], state["features"][new])
