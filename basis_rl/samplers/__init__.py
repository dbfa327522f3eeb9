"""Which prompts a generation batch is made of: samplers that read the value belief."""

from basis_rl.samplers.base import Draw, PromptSampler, ValueBelief, WeightedSampler
from basis_rl.samplers.dynamic import Dynamic
from basis_rl.samplers.registry import SAMPLERS, build_sampler
from basis_rl.samplers.thompson import Thompson
from basis_rl.samplers.uniform import Uniform
from basis_rl.samplers.weighted import DropSolved, Frontier, Spo, Variance

__all__ = [
    "SAMPLERS",
    "Draw",
    "DropSolved",
    "Dynamic",
    "Frontier",
    "PromptSampler",
    "Spo",
    "Thompson",
    "Uniform",
    "ValueBelief",
    "Variance",
    "WeightedSampler",
    "build_sampler",
]
