"""The objects that a recipe names: baseline, reward functions, tools."""

from __future__ import annotations

from typing import Any

from basis_rl.baselines import Baseline, build_baseline
from basis_rl.names import did_you_mean, import_object
from basis_rl.recipe.keys import Recipe, RunArguments
from basis_rl.rewards.registry import POOL, build_reward, split_params
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
    rewards = []
    for name in names:
        if "." in name and not name.startswith(POOL):
            found = import_object(name, "reward function")
            rewards.append(_built(found, params[name], "reward_kwargs", name))
        else:
            asked = {"answer_in": "auto"} if name == "math_verify" else {}
            rewards.append(build_reward(name, params[name], known | asked))
    return rewards


def _built(found: Any, params: dict[str, Any], key: str, name: str) -> Any:
    """An object of a class, built with `params`, which `key` of the recipe has; a function as it is."""
    if not isinstance(found, type):
        if not callable(found):
            raise ValueError(f"'{name}' is a {type(found).__name__}, not a function.")
        if params:
            raise ValueError(f"{key}: '{name}' is a function, which has no parameters to set; a class has.")
        return found
    try:
        return found(**params)
    except TypeError as error:
        raise ValueError(f"{key} {params} do not fit '{name}': {error}.") from error


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
    tools: list[Any] = []
    for name in names:
        if name in TOOLS:
            tool: Any = TOOLS[name]
        elif "." in name:
            tool = import_object(name, "tool")
        else:
            raise ValueError(
                f"Unknown tool '{name}'.{did_you_mean(name, TOOLS)} Take {', '.join(TOOLS)} or a dotted path."
            )
        tools.append(_built(tool, kwargs.get(name) or {}, "tool_kwargs", name))
    return tools


def build_recipe_baseline(run: RunArguments) -> Baseline:
    """The recipe's baseline object, from a registered name or a user's class as ``module:Class``.

    Raises:
        ValueError: no such baseline, or parameters that do not fit it.
    """
    return build_baseline(run.baseline, **(run.baseline_kwargs or {}))
