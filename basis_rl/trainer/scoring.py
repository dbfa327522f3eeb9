"""What is computed of scored rollouts: signals of the forward pass, mismatch with the engine, avg@k and pass@k."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.functional.objectives import BYPASS, importance_weights
from basis_rl.functional.passk import pass_at_k
from basis_rl.trainer.config import BasisConfig
from basis_rl.trainer.packing import IGNORED, Scorer
from basis_rl.types import action_mask

Output = dict[str, Any]
_logger = logging.getLogger(__name__)
# A logarithm of weights above which their squares would lose all others.
_LARGEST = 40.0
# Tokens whose states are averaged.
_POOLED = 10
# A tenth of the layers lies above what energies of whole rollouts are measured in.
_DEPTH = 10
# Effective rollouts of a batch, as a share of all, below which a run is warned.
_SMALLEST_SAMPLE = 0.1


def layers_of(policy: Any) -> Sequence[nn.Module]:
    """The layers of a policy's decoder, from the first to the last; empty if it has no list of them."""
    count = policy.config.get_text_config().num_hidden_layers
    for part in policy.base_model.get_decoder().modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    return ()


class ScoringPass(ABC):
    """Records a quantity during the forward pass that gives the old log-probabilities, which saves a second pass.

    TRL makes that pass when it wants the old log-probabilities; where it does not (one update per batch, no vLLM
    correction), the trainer makes one for all recorders.

    Class attributes:
        of_tokens: whether what is recorded has a column for each token of a row but the first.
    """

    of_tokens: bool = True

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._listening = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, the first scoring pass over the policy is recorded: TRL scores it before the reference model."""
        self._chunks = []
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def listen(self, model: Any, scorer: Scorer) -> Any:
        """`model`, or for the first scoring pass of a recording a callable that also keeps what is wanted.

        Args:
            model: `scorer`, or what another pass made of it.
            scorer: calls the policy.
        """
        if not self._listening:
            return model
        self._listening = False
        return lambda **inputs: self._record(model, scorer, inputs)

    @abstractmethod
    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        """What `model` returns; what is wanted of it goes into ``self._chunks``."""

    def take(self, output: Output) -> Tensor:
        """``(B, ...)`` of this rank's completions, from the latest pass that was recorded."""
        tokens = output["completion_ids"].shape[1]
        result = torch.cat([chunk[:, -tokens:] if self.of_tokens else chunk for chunk in self._chunks])
        self._chunks = []
        return result


class EnergyRecorder(ScoringPass):
    """Lets TRL's fused LM head also return ``log sum_v pi(v)^2``, and keeps the ``(B, T)`` energies of a scoring pass.

    The head computes it tile by tile, so no ``(B, T, V)`` tensor is ever made.
    """

    def __init__(self, model: Any, *, temperature: float, fp32_head: bool) -> None:
        super().__init__()
        add_fused_lm_head(
            model.get_base_model() if is_peft_model(model) else model,
            temperature=temperature,
            cast_lm_head_to_fp32=fp32_head,
            outputs=("log_probs", "entropy", "log_sum_sq_probs"),
        )

    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        output = model(**inputs)
        # The reference model's head does not compute it.
        if output.log_sum_sq_probs is not None:
            self._chunks.append(logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()))
        return output


class EntropyRecorder(ScoringPass):
    """Entropy of the policy's distribution of each completion token, ``(B, T)``."""

    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        output = model(**inputs)
        self._chunks.append(output.entropy)
        return output


class HiddenStates(ScoringPass):
    """The policy's last hidden states before each completion token, ``(B, T, H)``."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy: Any = policy.get_base_model() if is_peft_model(policy) else policy
        # What returns the states, alone or first.
        self.module: nn.Module = self.policy.base_model

    def _record(self, model: Any, scorer: Scorer, inputs: dict[str, Any]) -> Any:
        seen: list[Any] = []
        hook = self.module.register_forward_hook(lambda _, __, found: seen.append(found))
        try:
            output = model(**inputs)
        finally:
            hook.remove()
        # Nothing was seen if the reference was called: the hook is on the policy.
        for found in seen:
            states = scorer.before_tokens(found if isinstance(found, Tensor) else found[0])
            self._chunks.append(self._kept(states, inputs["labels"][:, 1:] != IGNORED))
        return output

    def _kept(self, states: Tensor, scored: Tensor) -> Tensor:
        """What is kept of the states before each token, of which some are `scored`."""
        return states


class PooledStates(HiddenStates):
    """``(B, 2, H)`` float32 states of the policy's middle layer (`RolloutBatch.hidden_states`).

    The layer is the one with the index ``layers // 2 + 1``, from 0: 19 of the 36 of Qwen3-4B, the best of POISE's
    Table 8. A row that has nothing scored has 0.

    Raises:
        ValueError: the policy has no list of its layers.
    """

    of_tokens = False

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        layers = layers_of(self.policy)
        if not layers:
            kind = type(self.policy).__name__
            raise ValueError(
                f"The baseline reads states of a layer, and {kind} has no list of layers. Take another one."
            )
        self.module = layers[min(len(layers) // 2 + 1, len(layers) - 1)]

    def _kept(self, states: Tensor, scored: Tensor) -> Tensor:
        kept = states.new_zeros((len(states), 2, states.shape[-1]), dtype=torch.float32)
        # Learnt prompts may stand before the row's own tokens.
        for row, own, which in zip(kept, states[:, -scored.shape[1] :], scored, strict=True):
            before = own[which].float()
            if len(before):
                row[0] = before[0]
                row[1] = before[-_POOLED:].mean(dim=0)
        return kept


class GradientEnergies:
    """Keeps ``|dL / dx_t|^2 / A_t^2`` of each token of the loss's own pass (`RolloutBatch.gradient_energies`).

    Where tokens have advantages of their own, ``x_t`` is what the policy's last layer returns, since only the token's
    own loss passes through it. It is found by running the policy: it enters the last module that the backbone calls,
    as a rule the final norm. Where a rollout has one advantage, ``x_t`` is what the layer a tenth of all below it
    returns (3 below of 30; with fewer than 10 layers, the last). Losses of later tokens pass through it too, and the
    rollout's energy, their sum, is then close to that of the whole gradient (docs/estimators.md).

    Equal rollouts go through the policy once, so its gradient there is divided by the sum of their advantages. Where
    other rollouts only begin alike, that gives at most the largest of their energies.

    Args:
        policy: before it is wrapped for training.
    """

    def __init__(self, policy: Any) -> None:
        plain: Any = policy.get_base_model() if is_peft_model(policy) else policy
        self._modules = [module for module in plain.base_model.modules() if not any(module.children())]
        layers = layers_of(plain)
        below = len(layers) // _DEPTH
        self._above = layers[len(layers) - below] if below else None
        self.warned = False

    @staticmethod
    def prepare(output: Output, rank: int) -> None:
        """Add to a rank's generation batch each row's place in that of all ranks, since rows will move, and room for
        the energies."""
        rows = len(output["completion_ids"])
        output["global_row"] = torch.arange(rows, device=output["completion_ids"].device) + rank * rows
        output["gradient_energies"] = torch.zeros_like(output["completion_mask"], dtype=torch.float32)

    @contextmanager
    def of_loss(self, inputs: Output, scorer: Scorer) -> Iterator[None]:
        """Within it the policy is run for the loss of a micro-batch, which gets its energies in the backward pass.

        A micro-batch that comes again (``num_iterations``) keeps those of the first pass.
        """
        if "global_row" not in inputs or inputs["gradient_energies"].any():
            yield
            return
        advantages = inputs["advantages"].float()
        inner = self._above if advantages.ndim == 1 else None
        entered: dict[bool, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = args[0] if args else named.get("hidden_states")
            if isinstance(given, Tensor) and given.ndim == 3:
                entered[module is inner] = given

        modules = self._modules if inner is None else [*self._modules, inner]
        hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        tokens = inputs["gradient_energies"].shape[1]
        each = advantages if advantages.ndim == 2 else advantages[:, None].expand(-1, tokens)
        squares = scorer.over_shared(each.abs()) ** 2
        before_tokens = scorer.before_tokens

        def energies(gradient: Tensor | None) -> None:
            # Of a compiled model, in which nothing uses the tensor itself.
            if gradient is None:
                return
            norms = before_tokens(gradient.float().square().sum(dim=-1, keepdim=True))[:, -tokens:, 0]
            inputs["gradient_energies"] = torch.where(each * squares != 0, norms / squares, 0.0)

        # Below the first layer that is trained there is no gradient.
        reached = [entered[which] for which in (True, False) if which in entered and entered[which].requires_grad]
        if reached:
            reached[0].register_hook(energies)

    def taken(self, micro_batches: Sequence[Output]) -> tuple[Tensor, Tensor]:
        """The places ``(B,)`` and the energies ``(B, T)`` of the rows that this rank has trained on; warns once if the
        loss tells nothing."""
        found = torch.cat([each["gradient_energies"] for each in micro_batches])
        if not self.warned and not found.any() and any(bool(each["advantages"].any()) for each in micro_batches):
            self.warned = True
            if PartialState().is_main_process:
                _logger.warning(
                    "The loss has no gradient in what the policy's last layer returns: nothing up to there is trained, "
                    "or the model is compiled (torch_compile). So the baseline cannot learn its target and stays the "
                    "value. Set baseline_kwargs: {target: value}, or change that."
                )
        return torch.cat([each["global_row"] for each in micro_batches]), found


def rollout_mismatch(accelerator: Accelerator, output: Output) -> dict[str, float]:
    """How far the engine that sampled is from the trained policy; empty without both log-probabilities (vLLM has them).

    With ``d_t = log pi_theta(y_t) - log pi_rollout(y_t)`` on action tokens:

    - ``rollout/kl``: mean of ``exp(d_t) - 1 - d_t``, the k3 estimate of KL(rollout || trained);
    - ``rollout/log_ppl_gap``: mean over sequences of ``|mean_t d_t|`` (Optimal Token Baseline, Eq. 68);
    - ``rollout/ess``: effective sample size of the sequences, ``(sum_i w_i)^2 / (N sum_i w_i^2)`` with the weights
      ``w_i = exp(sum_t d_t)`` before any bound: 1 if all are alike, 1 / N if one outweighs all others (2602.17616);
    - ``rollout/masked``: share of sequences that the importance correction silenced, every weight 0.

    Tokens whose log-probability the engine does not tell (NaN) are left out; all but the last are NaN if none is left.
    """
    sampled = output.get("sampling_per_token_logps")
    if sampled is None or "old_per_token_logps" not in output:
        return {}
    mask = action_mask(output).bool() & ~sampled.isnan()
    difference = torch.where(mask, output["old_per_token_logps"] - sampled, 0.0).double()
    tokens = mask.sum(dim=1)
    gap = difference.sum(dim=1).abs() / tokens.clamp(min=1)
    weight = torch.where(tokens > 0, difference.sum(dim=1).clamp(-_LARGEST, _LARGEST).exp(), 0.0)
    sums = [(difference.exp() - 1 - difference).sum(), tokens.sum(), gap.sum(), (tokens > 0).sum()]
    sums += [weight.sum(), (weight**2).sum()]
    weights = rollout_weights(output)
    if weights is not None:
        sums.append((((weights * mask) == 0).all(dim=1) & (tokens > 0)).sum())
    kl, count, gaps, sequences, whole, squares, *masked = accelerator.reduce(
        torch.stack([value.double() for value in sums]), reduction="sum"
    ).tolist()
    found = {"rollout/kl": kl / count if count else math.nan}
    found["rollout/log_ppl_gap"] = gaps / sequences if sequences else math.nan
    found["rollout/ess"] = whole**2 / (sequences * squares) if sequences else math.nan
    if masked:
        found["rollout/masked"] = masked[0] / max(1.0, sequences)
    return found


def correction_weights(args: BasisConfig, inputs: Output, log_probs: Tensor) -> Tensor:
    """`importance_weights`, ``(B, T)`` or ``(B, 1)``, by the settings; `log_probs` are the policy's."""
    mask = action_mask(inputs)
    bounds = (args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max)
    mode = args.vllm_importance_sampling_mode
    return importance_weights(log_probs, inputs["sampling_per_token_logps"], mask, mode, *bounds)


class RolloutCorrection:
    """The correction of vLLM's rollouts where the loss's own pass gives the log-probabilities that it needs.

    Where a generation batch serves one optimizer step only, the policy that the loss scores is the one that sampled,
    and TRL's separate scoring pass would compute the same once more. With ``bypass`` no such policy is asked.

    Args:
        args: the correction's settings.
    """

    def __init__(self, args: BasisConfig) -> None:
        self.args = args

    def add(self, inputs: Sequence[Output], log_probs: Tensor, batch: Sequence[Output]) -> Output | None:
        """Put a micro-batch's weights, and with ``bypass`` its old log-probabilities, where the loss looks for them.

        Args:
            inputs: the micro-batch, and the copy of it that TRL's loss reads, if that is another one.
            log_probs: ``(B, T)`` of the loss's pass.
            batch: the micro-batches of the generation batch.

        Returns:
            At the last micro-batch of a generation batch, that batch as if it had been scored before; else None.
        """
        first = inputs[0]
        # A micro-batch that comes again (num_iterations) counts once.
        is_new = "scored_logps" not in first
        scored = log_probs.detach()
        weights = correction_weights(self.args, first, scored)
        for each in inputs:
            each["importance_sampling_ratio"] = weights
        if is_new:
            first["scored_logps"] = scored
            if self.args.vllm_importance_sampling_mode == BYPASS:
                sampled = first["sampling_per_token_logps"]
                first["old_per_token_logps"] = torch.where(sampled.isnan(), scored, sampled)
        if not is_new or any("scored_logps" not in each for each in batch):
            return None
        names = {"completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps", "scored_logps"}
        names = (names | {"importance_sampling_ratio"}) & set(first)
        whole = {name: torch.cat([each[name][: each.get("real_rows")] for each in batch]) for name in names}
        return {**whole, "old_per_token_logps": whole["scored_logps"]}


def correction_metrics(accelerator: Accelerator, output: Output) -> dict[str, float]:
    """TRL's ``sampling/*`` metrics of a scored generation batch: differences of log-probabilities, and weights.

    Tokens without a log-probability of the engine (NaN) have weight 1 and no difference. If a rank has none at all,
    every metric is NaN, where TRL's would show perfect agreement; a rank without tokens counts nothing.
    """
    mask = action_mask(output).bool()
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()[mask]
    weights = output["importance_sampling_ratio"]
    weights = weights.flatten() if weights.shape[1] == 1 and mask.shape[1] != 1 else weights.expand(mask.shape)[mask]
    difference = difference[~difference.isnan()]
    if not len(difference):
        difference = weights = torch.full((1,), torch.nan, device=mask.device)
    counts = [torch.tensor(len(values), device=mask.device) for values in (difference, weights)]
    local = [difference.max(), weights.min(), weights.max(), difference.sum(), weights.sum(), *counts]
    mine = torch.stack([value.double() for value in local])
    if not mask.any():
        mine = mine.new_tensor([-math.inf, math.inf, -math.inf, 0, 0, 0, 0])
    each = accelerator.gather(mine[None])
    names = [f"sampling_logp_difference/{name}" for name in ("mean", "max")]
    names += [f"importance_sampling_ratio/{name}" for name in ("min", "mean", "max")]
    sums = each[:, 3:].sum(dim=0)
    means = sums[:2] / sums[2:]
    values = (means[0], each[:, 0].max(), each[:, 1].min(), means[1], each[:, 2].max())
    return {f"sampling/{name}": float(value) for name, value in zip(names, values, strict=True)}


class RatioAlarm:
    """Warns once when the mean weight of vLLM's rollouts leaves 0.5 to 2, as it does if the engine has another policy,
    and once when few of them outweigh all others."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, mean: float) -> None:
        """`mean`: ``sampling/importance_sampling_ratio/mean`` of a generation batch."""
        if not 0.5 <= mean <= 2.0:
            self._warn(
                f"The mean weight of the rollouts (sampling/importance_sampling_ratio/mean) is {mean:.3g}, which is "
                "not between 0.5 and 2: the engine that samples has other probabilities than the policy that is "
                "trained. Look at rollout/kl and rollout/masked, and at the server's --dtype.",
                "mean",
            )

    def check_sample_size(self, share: float) -> None:
        """`share`: ``rollout/ess`` of a generation batch."""
        if share < _SMALLEST_SAMPLE:
            self._warn(
                f"The effective sample size of a batch (rollout/ess) is {share:.2g} of its rollouts: a few of them "
                "outweigh all others, before any bound of the weights. The policy has moved too far from the one that "
                "sampled; lower max_staleness, num_iterations, steps_per_generation or learning_rate.",
                "sample size",
            )

    def _warn(self, message: str, kind: str) -> None:
        if kind not in self._warned and PartialState().is_main_process:
            _logger.warning(message)
        self._warned.add(kind)


def rollout_weights(output: dict[str, Any]) -> Tensor | None:
    """``(B, T)`` weights ``pi_theta / pi_rollout`` as the loss uses them: truncated or masked by TRL's options."""
    weights: Tensor | None = output.get("importance_sampling_ratio")
    return None if weights is None else weights.expand(output["completion_ids"].shape)


class EvalScores:
    """Rewards of one evaluation, by row of its set.

    TRL's ``eval_reward`` is the mean of the means of the batches, of which the last may be smaller and, on several
    ranks, filled up with rows from the start. Here every row counts once, whatever it shares with others.
    """

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def add(self, rewards: Tensor) -> None:
        """Take in a batch of all ranks, ``(N,)``, row after row; NaN where there is no score."""
        self.rewards += rewards.tolist()

    def take(self, num_rollouts: int, rows: int | None) -> dict[str, float]:
        """Return ``reward``, the mean of all scores; ``avg@n``, the same with 0 where there is no score, as of a wrong
        answer; and, where all of these are 0 or 1, ``pass@k`` for k = 2, 4, ... up to n. Reset the counts.

        Args:
            num_rollouts: of each row.
            rows: the length of the set; None for a stream, of which all that came counts.
        """
        scores = torch.tensor(self.rewards).double()[: rows and rows * num_rollouts]
        self.rewards = []
        if not len(scores):
            return {}
        rewards = scores.nan_to_num(nan=0.0).view(-1, num_rollouts)
        found = {"reward": float(scores.nanmean()), f"avg@{num_rollouts}": float(rewards.mean())}
        if bool(((rewards == 0) | (rewards == 1)).all()):
            right = rewards.sum(dim=1).long()
            ks = {2**i for i in range(1, num_rollouts.bit_length())} | ({num_rollouts} - {1})
            for k in sorted(ks):
                found[f"pass@{k}"] = float(pass_at_k(num_rollouts, right, k).mean())
        return found
