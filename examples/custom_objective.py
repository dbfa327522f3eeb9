"""A custom objective with a penalty that pulls each ratio back in place of PPO's clip (Xie et al. 2024, 2401.16025).

basis-rl check examples.custom_objective:simple
basis-rl train RECIPE.yaml --objective examples.custom_objective:simple
"""

from basis_rl.objectives import LossInputs, LossOutputs, objective


@objective(token_advantages=True)
def simple(inputs: LossInputs) -> LossOutputs:
    """``L_t = -(rho_t A_t - |A_t| (rho_t - 1)^2 / (2 epsilon))``; mean over a rollout's tokens, then over rollouts."""
    ratio, advantages = inputs.ratio, inputs.token_advantages
    penalty = advantages.abs() * (ratio - 1) ** 2 / (2 * inputs.settings.epsilon_low)
    outside = (ratio.detach() - 1).abs() > inputs.settings.epsilon_low
    metrics = {"outside": outside.float()}
    return LossOutputs(per_token=penalty - ratio * advantages, aggregation="rollout_mean", metrics=metrics)
