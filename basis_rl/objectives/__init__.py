"""How an advantage becomes a loss: TRL's objectives by name, our own, and users' objectives."""

from basis_rl.functional.objectives import AGGREGATIONS, Aggregation
from basis_rl.objectives.base import LossInputs, LossOutputs, LossSettings, Objective, TrlObjective, objective
from basis_rl.objectives.registry import OBJECTIVES, AnyObjective, build_objective, for_token_advantages, objective_name

__all__ = [
    "AGGREGATIONS",
    "OBJECTIVES",
    "Aggregation",
    "AnyObjective",
    "LossInputs",
    "LossOutputs",
    "LossSettings",
    "Objective",
    "TrlObjective",
    "build_objective",
    "for_token_advantages",
    "objective",
    "objective_name",
]
