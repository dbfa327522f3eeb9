"""What the squared norms of scores tell, and the policy that works before it answers."""

import itertools
import re
from random import Random

import pytest
import torch

from benchmarks.trainers import random_model
from studies import score_norms, worked_sums
from studies.small_policy import problems


def test_a_worked_sum_is_right_in_every_step():
    rows = problems(300)
    for row, seed in itertools.product(rows, range(3)):
        text = row["prompt"][0]["content"]
        *steps, box = worked_sums.worked(text, Random(seed)).split()
        start = int(re.search(r"(\d+) [+-]", text)[1])
        totals = [start, *(int(step.split("=")[1]) for step in steps)]
        changes = [int(step.split("=")[0]) for step in steps]
        assert [after - before for before, after in itertools.pairwise(totals)] == changes
        assert box == f"\\boxed{{{totals[-1]}}}"
        assert str(totals[-1]) == row["solution"]


@pytest.mark.parametrize("p", [0.2, 0.5, 0.6, 0.75, 0.95])
def test_of_two_answers_the_best_baseline_is_one_minus_the_value(p):
    rewards = (torch.arange(4000) < 4000 * p).float()[None]
    norms = torch.where(rewards == 1, 2 * (1 - p) ** 2, 2 * p**2)  # of the gradient of a softmax in its two logits
    found = score_norms.powers(rewards, norms, norms)
    assert found["best constant"] == pytest.approx(1 - p)
    assert found["power"]["value and rho"] == pytest.approx(found["power"]["best constant"], abs=1e-3)
    assert (found["power"]["value"] > 1) == (p > 2 / 3)
    assert found["power"]["best constant"] == min(found["power"].values(), key=lambda x: round(x, 4))


def test_rho_within_prompts_does_not_tell_hard_from_easy():
    rewards = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    norms = torch.tensor([[1.0, 2, 3, 2], [9, 8, 9, 10], [50, 50, 50, 50], [0.1, 0.1, 0.1, 0.1]])
    assert score_norms.powers(rewards, norms, norms)["rho"] > 10
    found = score_norms.within_prompts(rewards, norms)
    assert found == {"rho within a prompt": pytest.approx(1.0), "mixed prompts": 2}
    norms[1, 1:] *= 4
    assert score_norms.within_prompts(rewards, norms)["rho within a prompt"] == pytest.approx(2.0)


def test_norm_and_energy_of_an_answer_are_those_of_its_tokens():
    model = random_model(13, 8, 1, 2, inner=1)
    prompt, answer = [1, 2, 3], [4, 5]
    norm, energy = score_norms.norm_and_energy(model, prompt, answer)
    total, expected = {}, 0.0
    for place, token in enumerate(answer):
        model.zero_grad()
        scores = model(input_ids=torch.tensor([prompt + answer[:place]])).logits[0, -1]
        p = scores.softmax(-1)
        expected += float(1 - 2 * p[token] + (p**2).sum())
        p[token].log().backward()
        for name, parameter in model.named_parameters():
            total[name] = total.get(name, 0) + parameter.grad
    assert norm == pytest.approx(sum(float((g**2).sum()) for g in total.values()), rel=1e-4)
    assert energy == pytest.approx(expected, rel=1e-5)
