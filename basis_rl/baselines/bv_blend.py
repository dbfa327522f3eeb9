"""BV-Blend: the history of a prompt's cluster blended with its own group, by confidence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from basis_rl.baselines.base import less_baseline, scorable_rows, where_scorable
from basis_rl.baselines.optimal import Target
from basis_rl.baselines.reward_range import RangedBelief
from basis_rl.clusters import PromptClusters
from basis_rl.functional.segments import group_mean, leave_one_out_mean, segment_count
from basis_rl.registry import Positive, PositiveShare, Share
from basis_rl.types import Advantages, RolloutBatch, RunContext

Confidence = Literal["sem", "count", "scale"]
Map = Literal["exp", "inverse", "linear"]
Variance = Literal["shrunk", "paper"]
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class BVBlend(RangedBelief):
    """``A = (r - b) / (s + eps)`` with baseline and variance blended from two sources (BV-Blend, Eqs. 10, 11).

    ``b = w mu_hist + (1 - w) mu_G`` and ``s^2 = w v_hist + (1 - w) sigma_G^2``: mean and variance (ddof = 0) of the
    prompt's own rollouts, and of its cluster's past, a moving average in which `decay` weighs the NEW batch (Eq. 6)::

        m1 <- (1 - decay) m1 + decay mean_B(r)     m2 <- (1 - decay) m2 + decay mean_B(r^2)     N likewise
        v_hist = max(m2 - m1^2, 0)     u = sqrt(v_hist) / sqrt(N + eps) / temperature            (Eqs. 7, 8)

    The confidence w is a function of u (`mapping`, Eq. 9). It and the history come from the state BEFORE the batch
    (Algorithm 2). A new cluster has w = 0, and starts at ``(mean_B, mean_B^2 + prior_variance, prior_mass)``.

    Departure: ``variance="shrunk"`` draws the variance towards the prior,
    ``v_hist <- (N v_hist + N0 V_prior) / (N + N0)``. In a cluster whose batches are all right or all wrong the paper's
    s goes to 0, and one odd rollout gets |A| = 199 after 5 such batches. Shrunk, for rewards from 0 to 1, |A| is at
    most the larger of ``sqrt((N + N0) / (N0 V_prior))`` and ``sqrt(G - 1)``, N being the cluster's rollouts in a batch.

    The paper gives `decay` alone. The `temperature` whose baseline is nearest to the true value is 0.2 at one rollout
    per prompt, 0.1 at 4, 0.05 at 8 (`studies.bv_blend_study`); a batch should hold some 16 rollouts of each cluster.

    Metrics: ``confidence``, mean w; ``cold``, the share of rollouts in clusters without history; ``effective_signal``,
    the share of scored rollouts with ``|A| > 1e-6``; ``group_signal``, the same for the group mean alone.

    Args:
        clusters: a `PromptClusters` (`basis-rl clusters RECIPE` builds one), its folder or Hub id, or a mapping from
            prompt id to cluster. A codebook assigns prompts that it has not seen by their text.
        decay: weight of the new batch, in (0, 1].
        temperature: > 0, in reward units.
        prior_mass: N0 > 0.
        prior_variance: V_prior > 0.
        confidence: ``sem`` (Eq. 8), ``count`` (``u`` without the standard deviation), ``scale`` (without the mass), or
            a number in [0, 1], the fixed w of the ablation.
        mapping: ``exp(-u)``, ``inverse`` ``1 / (1 + u)`` or ``linear`` ``max(0, 1 - u)``.
        variance: ``shrunk`` to the prior, or that of the ``paper``.
        target: see `BasisHistory`; b is then a function of the blend with the mean of the group's other rollouts. As
            equal rewards of a group may be far from it, ``sigma_G^2`` is drawn towards the prior as well, by the mass
            G. A cold cluster has advantages at G = 1, and shrunk, ``|A|`` is at most ``sqrt((N + N0) / (N0 V_prior))``.
        eps: > 0.

    Raises:
        ValueError: a parameter out of its range.
    """

    clusters: PromptClusters | str | Path | Mapping[str, int]
    decay: PositiveShare = 0.9
    temperature: Positive = 0.1
    prior_mass: Positive = 1.0
    prior_variance: Positive = 0.25
    confidence: Confidence | Share = "sem"
    mapping: Map = "exp"
    variance: Variance = "shrunk"
    target: Target = "value"
    eps: Positive = 1e-6
    uses_own_reward = True
    kept = ("history", "range.ends", "optimal.moments")
    ON_MISSING: ClassVar[dict[str, str]] = {"clusters": "the folder that `basis-rl clusters RECIPE` writes."}
    scales = True

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.clusters
        if isinstance(given, (str, Path)):
            given = PromptClusters.load(given)
        self.clusters = self.codebook = given if isinstance(given, PromptClusters) else PromptClusters(given)
        self.requires = frozenset({"prompt_texts"} if self.codebook.needs_texts else ())
        # Cluster -> m1, m2, N.
        self.history: dict[int, tuple[float, float, float]] = {}

    def validate(self, run: RunContext) -> None:
        super().validate(run)
        missing = [prompt_id for prompt_id in run.prompts if prompt_id not in self.codebook]
        if not missing:
            return
        share = f"bv_blend: {len(missing)} of {len(run.prompts)} training prompts"
        if not self.codebook.needs_texts:
            first = f"({self.codebook.source}); the first is prompt_id '{missing[0]}'"
            raise ValueError(f"{share} have no cluster {first}. Build a codebook: `basis-rl clusters RECIPE`.")
        # Now, so that an encoder that cannot be loaded stops the run before it starts.
        self.codebook.load_encoder()
        _logger.warning("%s are not in the codebook (%s) and are embedded later.", share, self.codebook.source)

    def _weight(self, deviation: Tensor, mass: Tensor) -> Tensor:
        """``(N,)`` confidence in the history."""
        if isinstance(self.confidence, (int, float)):
            return torch.full_like(mass, float(self.confidence))
        u = torch.ones_like(mass) / self.temperature
        if self.confidence in ("sem", "scale"):
            u = u * deviation
        if self.confidence in ("sem", "count"):
            u = u / (mass + self.eps).sqrt()
        if self.mapping == "exp":
            return torch.exp(-u)
        return 1.0 / (1.0 + u) if self.mapping == "inverse" else (1.0 - u).clamp(min=0.0)

    def _shrunk(self, variance: Tensor, mass: Tensor) -> Tensor:
        """The variance of so many rollouts, drawn towards the prior."""
        return (mass * variance + self.prior_mass * self.prior_variance) / (mass + self.prior_mass)

    def _blend(self, batch: RolloutBatch) -> tuple[Tensor, ...]:
        """Of each rollout, ``(N,)``: baseline, scale, confidence, the group's mean, whether its cluster has a past; and
        the baseline without the own reward, by which `target` is told apart."""
        rewards = batch.rewards.double()
        groups = batch.group_ids
        clusters = self.codebook.assign(batch.prompt_ids, batch.prompt_texts)
        known = [self.history.get(cluster) for cluster in clusters]
        warm = torch.tensor([state is not None for state in known])
        # The state before the batch, as in Algorithm 2: `update` comes later.
        m1, m2, mass = torch.tensor([state or (0.0, 0.0, 0.0) for state in known], dtype=torch.float64).T
        past_variance = (m2 - m1**2).clamp(min=0.0)
        if self.variance == "shrunk":
            past_variance = self._shrunk(past_variance, mass)
        weight = torch.where(warm, self._weight(past_variance.sqrt(), mass), 0.0)

        # A group without a reward has no mean: 0 keeps the arithmetic finite, and its rows are left out below.
        count = segment_count(rewards, groups)
        mean = torch.where(count > 0, group_mean(rewards, groups), 0.0)
        variance = torch.where(count > 0, group_mean((rewards - mean) ** 2, groups), 0.0)
        if self.optimal.is_on:
            # b is not the group's mean then, so equal rewards may be far from it.
            variance = self._shrunk(variance, count)
        # Eqs. 10 and 11.
        baseline = weight * m1 + (1 - weight) * mean
        scale = (weight * past_variance + (1 - weight) * variance).sqrt()
        low, high = self.reward_range
        others = leave_one_out_mean(rewards, groups)
        known_mean = torch.where(others.isnan(), torch.where(warm, m1, (low + high) / 2), others)
        return baseline, scale, weight, mean, warm, weight * m1 + (1 - weight) * known_mean

    def advantages(self, batch: RolloutBatch) -> Advantages:
        rewards = batch.rewards.double()
        scorable = scorable_rows(batch)
        baseline, scale, weight, mean, warm, told_by_others = self._blend(batch)
        start = told_by_others if self.optimal.is_on else baseline
        baseline, told = self.optimal(start, batch.action_mask, self.range.known_ends)
        deviation = scale.reshape(-1, *[1] * (baseline.ndim - 1)) + self.eps
        values = where_scorable(batch, less_baseline(rewards, baseline) / deviation)
        count = scorable.sum().clamp(min=1)
        # What the group mean alone would teach, to compare with.
        local = torch.nan_to_num(rewards - mean, nan=0.0).abs() > 1e-6
        metrics = {
            "confidence": float(weight.mean()),
            "cold": float((~warm).double().mean()),
            "effective_signal": float((values.abs() > 1e-6).sum() / count),
            "group_signal": float((local & scorable).sum() / count),
            **told,
        }
        return Advantages(values=values, baseline=baseline, metrics=metrics)

    def believed(self, prompt_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the value of each prompt, in reward units. ``(P,), (P,)`` float64.

        Those of the rewards of its cluster: what one prompt of the cluster differs from another is not known, and the
        variance of rewards bounds it. A cluster without history, or a prompt that the codebook does not know by its id,
        has the middle of the reward range and `prior_variance`.
        """
        low, high = self.reward_range
        cold = ((low + high) / 2, ((low + high) / 2) ** 2 + self.prior_variance, 0.0)
        rows = [self.history.get(self.codebook.assignments.get(name, -1), cold) for name in prompt_ids]
        m1, m2, _ = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).T
        return m1.clone(), (m2 - m1**2).clamp(min=0.0)

    def update(self, batch: RolloutBatch) -> None:
        if widened := self.range.widen(batch.rewards):
            self.optimal.rescale(*widened)
        if self.range.known:
            self.optimal.learn(self._blend(batch)[-1], batch.rewards, batch, self.reward_range)
        rewards = batch.rewards.double()
        clusters = torch.tensor(self.codebook.assign(batch.prompt_ids, batch.prompt_texts))
        for cluster in clusters[~rewards.isnan()].unique().tolist():
            own = rewards[(clusters == cluster) & ~rewards.isnan()]
            mean = float(own.mean())
            new = (mean, float((own**2).mean()), float(len(own)))
            if cluster in self.history:
                pairs = zip(self.history[cluster], new, strict=True)
                m1, m2, mass = ((1 - self.decay) * old + self.decay * fresh for old, fresh in pairs)
                self.history[cluster] = (m1, m2, mass)
            else:
                self.history[cluster] = (mean, mean**2 + self.prior_variance, self.prior_mass)
