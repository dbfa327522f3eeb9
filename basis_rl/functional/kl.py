"""Estimators of KL(pi || pi_ref) from one sampled token (Schulman, "Approximating KL divergence")."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: Estimator) -> Tensor:
    """With ``d = log pi - log pi_ref``: k1 = ``d``, k2 = ``d^2 / 2``, k3 = ``exp(-d) - 1 + d``. Elementwise.

    As a loss only k2 and k3 pull towards the reference: on samples of the policy the expected gradient of k1 is 0, that
    of k2 is the gradient of the reverse KL, that of k3 the gradient of the forward KL (REINFORCE++, App. B.1). In the
    reward all three are values, and k1 is the unbiased one.

    In the loss TRL multiplies k3 by the ratio ``pi / pi_old`` unless ``use_bias_correction_kl`` is False, and so do we,
    so that a TRL configuration trains the same: the value is then unbiased off-policy, and the gradient at the ratio 1
    is ``d grad log pi``, that of k2, not the papers' k3. For theirs set ``use_bias_correction_kl: false``.

    With ratios of a whole rollout (``gspo``, ``luspo``) TRL multiplies by that ratio, and the gradient at the ratio 1
    is neither k2's nor k3's: that of k3, plus ``k3_t`` times the mean of the tokens' ``grad log pi``. ``gspo_token``
    has ratios of tokens in this place, so its KL term is not that of ``gspo``.
    """
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return torch.exp(-difference) - 1.0 + difference
