"""Verifiable rewards."""

from basis_rl.rewards.base import Reward, RewardError, check_reward
from basis_rl.rewards.choice import ChoiceReward
from basis_rl.rewards.code.reward import CodeReward
from basis_rl.rewards.exact import ExactReward
from basis_rl.rewards.extract import last_boxed
from basis_rl.rewards.format import FormatReward
from basis_rl.rewards.function import FunctionReward
from basis_rl.rewards.gym import ReasoningGymReward
from basis_rl.rewards.judge import JudgeReward
from basis_rl.rewards.math.reward import MathVerifyReward, gold_answer
from basis_rl.rewards.overlong import OverlongReward
from basis_rl.rewards.workers.calls import FunctionError

__all__ = [
    "ChoiceReward",
    "CodeReward",
    "ExactReward",
    "FormatReward",
    "FunctionError",
    "FunctionReward",
    "JudgeReward",
    "MathVerifyReward",
    "OverlongReward",
    "ReasoningGymReward",
    "Reward",
    "RewardError",
    "check_reward",
    "gold_answer",
    "last_boxed",
]
