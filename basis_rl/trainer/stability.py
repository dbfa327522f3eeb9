"""How stable training is: noise of the gradient, and how far the rollout engine's policy is from the trained one."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor

from basis_rl.trainer.ports import Run


class GradientMonitor:
    """Total power, signal and variance of an optimizer step's gradient (Optimal Token Baseline, App. E, Eqs. 65-67).

    With the gradients ``g_1 .. g_n`` of the step's micro-batches (over all ranks), each scaled to be an estimate of the
    whole step's gradient ``g = mean_j g_j``::

        total_power = mean_j |g_j|^2      signal = |g|^2      variance = (total_power - signal) / (n - 1)

    `variance` is the variance of g; one micro-batch of one rollout is the paper's sample. The paper puts a proxy of the
    power in LOGIT space beside a signal in parameter space; here all three are in parameter space, before clipping.
    Gradients are caught on their way into ``.grad``, so nothing is copied. Steps of a single micro-batch log nothing.

    Raises:
        ValueError: gradients are sharded or scaled, so that a parameter's whole gradient is never seen.
    """

    def __init__(self, trainer: Run) -> None:
        kind = trainer.accelerator.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP) or trainer.args.fp16:
            found = "fp16" if trainer.args.fp16 else kind.value
            raise ValueError(
                f"log_gradient_variance does not work with {found}: whole, unscaled "
                "gradients are needed. Leave it out, or train with plain data parallelism in bf16 or fp32."
            )
        self.trainer = trainer
        self._power: Tensor | None = None
        self._micro_batches = 0
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        power = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32) ** 2
        self._power = power if self._power is None else self._power + power

    def count(self) -> None:
        """Call after each micro-batch's backward pass."""
        self._micro_batches += 1

    def close(self, grad_norm: float) -> None:
        """Log the step whose gradient, averaged over ranks and not clipped, has this norm."""
        ranks = self.trainer.accelerator.num_processes
        n = self._micro_batches * ranks
        power, self._power, self._micro_batches = self._power, None, 0
        if power is None or n < 2:
            return
        total = n / ranks**2 * float(self.trainer.accelerator.reduce(power, reduction="sum"))
        signal = float(grad_norm) ** 2
        found = {"total_power": total, "signal": signal, "variance": (total - signal) / (n - 1)}
        for name, value in found.items():
            self.trainer.log_metric(f"gradient/{name}", value)


def log_rollout_mismatch(trainer: Run, output: dict[str, Any]) -> None:
    """Log how far the engine that sampled is from the trained policy, where both log-probabilities are there (vLLM).

    With ``d_t = log pi_theta(y_t) - log pi_rollout(y_t)`` on action tokens:

    - ``rollout/kl``: mean of ``exp(d_t) - 1 - d_t``, the k3 estimate of KL(rollout || trained);
    - ``rollout/log_ppl_gap``: mean over sequences of ``|mean_t d_t|`` (Optimal Token Baseline, Eq. 68);
    - ``rollout/masked``: share of sequences that the importance correction silenced, every weight 0.
    """
    sampled = output.get("sampling_per_token_logps")
    if sampled is None or "old_per_token_logps" not in output:
        return
    mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool() & ~sampled.isnan()
    difference = torch.where(mask, output["old_per_token_logps"] - sampled, 0.0).double()
    tokens = mask.sum(dim=1)
    gap = difference.sum(dim=1).abs() / tokens.clamp(min=1)
    sums = [(difference.exp() - 1 - difference).sum(), tokens.sum(), gap.sum(), (tokens > 0).sum()]
    weights = rollout_weights(output)
    if weights is not None:
        sums.append((((weights * mask) == 0).all(dim=1) & (tokens > 0)).sum())
    kl, count, gaps, sequences, *masked = trainer.accelerator.reduce(
        torch.stack([value.double() for value in sums]), reduction="sum"
    ).tolist()
    found = {"kl": kl / max(1.0, count), "log_ppl_gap": gaps / max(1.0, sequences)}
    if masked:
        found["masked"] = masked[0] / max(1.0, sequences)
    for name, value in found.items():
        trainer.log_metric(f"rollout/{name}", value)


def rollout_weights(output: dict[str, Any]) -> Tensor | None:
    """``(B, T)`` weights ``pi_theta / pi_rollout`` as the loss uses them: truncated or masked by TRL's options."""
    weights: Tensor | None = output.get("importance_sampling_ratio")
    return None if weights is None else weights.expand(output["completion_ids"].shape)
