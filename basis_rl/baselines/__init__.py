"""Baselines: how the advantage of a rollout is estimated. One short file a family, all behind one contract."""

from basis_rl.baselines.base import (
    Baseline,
    CenterScale,
    LearnedBaseline,
    Learning,
    TokenLoss,
    check_state_keys,
    scorable_rows,
)
from basis_rl.baselines.basis import Basis
from basis_rl.baselines.batch import BatchMean, NoBaseline, WReinforce
from basis_rl.baselines.bv_blend import BVBlend
from basis_rl.baselines.gdpo import Gdpo
from basis_rl.baselines.group import DrGrpo, Grpo, MaxRl, Quantile, Rloo
from basis_rl.baselines.history import BasisHistory
from basis_rl.baselines.least_variance import LeastVariance
from basis_rl.baselines.pass_at_k import PassAtK
from basis_rl.baselines.ppo import Ppo
from basis_rl.baselines.registry import BASELINES, build_baseline
from basis_rl.baselines.reinforce import ReinforcePP, ReinforcePPBaseline
from basis_rl.baselines.remax import ReMax
from basis_rl.baselines.shrinkage import Ebpo, JamesStein
from basis_rl.baselines.spo import Spo
from basis_rl.baselines.token import EnergyBaseline, IsolatedEnergy, Opo, OptimalGlobalBaseline, OptimalTokenBaseline

__all__ = [
    "BASELINES",
    "BVBlend",
    "Baseline",
    "Basis",
    "BasisHistory",
    "BatchMean",
    "CenterScale",
    "DrGrpo",
    "Ebpo",
    "EnergyBaseline",
    "Gdpo",
    "Grpo",
    "IsolatedEnergy",
    "JamesStein",
    "LearnedBaseline",
    "Learning",
    "LeastVariance",
    "MaxRl",
    "NoBaseline",
    "Opo",
    "OptimalGlobalBaseline",
    "OptimalTokenBaseline",
    "PassAtK",
    "Ppo",
    "Quantile",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "Rloo",
    "Spo",
    "TokenLoss",
    "WReinforce",
    "build_baseline",
    "check_state_keys",
    "scorable_rows",
]
