"""Every baseline by its name: the names of YAML recipes and of ``BasisTrainer(baseline=...)``."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from basis_rl.baselines.base import Baseline
from basis_rl.baselines.basis import Basis
from basis_rl.baselines.batch import BatchMean, NoBaseline, WReinforce
from basis_rl.baselines.bv_blend import BVBlend
from basis_rl.baselines.gdpo import Gdpo
from basis_rl.baselines.group import DrGrpo, Grpo, MaxRl, Quantile, Rloo
from basis_rl.baselines.history import BasisHistory
from basis_rl.baselines.least_variance import LeastVariance
from basis_rl.baselines.pass_at_k import PassAtK
from basis_rl.baselines.ppo import Ppo
from basis_rl.baselines.reinforce import ReinforcePP, ReinforcePPBaseline
from basis_rl.baselines.remax import ReMax
from basis_rl.baselines.shrinkage import Ebpo, JamesStein
from basis_rl.baselines.spo import Spo
from basis_rl.baselines.token import IsolatedEnergy, Opo, OptimalGlobalBaseline, OptimalTokenBaseline
from basis_rl.names import did_you_mean

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
    "spo": Spo,
    "james_stein": JamesStein,
    "ebpo": Ebpo,
    "quantile": Quantile,
    "max_rl": MaxRl,
    "pass_at_k": PassAtK,
    "w_reinforce": WReinforce,
    "gdpo": Gdpo,
    "least_variance": LeastVariance,
}


def build_baseline(name: str, **params: Any) -> Baseline:
    """The registered baseline `name`, built with `params`.

    Raises:
        ValueError: unknown name, unknown or missing parameter, or a parameter that the baseline refuses.
    """
    if name not in BASELINES:
        raise ValueError(f"Unknown baseline '{name}'.{did_you_mean(name, BASELINES)} Known: {', '.join(BASELINES)}.")
    signature = inspect.signature(BASELINES[name])
    for key in params:
        if key not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            hint = did_you_mean(key, signature.parameters)
            raise ValueError(f"Baseline '{name}' has no parameter '{key}'.{hint} Its parameters: {known}.")
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.name not in params:
            raise ValueError(f"Baseline '{name}' needs the parameter '{parameter.name}' (recipe: `baseline_kwargs`).")
    annotations = get_type_hints(BASELINES[name].__init__)
    for key, value in params.items():
        if not _is_a(value, annotations[key]):
            raise ValueError(f"{name}: {key} must be {_in_words(annotations[key])}, got {value!r}.")
    return BASELINES[name](**params)


def _is_a(value: Any, annotation: Any) -> bool:
    """Whether `value` has that type. Ranges, and which word of a `Literal` it is, are the class's to check."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str)
    if origin is tuple:  # a list, in YAML
        fits = isinstance(value, (list, tuple)) and len(value) == len(arguments)
        return fits and all(map(_is_a, value, arguments))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is_a(each, arguments[1]) for each in value.values())
    if annotation in (float, int):
        number = isinstance(value, Real if annotation is float else Integral) and not isinstance(value, bool)
        return number and value == value  # not NaN
    return isinstance(value, annotation)


def _in_words(annotation: Any) -> str:
    """A type as a message says it."""
    words = {float: "a number", int: "a whole number", bool: "true or false", type(None): "null", str: "text"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(arguments)
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    if origin is Mapping:
        return "a mapping"
    if arguments:
        return " or ".join(map(_in_words, arguments))
    return words.get(annotation, annotation.__name__)
