"""Which prompts a generation batch is made of: samplers that read the value belief."""

from __future__ import annotations

from typing import Any

from basis_rl.registry import build, name_of
from basis_rl.samplers.base import Draw, PromptSampler, ValueBelief
from basis_rl.samplers.draws import (
    DRAWING,
    DropSolved,
    Dynamic,
    Frontier,
    SpoWeights,
    Thompson,
    Uniform,
    Variance,
    WeightedSampler,
)

__all__ = [
    "SAMPLERS",
    "Draw",
    "DropSolved",
    "Dynamic",
    "Frontier",
    "PromptSampler",
    "SpoWeights",
    "Thompson",
    "Uniform",
    "ValueBelief",
    "Variance",
    "WeightedSampler",
    "build_sampler",
]

SAMPLERS: dict[str, type[PromptSampler]] = {**DRAWING, "dynamic": Dynamic}


def sampler_name(sampler: PromptSampler) -> str:
    """Its registered name, or that of its class."""
    return name_of(SAMPLERS, sampler)


def build_sampler(name: str, **params: Any) -> PromptSampler:
    """The registered sampler `name`, or your own class as ``module:Class``, built with `params`.

    Raises:
        ValueError: unknown name, unknown or missing parameter, or a parameter that the sampler refuses.
    """
    return build("prompt_sampler", SAMPLERS, PromptSampler, name, params)
