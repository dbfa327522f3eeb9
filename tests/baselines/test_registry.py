"""Building baselines by name, and what a wrong name or parameter is answered with."""

import math

import pytest

from basis_rl.baselines import BASELINES, build_baseline
from basis_rl.types import RunContext
from basis_rl.values import ValueTable


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("rlo", {}, "Unknown baseline 'rlo'. Did you mean 'rloo'?"),
        ("grpo", {"epz": 1.0}, "no parameter 'epz'. Did you mean 'eps'?"),
        ("rloo", {"eps": 1.0}, "Its parameters: none"),
        ("basis", {}, "needs the parameter 'values'"),
        ("grpo", {"eps": 0.0}, "eps must be positive"),
        ("basis", {"values": "no/such/table"}, "no value table at 'no/such/table'"),
        ("basis", {"values": 3}, "basis: values must be ValueTable or text or Path, got 3"),
        ("reinforce_pp", {"reward_clip": 5}, "reward_clip must be a list of 2 numbers or null, got 5"),
        ("reinforce_pp", {"reward_clip": ["a", "b"]}, "reward_clip must be a list of 2 numbers or null"),
        ("pass_at_k", {"k": "2"}, "k must be a whole number, got '2'"),
        ("pass_at_k", {"k": 2.5}, "k must be a whole number, got 2.5"),
        ("pass_at_k", {"k": True}, "k must be a whole number, got True"),
        ("pass_at_k", {"threshold": None}, "threshold must be a number, got None"),
        ("pass_at_k", {"threshold": float("nan")}, "threshold must be a number, got nan"),
        ("dr_grpo", {"alpha": "false"}, "alpha must be true or false, got 'false'"),
        ("dr_grpo", {"alpha": 2.0}, "alpha must be true or false, got 2.0"),
        ("spo", {"forgetting": None}, "forgetting must be a number or kl, got None"),
        ("grpo", {"over": 3}, "over must be group or batch, got 3"),
        ("bv_blend", {"clusters": {"a": "b"}}, "clusters must be .* or a mapping, got"),
    ],
)
def test_bad_requests_are_named(name, params, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        build_baseline(name, **params)


def test_types_that_fit_are_taken():
    assert build_baseline("reinforce_pp", reward_clip=[-1, 2]).reward_clip == [-1, 2]
    assert build_baseline("ppo", critic_lam=None, lam=1).lam == 1
    assert build_baseline("bv_blend", clusters={"a": 1}, confidence=0.5).confidence == 0.5
    assert build_baseline("spo", forgetting="kl").forgetting == "kl"


TABLE = ValueTable.from_rewards({"a": [0.0, 1.0]}, provenance={"model": "this"})
NEEDED = {"basis": {"values": TABLE}, "a_star_po": {"values": TABLE}, "bv_blend": {"clusters": {"a": 0}}}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("a_star_po", {"beta1": 0.0}, "beta1 must be positive"),
        ("basis", {"weighting": "blue"}, "weighting must be one of unb, vop, rvg, none"),
        ("basis", {"calibration": "mse"}, "calibration must be one of common, likelihood, literal, none"),
        ("basis", {"smoothing": -1}, "smoothing >= 0"),
        ("basis", {"epsilon": 0.7}, "epsilon"),
        ("basis_history", {"epsilon": 0.5}, "epsilon"),
        ("basis_history", {"drift": -1}, "drift >= 0"),
        ("basis_history", {"drift": "fast"}, "'auto'"),
        ("basis_history", {"drift": math.nan}, "drift >= 0"),
        ("basis_history", {"smoothing": 0}, "smoothing > 0"),
        ("basis_history", {"lcb": -1.0}, "lcb"),
        ("basis_history", {"lcb": math.nan}, "lcb"),
        ("basis_history", {"prior": "words"}, "prior must be one of flat, text"),
        ("basis_history", {"belief": "normal"}, "belief must be one of beta, gaussian"),
        ("bv_blend", {"clusters": {}}, "clusters is empty"),
        ("bv_blend", {"decay": 0.0}, "0 < decay"),
        ("bv_blend", {"confidence": "sure"}, "confidence must be"),
        ("bv_blend", {"confidence": 1.5}, "confidence must be"),
        ("bv_blend", {"mapping": "log"}, "mapping must be one of"),
        ("bv_blend", {"variance": "log"}, "variance must be one of"),
        ("spo", {"forgetting": 0.0}, "forgetting must be a number in"),
        ("spo", {"forgetting": "abc"}, "forgetting must be a number in"),
        ("max_rl", {"eps": 0.0}, "eps must be positive"),
        ("pass_at_k", {"k": 0}, "k must be at least 1"),
        ("pass_at_k", {"form": "exact"}, "form must be one of analytic, leave_one_out"),
        ("reinforce_pp", {"reward_clip": (1.0, 0.0)}, "reward_clip must be"),
        ("reinforce_pp", {"over": "rollouts"}, "over must be one of samples, tokens"),
        ("grpo", {"over": "prompt"}, "over must be one of group, batch"),
        ("otb", {"tail": "first"}, "tail must be one of zero, last, return"),
        ("opo", {"form": "word"}, "form must be one of sequence, token"),
    ],
)
def test_parameters_out_of_range_are_named(name, params, message):
    with pytest.raises(ValueError, match=message):
        BASELINES[name](**{**NEEDED.get(name, {}), **params})


@pytest.mark.parametrize("name", ["basis", "basis_history", "spo"])
def test_a_run_that_the_table_was_not_built_for_is_refused(name):
    run = RunContext(prompts={"a": "x"}, provenance={"model": "other"})
    with pytest.raises(ValueError, match="built for another run"):
        build_baseline(name, values=TABLE).validate(run)
    build_baseline(name, values=TABLE, accept_mismatch=True).validate(run)
    if name != "basis":
        build_baseline(name).validate(run)
