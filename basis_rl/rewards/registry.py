"""Every reward function by its name in a recipe, and what the parameters of a recipe mean for it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

from basis_rl.names import did_you_mean
from basis_rl.registry import construct, find
from basis_rl.rewards.base import GIVEN
from basis_rl.rewards.choice import ChoiceReward
from basis_rl.rewards.code.reward import CodeReward
from basis_rl.rewards.exact import ExactReward
from basis_rl.rewards.format import FormatReward
from basis_rl.rewards.function import FunctionReward
from basis_rl.rewards.gym import ReasoningGymReward
from basis_rl.rewards.judge import JudgeReward
from basis_rl.rewards.math.reward import MathVerifyReward
from basis_rl.rewards.overlong import OverlongReward
from basis_rl.rewards.source import arguments_version

POOL = "pool:"
_WHAT = "reward function"
_KEY = "reward_kwargs"
_MATH = "math_verify"
REWARDS: dict[str, type] = {
    "math_verify": MathVerifyReward,
    "choice": ChoiceReward,
    "exact": ExactReward,
    "reasoning_gym": ReasoningGymReward,
    "format": FormatReward,
    "overlong": OverlongReward,
    "code": CodeReward,
    "judge": JudgeReward,
}


def build_reward(name: str, params: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> Any:
    """The reward by its registered name, as ``module:name`` (your own, in TRL's form), or with ``pool:module:function``
    the `FunctionReward` of that function.

    Args:
        name: of the reward.
        params: of its class.
        known: what the run knows (``max_completion_length``, ``answer_in`` of math_verify); taken for parameters of
            registered rewards that have these names and are not given.

    Raises:
        ValueError: unknown name, unknown or missing parameter, or one that the reward refuses.
    """
    if name.startswith(POOL):
        return construct(_WHAT, FunctionReward, name, {"function": name.removeprefix(POOL), **params}, _KEY)
    found = find(_WHAT, REWARDS, name, ", or 'pool:module:name' for one that scores one rollout per call")
    if name in REWARDS:
        own = inspect.signature(found).parameters
        # `answer_in` of others has other values.
        taken = own.keys() - ({"answer_in"} if name != _MATH else set())
        params = {**{key: value for key, value in (known or {}).items() if key in taken}, **params}
    if found is JudgeReward and params.get("behind") is not None:
        params = {**params, "behind": _behind(params["behind"], known)}
    if inspect.isroutine(found) and params:
        return _with_arguments(name, found, params)
    return construct(_WHAT, found, name, params, _KEY)


def _behind(given: Any, known: Mapping[str, Any] | None) -> Any:
    """The reward before a judge: an object as it is; else by its name, or by ``{name: parameters}``."""
    given = {given: {}} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        return given
    if len(given) != 1:
        raise ValueError("judge: behind must be one reward, such as math_verify or {math_verify: {answer_in: box}}.")
    ((name, params),) = given.items()
    return build_reward(name, params or {}, known)


def _with_arguments(name: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    """The reward function with some of its parameters bound."""
    signature = inspect.signature(function)
    known = signature.parameters
    for unknown in [key for key in arguments if key not in known or key in GIVEN]:
        raise ValueError(f"{_KEY}: '{name}' has no parameter '{unknown}'.{did_you_mean(unknown, known)}")
    bound = _Bound(function, **arguments)
    # Its name, and what it declares of itself, such as `reads` and `reward_range`.
    update_wrapper(bound, function)
    left = [each for name, each in signature.parameters.items() if name not in arguments]
    bound.__signature__ = signature.replace(parameters=left)
    if version := getattr(function, "version", None):
        bound.version = f"{version}, {arguments_version(arguments)}"
    return bound


class _Bound(partial[Any]):
    """A reward function with arguments of a recipe, which win over columns of the same names."""

    __name__: str
    __signature__: inspect.Signature
    version: str

    def __call__(self, /, *args: Any, **columns: Any) -> Any:
        return self.func(*args, **{**columns, **self.keywords})


def split_params(names: Sequence[str], params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The parameters of each reward, from those of a recipe (``reward_kwargs``).

    These are ``{name: {parameter: value}}``, where the last part of a dotted path will do as its name, or with a single
    reward just ``{parameter: value}``.

    Raises:
        ValueError: a reward is there twice, or parameters for none.
    """
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise ValueError(f"reward_funcs: '{twice[0]}' is there twice. Its weight is its entry of reward_weights.")
    known = {re.split("[.:]", name)[-1]: name for name in names} | {name: name for name in names}
    by_name = all(key in known and isinstance(value, Mapping) for key, value in params.items())
    if len(names) == 1 and not (params and by_name):
        return {names[0]: dict(params)}
    result: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in params.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise ValueError(
                f"reward_kwargs: '{key}' is none of the reward_funcs {', '.join(names)}.{hint} "
                "With several, parameters stand below the name: {overlong: {cache: 4096}}."
            )
        if not isinstance(value, Mapping):
            raise ValueError(f"reward_kwargs: the parameters of '{key}' must be a mapping, got {value!r}.")
        result[known[key]] = dict(value)
    return result
