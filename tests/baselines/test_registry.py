"""Building baselines by name, and what a wrong name or parameter is answered with."""

import pytest

from basis_rl.baselines import build_baseline
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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"weighting": "blue"}, "weighting must be one of unb, vop, rvg, none"),
        ({"calibration": "mse"}, "calibration must be one of common, likelihood, literal, none"),
        ({"smoothing": -1}, "smoothing >= 0"),
        ({"epsilon": 0.7}, "epsilon"),
    ],
)
def test_basis_refuses_parameters_out_of_range(params, message):
    table = ValueTable.from_rewards({"a": [0.0, 1.0]})
    with pytest.raises(ValueError, match=message):
        build_baseline("basis", values=table, **params)
