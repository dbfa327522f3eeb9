"""Micro-batches by tokens: every step has the rollouts and the gradient that it has with fixed rows."""

import pytest
import torch
import yaml

from tests.support.ranks import ROOT, Launched
from tests.trainer.budgeted import BUDGETS, CASES, main

FEW = ["grpo, groups", "luspo, single", "dapo, groups", "gpg, groups", "KL of ours", "out of step", "a target"]
REST = [name for name in CASES if name not in FEW and name != "sharded"]


def launched(folder, model, names, kind="ddp"):
    """What both ranks of a launch have found."""
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{kind}.yaml").read_text())
    settings |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": kind == "ddp"}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    Launched(folder / "log", "tests.trainer.budgeted", folder, model, *names, config=config).wait()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def by_ranks(tmp_path_factory, model, names):
    """By the number of ranks what each of them has found."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    return {1: [main(one, 1, str(model), names)], 2: launched(two, model, names)}


@pytest.fixture(scope="module")
def few(tmp_path_factory, tiny_path):
    return by_ranks(tmp_path_factory, tiny_path, FEW)


@pytest.fixture(scope="module")
def rest(tmp_path_factory, tiny_path):
    return by_ranks(tmp_path_factory, tiny_path, REST)


def assert_same_gradients(found, expected, tolerance=1e-6):
    assert len(found["gradients"]) == len(expected["gradients"]) >= 3
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        assert theirs.norm() > 1e-4
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", [*FEW, *(pytest.param(name, marks=pytest.mark.long) for name in REST)])
def test_the_gradient_is_that_of_fixed_rows(case, budget, ranks, request):
    for found in request.getfixturevalue("few" if case in FEW else "rest")[ranks]:
        assert_same_gradients(found[case, budget], found[case, None])
        assert found[case, budget]["trained"] == found[case, None]["trained"]
        for ours, theirs in zip(found[case, budget]["logs"], found[case, None]["logs"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
