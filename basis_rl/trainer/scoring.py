"""Scores of rollouts: what a forward pass over the policy tells, the mismatch with the engine, and an evaluation's."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.functional.passk import pass_at_k

Output = dict[str, Any]


class ScoringPass(ABC):
    """Keeps something of the forward pass that gives the old log-probabilities, so that it is never computed twice.

    TRL makes that pass when it wants the old log-probabilities; where it does not (one update per batch, no vLLM
    correction), `take` asks for one.
    """

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

    def listen(self, model: Any) -> Any:
        """`model`, or for the first scoring pass of a recording a callable that also keeps what is wanted."""
        if not self._listening:
            return model
        self._listening = False
        return lambda *args, **kwargs: self._record(model, *args, **kwargs)

    @abstractmethod
    def _record(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """What `model` returns; what is wanted of it goes into ``self._chunks``."""

    def take(self, output: Output, score: Callable[[Output], Tensor]) -> Tensor:
        """``(B, ...)`` of this rank's completions, from TRL's pass or from one that `score` makes."""
        if "old_per_token_logps" not in output:
            with self.recording():
                score(output)
        tokens = output["completion_ids"].shape[1]
        result = torch.cat([self._of_completion(chunk, tokens) for chunk in self._chunks])
        self._chunks = []
        return result

    def _of_completion(self, chunk: Tensor, tokens: int) -> Tensor:
        return chunk[:, -tokens:]


class EnergyRecorder(ScoringPass):
    """Lets TRL's fused LM head return ``log sum_v pi(v)^2`` too, and keeps ``(B, T)`` energies of what passes by.

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

    def _record(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        # The reference model's head does not compute it.
        if output.log_sum_sq_probs is not None:
            self._chunks.append(logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()))
        return output


class HiddenStates(ScoringPass):
    """The policy's last hidden states before each completion token, ``(B, T, H)``."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy: Any = policy

    def _record(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        backbone = (self.policy.get_base_model() if is_peft_model(self.policy) else self.policy).base_model
        hook = backbone.register_forward_hook(lambda _, __, found: self._chunks.append(found.last_hidden_state))
        try:
            return model(*args, **kwargs)
        finally:
            hook.remove()

    def _of_completion(self, chunk: Tensor, tokens: int) -> Tensor:
        return chunk[:, -tokens - 1 : -1]


def rollout_mismatch(accelerator: Accelerator, output: Output) -> dict[str, float]:
    """How far the engine that sampled is from the trained policy; empty without both log-probabilities (vLLM has them).

    With ``d_t = log pi_theta(y_t) - log pi_rollout(y_t)`` on action tokens:

    - ``rollout/kl``: mean of ``exp(d_t) - 1 - d_t``, the k3 estimate of KL(rollout || trained);
    - ``rollout/log_ppl_gap``: mean over sequences of ``|mean_t d_t|`` (Optimal Token Baseline, Eq. 68);
    - ``rollout/masked``: share of sequences that the importance correction silenced, every weight 0.
    """
    sampled = output.get("sampling_per_token_logps")
    if sampled is None or "old_per_token_logps" not in output:
        return {}
    mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool() & ~sampled.isnan()
    difference = torch.where(mask, output["old_per_token_logps"] - sampled, 0.0).double()
    tokens = mask.sum(dim=1)
    gap = difference.sum(dim=1).abs() / tokens.clamp(min=1)
    sums = [(difference.exp() - 1 - difference).sum(), tokens.sum(), gap.sum(), (tokens > 0).sum()]
    weights = rollout_weights(output)
    if weights is not None:
        sums.append((((weights * mask) == 0).all(dim=1) & (tokens > 0)).sum())
    kl, count, gaps, sequences, *masked = accelerator.reduce(
        torch.stack([value.double() for value in sums]), reduction="sum"
    ).tolist()
    found = {"rollout/kl": kl / max(1.0, count), "rollout/log_ppl_gap": gaps / max(1.0, sequences)}
    if masked:
        found["rollout/masked"] = masked[0] / max(1.0, sequences)
    return found


def rollout_weights(output: dict[str, Any]) -> Tensor | None:
    """``(B, T)`` weights ``pi_theta / pi_rollout`` as the loss uses them: truncated or masked by TRL's options."""
    weights: Tensor | None = output.get("importance_sampling_ratio")
    return None if weights is None else weights.expand(output["completion_ids"].shape)


class EvalScores:
    """Rewards of one evaluation, by problem.

    TRL's ``eval_reward`` is the mean of the means of the batches, of which the last may be smaller and, on several
    ranks, filled up with problems from the start. Here each problem has its first `num_rollouts` rewards, no others.
    """

    def __init__(self) -> None:
        self.rewards: dict[str, list[float]] = {}

    def add(self, prompt_ids: Sequence[str], rewards: Tensor, num_rollouts: int) -> None:
        """Take in a batch of all ranks: ``(N,)`` names and rewards; NaN (not scored) counts 0, as a wrong answer."""
        for name, reward in zip(prompt_ids, rewards.tolist(), strict=True):
            of_problem = self.rewards.setdefault(name, [])
            if len(of_problem) < num_rollouts:
                of_problem.append(0.0 if math.isnan(reward) else reward)

    def take(self, num_rollouts: int) -> dict[str, float]:
        """Return ``avg@n``, the mean over problems, and ``pass@k`` for k = 2, 4, ... up to n, and reset the counts.

        ``pass@k`` is there where all rewards are 0 or 1, and every problem has n. Empty where nothing was added.
        """
        rewards, self.rewards = list(self.rewards.values()), {}
        if not rewards:
            return {}
        found = {f"avg@{num_rollouts}": sum(sum(each) / len(each) for each in rewards) / len(rewards)}
        graded = all(reward in (0.0, 1.0) for each in rewards for reward in each)
        if graded and all(len(each) == num_rollouts for each in rewards):
            right = torch.tensor([sum(each) for each in rewards])
            ks = {2**i for i in range(1, num_rollouts.bit_length())} | ({num_rollouts} - {1})
            for k in sorted(k for k in ks if k <= num_rollouts):
                found[f"pass@{k}"] = float(pass_at_k(num_rollouts, right, k).mean())
        return found


def of_set(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    """The metrics of one of several evaluation sets under its name; TRL logs those of all under the same."""
    return {f"{name}_{key}": value for key, value in metrics.items()} if name else dict(metrics)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """After it every generator of random numbers is where it was before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
