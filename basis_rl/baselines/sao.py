"""SAO's critic as a baseline (Hou, Li, Tang and Dong 2026, arXiv:2607.07508)."""

from __future__ import annotations

from dataclasses import dataclass, field

from basis_rl.baselines.ppo import Ppo
from basis_rl.registry import OneOrMore, Positive, Share, WholeNumber


@dataclass(eq=False)
class Sao(Ppo):
    """`ppo` with the settings of Single-rollout Asynchronous Optimization. G = 1 in the paper, >= 1 here.

    GAE passes over tool output: an action's last token is followed by the next one's first (Eqs. 4, 5), and the reward
    is on the last token that the model produced. ``lam = 1 - 1 / (1.5 l)`` for the policy, 1 for the critic's targets.
    The critic starts as the policy's model with its attention frozen, and takes two updates (K) for one of the policy.

    Departures: the paper pre-trains the value on 6,000 samples; here the policy waits for 10 batches, as ports read its
    10 steps of warm-up. It trains the experts of a mixture; here all but attention learns, and hybrid models have
    linear attention frozen too. K is `critic_epochs` divided by ``num_iterations``. Not stated, and as with `ppo`:
    gamma, the value's loss, whitening. l leaves tool output out. DIS and streamed rollouts are not the baseline's.

    Args:
        lam_alpha: > 0.
        critic_learning_rate: None is the paper's 5e-6, or 1e-3 for a head (``critic_model: null``, which needs
            ``critic_freeze_attention: false``).

    Other arguments, metrics and errors are those of `basis_rl.baselines.ppo.Ppo`.
    """

    lam: Share = field(default=1.0, init=False)
    lam_alpha: Positive = 1.5
    critic_lam: Share = 1.0
    critic_model: str | None = "policy"
    critic_epochs: OneOrMore = 2
    critic_warmup_steps: WholeNumber = 10
    critic_freeze_attention: bool = True
    model_rate = 5e-6
