"""Baselines: how the advantage of a rollout is estimated. One short file a family, all behind one contract."""

from __future__ import annotations

from typing import Any

from basis_rl.baselines.a_star_po import AStarPO
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
from basis_rl.baselines.bv_blend import BVBlend
from basis_rl.baselines.group import DrGrpo, Ebpo, Gdpo, Grpo, JamesStein, MaxRl, PassAtK, Rloo
from basis_rl.baselines.history import BasisHistory
from basis_rl.baselines.poise import Poise
from basis_rl.baselines.ppo import Ppo
from basis_rl.baselines.reinforce import BatchMean, NoBaseline, ReinforcePP, ReinforcePPBaseline, ReMax
from basis_rl.baselines.sao import Sao
from basis_rl.baselines.spo import Spo
from basis_rl.baselines.token import EnergyBaseline, IsolatedEnergy, Opo, OptimalGlobalBaseline, OptimalTokenBaseline
from basis_rl.registry import build, name_of

__all__ = [
    "BASELINES",
    "AStarPO",
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
    "MaxRl",
    "NoBaseline",
    "Opo",
    "OptimalGlobalBaseline",
    "OptimalTokenBaseline",
    "PassAtK",
    "Poise",
    "Ppo",
    "ReMax",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "Rloo",
    "Sao",
    "Spo",
    "TokenLoss",
    "build_baseline",
    "check_state_keys",
    "scorable_rows",
]

BASELINES: dict[str, type[Baseline]] = {
    "none": NoBaseline,
    "batch_mean": BatchMean,
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "basis": Basis,
    "basis_history": BasisHistory,
    "bv_blend": BVBlend,
    "opo": Opo,
    "ogb": OptimalGlobalBaseline,
    "remax": ReMax,
    "otb": OptimalTokenBaseline,
    "isolated_energy": IsolatedEnergy,
    "ppo": Ppo,
    "sao": Sao,
    "spo": Spo,
    "a_star_po": AStarPO,
    "poise": Poise,
    "james_stein": JamesStein,
    "ebpo": Ebpo,
    "max_rl": MaxRl,
    "pass_at_k": PassAtK,
    "gdpo": Gdpo,
}


def baseline_name(baseline: Baseline) -> str:
    """Its registered name, or that of its class."""
    return name_of(BASELINES, baseline)


def build_baseline(name: str, **params: Any) -> Baseline:
    """The registered baseline `name`, or your own class as ``module:Class``, built with `params`.

    Raises:
        ValueError: unknown name, unknown or missing parameter, or a parameter that the baseline refuses.
    """
    return build("baseline", BASELINES, Baseline, name, params)
