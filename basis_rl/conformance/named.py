"""The conformance checks of what stands at ``module:name``, whatever it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from basis_rl.baselines import Baseline
from basis_rl.conformance.baselines import check_baseline
from basis_rl.conformance.objectives import check_objective
from basis_rl.conformance.samplers import check_sampler
from basis_rl.names import import_object, kind_of
from basis_rl.objectives import Objective, TrlObjective
from basis_rl.rewards import check_reward
from basis_rl.samplers import PromptSampler


def conform(name: str, arguments: Mapping[str, Any] | None = None) -> str:
    """Check what stands at ``module:name``: an objective, a reward or its class, a prompt sampler's class, a baseline,
    its class or what builds one.

    Args:
        name: where it stands.
        arguments: of its constructor.

    Raises:
        ValueError: an objective without declarations, or arguments for what takes none.
        BaselineError, ObjectiveError, RewardError, SamplerError: promises of the contract that it breaks.
    """
    found = import_object(name, "baseline, prompt sampler, objective or reward")
    check = _check_of(found)
    if arguments:
        if isinstance(found, Baseline) or (not isinstance(found, type) and check is not check_baseline):
            raise ValueError(f"{name} is no class, so it takes no arguments: {', '.join(arguments)}.")
        found = _with_arguments(found, arguments)
    return f"{name} keeps the contract: {', '.join(check(found))}."


def _with_arguments(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """A function of the same name that calls `make` with `arguments`."""

    def build() -> Any:
        return make(**arguments)

    build.__name__ = getattr(make, "__name__", type(make).__name__)
    return build


def _check_of(found: Any) -> Callable[[Any], list[str]]:
    """The conformance checks of its kind."""
    if isinstance(found, Baseline):
        return check_baseline
    if not callable(found):
        others = "a prompt sampler, an objective or a reward function"
        raise ValueError(f"A{kind_of(found)[1:]} is neither a baseline nor {others}: there is nothing to check.")
    if isinstance(found, type) and issubclass(found, PromptSampler):
        return check_sampler
    if _takes_completions(found):
        return check_reward
    if isinstance(found, (Objective, TrlObjective)) or (inspect.isfunction(found) and _reads_one(found)):
        return check_objective
    return check_baseline


def _takes_completions(found: Any) -> bool:
    call: Any = found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004
    try:
        return "completions" in inspect.signature(call).parameters
    except (TypeError, ValueError):
        return False


def _reads_one(function: Callable[..., Any]) -> bool:
    """Whether a function has one parameter without a default: an objective's form, though not yet declared."""
    return sum(each.default is each.empty for each in inspect.signature(function).parameters.values()) == 1
