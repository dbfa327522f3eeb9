"""Public checkers: does an object of your own keep the contract of a baseline, a sampler or an objective?"""

from basis_rl.conformance.baselines import BaselineError, check_baseline
from basis_rl.conformance.objectives import ObjectiveError, check_objective
from basis_rl.conformance.samplers import SamplerError, check_sampler

__all__ = ["BaselineError", "ObjectiveError", "SamplerError", "check_baseline", "check_objective", "check_sampler"]
