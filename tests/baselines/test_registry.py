"""Building baselines and samplers by name, and what a wrong name or parameter is answered with."""

import math
import re

import pytest

from basis_rl.baselines import build_baseline
from basis_rl.samplers import SAMPLERS, build_sampler
from basis_rl.types import RunContext
from basis_rl.values import ValueTable

TABLE = ValueTable.from_rewards({"a": [0.0, 1.0]}, provenance={"model": "this"})
NEEDED = {"basis": {"values": TABLE}, "a_star_po": {"values": TABLE}, "bv_blend": {"clusters": {"a": 0}}}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("rlo", {}, r"Unknown baseline 'rlo'. Did you mean 'rloo'\?"),
        ("grpo", {"epz": 1.0}, r"no parameter 'epz'. Did you mean 'eps'\?"),
        ("rloo", {"eps": 1.0}, "Its parameters: none"),
        ("sao", {"lam": 1.0}, "no parameter 'lam'"),
        ("basis", {}, "needs the parameter 'values'"),
        ("basis", {"values": "no/such/table"}, "no value table at 'no/such/table'"),
        ("basis", {"values": 3}, "values must be ValueTable or text or Path, got 3"),
        ("basis_history", {"values": TABLE, "prior": "text"}, "Leave out one of the two"),
        ("bv_blend", {"clusters": {}}, "clusters is empty"),
        ("sao", {"critic_model": None}, "critic_freeze_attention needs a value model"),
    ],
)
def test_bad_requests_are_named(name, params, message):
    with pytest.raises(ValueError, match=message):
        build_baseline(name, **params)


# Values that do not fit, by the parameter's name.
WRONG = {
    "a_star_po": {"beta1": [0.0]},
    "basis": {"weighting": ["blue"], "calibration": ["mse"], "smoothing": [-1], "epsilon": [0.0, 0.7]},
    "basis_history": {
        "epsilon": [0.5],
        "drift": [-1, "fast", math.nan],
        "shift_drift": [-0.1],
        "prior_variance": [0, 1e5],
        "smoothing": [0],
        "lcb": [-1.0, math.nan, math.inf],
        "prior": ["words"],
        "belief": ["normal"],
        "target": ["least"],
    },
    "batch_mean": {"target": ["least"]},
    "bv_blend": {
        "clusters": [{"a": "b"}],
        "decay": [0.0, 1.1],
        "temperature": [0.0],
        "prior_mass": [0],
        "prior_variance": [-1.0],
        "eps": [0.0],
        "confidence": ["sure", 1.5],
        "mapping": ["log"],
        "variance": ["log"],
    },
    "dr_grpo": {"alpha": ["false", 2.0]},
    "ebpo": {"eps": [0.0]},
    "grpo": {"over": [3]},
    "max_rl": {"eps": [0.0]},
    "opo": {"form": ["word"]},
    "otb": {"tail": ["first"], "max_rollout_weight": [0.0]},
    "pass_at_k": {"k": [0, "2", 2.5, True], "form": ["exact"], "threshold": [None, math.nan]},
    "poise": {"memory": [0], "penalty": [0.0, math.inf, math.nan]},
    "ppo": {
        "gamma": [1.5, 0.0],
        "lam": [-0.1],
        "critic_lam": [2.0],
        "lam_alpha": [0.0],
        "cliprange_value": [0.0],
        "critic_learning_rate": [-1.0],
        "critic_epochs": [0],
        "critic_warmup_steps": [-1],
    },
    "reinforce_pp": {"over": ["rollouts"], "eps": [0.0], "reward_clip": [(1.0, 0.0), ["a", "b"], [1.0], 5]},
    "sao": {"lam_alpha": [0.0, None], "gamma": [2.0]},
    "spo": {"forgetting": [0.0, "abc", None], "target": ["least"]},
    "variance": {"floor": [0], "bonus": [-1], "clip": [3]},
    "frontier": {"hard": [-1], "easy": [0.0]},
    "thompson": {"target": [1.5], "explore": [0]},
    "drop_solved": {"solved": [1.0], "floor": [2.0]},
    "dynamic": {"max_refills": [0, 2.5]},
}


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [(name, key, value) for name, wrong in WRONG.items() for key, values in wrong.items() for value in values],
)
def test_a_parameter_that_does_not_fit_is_named(name, parameter, value):
    build = build_sampler if name in SAMPLERS and name != "spo" else build_baseline
    with pytest.raises(ValueError, match=rf"^\w+: {parameter} must be .*, got {re.escape(repr(value))}"):
        build(name, **{**NEEDED.get(name, {}), parameter: value})


@pytest.mark.parametrize("name", ["basis", "basis_history", "spo"])
def test_a_run_that_the_table_was_not_built_for_is_refused(name):
    run = RunContext(prompts={"a": "x"}, provenance={"model": "other"})
    with pytest.raises(ValueError, match="built for another run"):
        build_baseline(name, values=TABLE).validate(run)
    build_baseline(name, values=TABLE, accept_mismatch=True).validate(run)
    if name != "basis":
        build_baseline(name).validate(run)
