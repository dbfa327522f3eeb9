"""The objects that a recipe names: baseline, reward functions, tools."""

from __future__ import annotations

from typing import Any

from basis_rl.baselines import Baseline, build_baseline
from basis_rl.names import did_you_mean
from basis_rl.recipe.keys import Recipe, RunArguments
from basis_rl.registry import construct, find
from basis_rl.rewards.registry import build_reward, split_params
from basis_rl.tools import TOOLS


def build_rewards(recipe: Recipe) -> list[Any]:
    """The reward functions, in the recipe's order.

    Raises:
        ValueError: a name that is neither registered nor can be imported, parameters or weights that do not fit.
    """
    names = recipe.run.reward_funcs
    weights = recipe.args.reward_weights
    if weights is not None and len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for the {len(names)} reward_funcs {', '.join(names)}: give one "
            "for each, in their order, or leave it out."
        )
    params = split_params(names, recipe.run.reward_kwargs or {})
    known: dict[str, Any] = {"max_completion_length": recipe.args.max_completion_length}
    return [
        build_reward(name, params[name], known | ({"answer_in": "auto"} if name == "math_verify" else {}))
        for name in names
    ]


def build_tools(run: RunArguments) -> list[Any]:
    """The tools.

    Raises:
        ValueError: a name that is neither registered nor can be imported, or parameters that do not fit.
    """
    names = run.tools or []
    kwargs = dict(run.tool_kwargs or {})
    for name in kwargs:
        if name not in names:
            raise ValueError(f"tool_kwargs: '{name}' is not among the tools {names}.{did_you_mean(name, names)}")
    return [construct("tool", find("tool", TOOLS, name), name, kwargs.get(name) or {}, "tool_kwargs") for name in names]


def build_recipe_baseline(run: RunArguments) -> Baseline:
    """The recipe's baseline object, from a registered name or a user's class as ``module:Class``.

    Raises:
        ValueError: no such baseline, or parameters that do not fit it.
    """
    return build_baseline(run.baseline, **(run.baseline_kwargs or {}))
