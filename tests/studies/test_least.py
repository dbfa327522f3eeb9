"""What the study of the least variance measures: powers of known policies, projections, chosen rates."""

import pytest
import torch

from benchmarks.trainers import random_model
from studies.least import layers, variance


def rollouts_of(rewards, energies):
    mask = torch.ones((len(rewards), 1), dtype=torch.bool)
    return variance.Rollouts(mask.long(), mask, 0 * mask.long(), rewards, energies[:, None], energies[:, None], {})


@pytest.mark.parametrize("p", [0.2, 0.5, 0.75, 0.9])
def test_of_two_answers_the_best_baseline_is_one_minus_the_value(p):
    """A softmax of two logits: the squared score of an answer is twice the squared chance of the other one."""
    samples = 40
    chances = torch.full((8000,), p, dtype=torch.float64)
    right = torch.bernoulli(chances, generator=torch.Generator().manual_seed(0))
    score = torch.where(right == 1, 1 - p, -p)
    projections = (2**0.5 * score)[:, None, None]
    found = variance.baselines_of(rollouts_of(right, (2 * score**2).float()), samples)
    torch.testing.assert_close(found["curve"].mean(), torch.tensor(1 - p, dtype=torch.float64), atol=0.05, rtol=0)
    powers = {name: variance.power(right, b, projections) for name, b in found.items()}
    value = variance.of_value(right, projections, samples)
    exact = float((((right - p) * score) ** 2).mean() * 2)
    assert value == pytest.approx(exact, rel=0.05)
    assert powers["constant"] == pytest.approx(variance.power(right, 0 * right + 1 - p, projections), rel=0.06)
    assert powers["constant"] <= min(powers[name] for name in ("none", "batch mean", "belief", "none, 1 and 2")) * 1.06


def test_projections_are_the_gradients_of_each_token():
    model = random_model(13, 8, 1, 2, inner=1).eval()
    model.set_attn_implementation("eager")
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0]])
    mask = torch.tensor([[True, True], [True, False]])
    places = torch.tensor([[3, 4], [3, 4]])
    empty = torch.zeros(2, 2)
    rollouts = variance.Rollouts(ids, mask, places, torch.zeros(2), empty, empty.clone(), {})
    found = variance.project(model, rollouts, None, 2)
    generator = torch.Generator().manual_seed(0)
    for k in range(2):
        noise = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
        for row, token in mask.nonzero().tolist():
            model.zero_grad()
            place = int(places[row, token])
            logits = model(input_ids=ids[row : row + 1, :place]).logits[0, -1]
            logits.log_softmax(-1)[ids[row, place]].backward()
            expected = sum(float((p.grad * noise[name]).sum()) for name, p in model.named_parameters())
            assert float(found[row, token, k]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert (found[1, 1] == 0).all()


def test_energies_of_layers_and_of_all_weights_are_those_of_each_rollout_alone():
    model = random_model(13, 8, 3, 2, inner=8).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0]])
    mask = torch.tensor([[True, True], [True, False]])
    places = torch.tensor([[3, 4], [3, 4]])
    empty = torch.zeros(2, 2)
    rollouts = variance.Rollouts(ids, mask, places, torch.zeros(2), empty, empty.clone(), {})
    scales = {name: torch.full_like(p, 2.0) for name, p in model.named_parameters()}
    whole, found = layers.energies_of(model, rollouts, scales)
    assert found.shape == (2, 4)
    for row, length in enumerate((5, 4)):
        model.zero_grad()
        out = model(input_ids=ids[row : row + 1, :length], output_hidden_states=True)
        logits = out.logits[0, 2:-1].log_softmax(-1)
        score = logits.gather(1, ids[row, 3:length, None]).sum()
        states = out.hidden_states[:3]
        gradients = torch.autograd.grad(score, [*model.parameters(), *states])
        weights = len(list(model.parameters()))
        expected = 4 * sum(float(each.square().sum()) for each in gradients[:weights])
        assert float(whole[row]) == pytest.approx(expected, rel=1e-4)
        for layer, each in enumerate(gradients[weights:]):
            assert float(found[row, layer]) == pytest.approx(float(each[0, 2:-1].square().sum()), rel=1e-4)


def test_of_two_answers_their_energies_have_the_least_power():
    samples = 20
    right = torch.bernoulli(torch.full((4000,), 0.75), generator=torch.Generator().manual_seed(0))
    score = torch.where(right == 1, 0.25, -0.75).double()
    energies = 2 * score**2
    rows = list(layers.measured(rollouts_of(right, energies.float()), energies, energies[:, None], samples))
    power = {row["energy"]: row["power"] for row in rows}
    assert power["whole gradient"] == pytest.approx(power["layer 0"])
    # With b = V of all; with 1 - V each rollout has the same power.
    exact = (0.75 * 0.75**2 * 0.25**2 + 0.25 * 0.25**2 * 0.75**2) / (0.75 * 0.25**4 + 0.25 * 0.75**4)
    assert power["layer 0"] == pytest.approx([exact, exact], rel=0.1)
    assert power["none"] == pytest.approx([1.0, 1.0], rel=0.1)
