"""What `check` says of groups without variance, beside the groups that prompts with known chances have."""

import re

import pytest
import torch

from basis_rl.estimate.waste import GROUPS, waste
from basis_rl.samplers import SAMPLERS, Frontier, Uniform


def rows(text):
    """The table's numbers by sampler."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"(\S+(?: \(this run\))?)\s+(0\.\d\d|1\.00)((?:\s+\d+%)+|.*not known)$", line)
        if match:
            found[match[1]] = [float(match[2]), *(float(n) / 100 for n in re.findall(r"(\d+)%", match[3]))]
    return found


@pytest.fixture(scope="module")
def drawn():
    torch.manual_seed(0)
    p = torch.cat([torch.full((400,), 0.02), torch.full((300,), 0.4), torch.full((300,), 0.97)])
    return p, torch.bernoulli(p[:, None].expand(-1, 4)).tolist()


def test_uniform_prompts_have_as_many_such_groups_as_their_chances_say(drawn):
    p, rewards = drawn
    found = rows(waste(rewards, 0.1, Uniform()))
    mean, *shares = found["uniform"]
    assert mean == pytest.approx(float(p.mean()), abs=0.03)
    for size, share in zip(GROUPS, shares, strict=False):
        assert share == pytest.approx(float((p**size + (1 - p) ** size).mean()), abs=0.05)
    assert shares[len(GROUPS)] == 1.0


def test_each_sampler_has_a_row_and_those_that_choose_waste_less(drawn):
    _, rewards = drawn
    found = rows(waste(rewards, 0.1, Frontier(hard=2, easy=1)))
    assert set(rows(waste(rewards, 0.1, Uniform()))) == {*SAMPLERS} - {"dynamic"}
    assert set(found) == {*SAMPLERS, "frontier (this run)"} - {"dynamic"}
    for name in ("variance", "frontier", "frontier (this run)"):
        assert found[name][4] < found["uniform"][4] - 0.05
        assert found[name][-1] < 1.0


def test_rewards_that_are_missing_are_left_out_and_others_than_0_and_1_are_refused(drawn):
    _, rewards = drawn
    holes = [[*row, float("nan")] for row in rewards] + [[float("nan")] * 4]
    assert waste(holes, 0.1, Uniform()) == waste(rewards, 0.1, Uniform())
    assert "only estimated" in waste([[0.5, 1.0]] * 20, 0.1, Uniform())
    assert "too few" in waste(rewards[:10], 0.1, Uniform())
    assert "too few" in waste([row[:1] for row in rewards], 0.1, Uniform())
