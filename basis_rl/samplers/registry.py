"""Every prompt sampler by its name: the names of YAML recipes and of ``BasisTrainer(prompt_sampler=...)``."""

from __future__ import annotations

import inspect
from typing import Any

from basis_rl.names import did_you_mean, import_object
from basis_rl.samplers.base import PromptSampler
from basis_rl.samplers.dynamic import Dynamic
from basis_rl.samplers.thompson import Thompson
from basis_rl.samplers.uniform import Uniform
from basis_rl.samplers.weighted import DropSolved, Frontier, Spo, Variance

SAMPLERS: dict[str, type[PromptSampler]] = {
    "uniform": Uniform,
    "variance": Variance,
    "frontier": Frontier,
    "spo": Spo,
    "thompson": Thompson,
    "drop_solved": DropSolved,
    "dynamic": Dynamic,
}


def sampler_name(sampler: PromptSampler) -> str:
    """Its registered name, or that of its class."""
    return next((key for key, cls in SAMPLERS.items() if cls is type(sampler)), type(sampler).__name__)


def build_sampler(name: str, **params: Any) -> PromptSampler:
    """The registered sampler `name`, or your own class as ``module:Class``, built with `params`.

    Raises:
        ValueError: unknown name, unknown or missing parameter, or a parameter that the sampler refuses.
    """
    if ":" in name:
        cls = import_object(name, "prompt sampler")
        if not (isinstance(cls, type) and issubclass(cls, PromptSampler)):
            raise ValueError(f"'{name}' is not a subclass of basis_rl.samplers.PromptSampler.")
    elif name in SAMPLERS:
        cls = SAMPLERS[name]
    else:
        raise ValueError(
            f"Unknown prompt sampler '{name}'.{did_you_mean(name, SAMPLERS)} Known: {', '.join(SAMPLERS)}; your own is "
            "'module:Class'."
        )
    signature = inspect.signature(cls).parameters
    known = {key: each for key, each in signature.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.values())
    for key in params:
        if key not in known and not takes_any:
            raise ValueError(
                f"Prompt sampler '{name}' has no parameter '{key}'.{did_you_mean(key, known)} Its parameters: "
                f"{', '.join(known) or 'none'}."
            )
    for parameter in known.values():
        if parameter.default is parameter.empty and parameter.name not in params:
            raise ValueError(f"Prompt sampler '{name}' needs the parameter '{parameter.name}' (prompt_sampler_kwargs).")
    try:
        return cls(**params)
    except TypeError as error:
        raise ValueError(f"prompt_sampler_kwargs {params} do not fit '{name}': {error}.") from error
