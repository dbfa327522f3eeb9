"""GPG (Chu et al. 2025, arXiv:2504.02546)."""

from __future__ import annotations

from basis_rl.objectives.base import LossInputs, LossOutputs, objective


@objective(token_advantages=True, on_policy=True)
def gpg(inputs: LossInputs) -> LossOutputs:
    """``L_t = -A_t pi(y_t) / stop_gradient(pi(y_t))``: policy gradient without ratio and clip, averaged over tokens.

    The gradient is that of ``-A_t log pi(y_t)``; the value is that of PPO's surrogate at the ratio 1.
    """
    return LossOutputs(per_token=-inputs.ratio * inputs.token_advantages, aggregation="token_mean")
