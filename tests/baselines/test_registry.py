"""Building baselines by name, and what a wrong name or parameter is answered with."""

import pytest

from basis_rl.baselines import BASELINES, build_baseline
from basis_rl.values import ValueTable


def test_names_are_the_documented_ones():
    assert {"none", "batch_mean", "grpo", "dr_grpo", "rloo", "basis"} <= set(BASELINES)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("rlo", {}, "Unknown baseline 'rlo'. Did you mean 'rloo'?"),
        ("grpo", {"epz": 1.0}, "no parameter 'epz'. Did you mean 'eps'?"),
        ("rloo", {"eps": 1.0}, "Its parameters: none"),
        ("basis", {}, "needs the parameter 'values'"),
        ("grpo", {"eps": 0.0}, "eps must be positive"),
        ("basis", {"values": "no/such/table"}, "no value table at 'no/such/table'"),
    ],
)
def test_bad_requests_are_named(name, params, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        build_baseline(name, **params)


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
