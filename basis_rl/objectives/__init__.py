"""How an advantage becomes a loss: TRL's objectives by name, our own, and users' objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from basis_rl.functional.objectives import AGGREGATIONS, Aggregation
from basis_rl.objectives.base import LossInputs, LossOutputs, LossSettings, Objective, TrlObjective, objective
from basis_rl.objectives.covariance import clip_cov, kl_cov
from basis_rl.objectives.own import gmpo, gpg, gspo_token
from basis_rl.objectives.trust_region import dis, dppo_kl, dppo_tv, ipo
from basis_rl.registry import find

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

AnyObjective = Objective | TrlObjective

OBJECTIVES: dict[str, AnyObjective] = {
    "grpo": TrlObjective("grpo"),
    "gspo": TrlObjective("grpo", "sequence"),
    "gspo_token": gspo_token,
    "dr_grpo": TrlObjective("dr_grpo"),
    "dapo": TrlObjective("dapo"),
    "gpg": gpg,
    "bnpo": TrlObjective("bnpo"),
    "cispo": TrlObjective("cispo"),
    "sapo": TrlObjective("sapo"),
    "luspo": TrlObjective("luspo", "sequence"),
    "vespo": TrlObjective("vespo"),
    "gmpo": gmpo,
    "dis": dis,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def objective_name(objective: AnyObjective) -> str:
    """Its registered name, or its own."""
    return next((key for key, each in OBJECTIVES.items() if each == objective), objective.name)


def for_token_advantages(objective: AnyObjective) -> AnyObjective:
    """The same objective in the form that takes an advantage of each token: `gspo_token` for ``gspo``, else itself."""
    return gspo_token if objective == OBJECTIVES["gspo"] else objective


def build_objective(objective: str | AnyObjective | Callable[..., Any]) -> AnyObjective:
    """The objective by its registered name, by ``module:function``, or as it is.

    Raises:
        ValueError: unknown name, or a function that does not declare what it takes.
    """
    found: Any = find("objective", OBJECTIVES, objective) if isinstance(objective, str) else objective
    if isinstance(found, (Objective, TrlObjective)):
        return found
    name = objective if isinstance(objective, str) else getattr(objective, "__name__", repr(objective))
    if callable(found) and not isinstance(found, type):
        way_out = "Decorate the function: @basis_rl.objectives.objective(token_advantages=True), or False"
        wrong = "does not declare whether each token's own advantage reaches its gradient"
        raise ValueError(f"Objective '{name}' {wrong}. {way_out}.")
    raise ValueError(f"Objective '{name}' is a {type(found).__name__}, no function from LossInputs to LossOutputs.")
