"""The yardstick: its projections, its batches, and scores that are known."""

import numpy as np
import pytest
import torch

from examples.quickstart.warm_start import save
from examples.smollm2 import problems as arithmetic
from studies import yardstick
from studies.least.variance import Rollouts
from studies.least.variance import loaded as load
from tests.support import tooled
from tests.support.tiny import tiny_model


def answers(p, problems=64, rewards=340, logged=32, seed=0):
    """A softmax of two logits that draws the right answer with chance `p`: the score is 1 - p or -p."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.rand(problems, rewards, generator=generator) < p
    score = torch.where(right[:, :logged].flatten(), 1 - p, -p)[:, None]
    tokens = torch.zeros(len(score), 2, dtype=torch.int32)
    tokens[:, 1] = -1
    signals = {name: torch.ones(len(score), 2) for name in ("log_probs", "energies", "gradient_energies")}
    found = {"rewards": right, "tokens": tokens, "gradients": score * torch.eye(1, yardstick.SKETCH), **signals}
    texts = np.array([f"{i} + 1 = ?" for i in range(problems)])
    return {name: each.numpy() for name, each in found.items()} | {"texts": texts}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("yardstick") / "data.npz"
    np.savez(path, **answers(0.7))
    return yardstick.Data(path)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_each_rollout_comes_once_in_groups_of_its_problem_and_visits_alternate_between_halves(data, group):
    seen = list(data.batches(group, seed=3))
    assert sorted(torch.cat([rows for _, rows in seen]).tolist()) == list(range(64 * 32))
    for visit, rows in seen:
        assert len(rows) == yardstick.BATCH
        assert len(set((rows // 32).tolist())) == yardstick.BATCH // group
        assert ((rows % 32 >= 16) == visit % 2).all()
    visited = [(visit, number) for visit, rows in seen for number in set((rows // 32).tolist())]
    assert len(set(visited)) == len(visited) == 64 * 32 // group


@pytest.mark.parametrize("group", [1, 8])
def test_chosen_problems_come_by_the_samplers_chances_and_rollouts_in_turn(group):
    data = yardstick.Data(yardstick.FILE)
    drawn = torch.zeros(data.problems)
    for seed in range(50):
        uses = torch.zeros(data.problems * data.logged)
        for visit, rows in data.chosen_batches(group, seed):
            assert ((rows % data.logged >= data.logged // 2) == visit % 2).all()
            grouped = (rows // data.logged).view(-1, group)
            assert (grouped == grouped[:, :1]).all()
            drawn += grouped[:, 0].bincount(minlength=data.problems)
            uses += rows.bincount(minlength=len(uses))
        spread = uses.view(data.problems, 2, -1)
        assert (spread.amax(2) - spread.amin(2) <= 1).all()
    weights = (1 - data.values) ** 2 * data.values + 0.02
    expected = drawn.sum() * weights / weights.sum()
    # Chi-square with 63 degrees of freedom exceeds it once in 5,000 times.
    assert float(((drawn - expected) ** 2 / expected).sum()) < 110


def test_noise_and_error_of_two_answers_are_as_computed(data):
    p, gradient = 0.7, 0.7 * 0.3
    powers = {
        "true value": p * ((1 - p) * (1 - p)) ** 2 + (1 - p) * (p * p) ** 2,
        "none": p * (1 - p) ** 2,
    }
    for name, power in powers.items():
        row = yardstick.score(name, 1, 8, data)
        expected = (power - gradient**2) / yardstick.BATCH / gradient**2
        assert row["noise"] == pytest.approx(expected, rel=0.1)
        assert row["error 1"] == pytest.approx(
            0.0 if name == "true value" else float((data.values**2).mean()), abs=5e-3
        )


def test_an_offset_changes_the_noise_of_no_baseline_as_computed_and_of_no_other(tmp_path):
    p, gradient, offset = 0.7, 0.7 * 0.3, -0.5
    np.savez(tmp_path / "data.npz", **answers(p))
    data, moved = (yardstick.Data(tmp_path / "data.npz", each) for each in (0.0, offset))
    power = p * ((1 + offset) * (1 - p)) ** 2 + (1 - p) * (offset * p) ** 2
    noise = yardstick.score("none", 1, 8, moved)["noise"]
    assert noise == pytest.approx((power - gradient**2) / yardstick.BATCH / gradient**2, rel=0.1)
    for name in ("true value", "batch_mean", "basis_history", "spo"):
        assert yardstick.score(name, 1, 1, moved)["noise"] == pytest.approx(yardstick.score(name, 1, 1, data)["noise"])


def test_the_noise_at_a_success_rate_is_relative_to_the_true_values_of_its_own_data_set(tmp_path, monkeypatch):
    paths = []
    for p, scale in ((0.6, 1.0), (0.2, 3.0)):
        found = answers(p)
        paths.append(tmp_path / f"{p}.npz")
        np.savez(paths[-1], **{**found, "gradients": scale * found["gradients"]})
    monkeypatch.setattr(yardstick, "LINES", yardstick.LINES[:2])
    powers = {}
    for row in yardstick.by_rate(paths, 4):
        rate = 0.6 if row["to"] > 0.4 else 0.2
        powers.setdefault((row["baseline"], rate), []).extend([row["power"]] * row["problems"])
    for p in (0.6, 0.2):
        # With rewards of 0 and 1, right has score 1 - p and wrong -p.
        expected = (1 - p) / ((1 - p) ** 3 + p**3)
        found = [np.mean(powers[name, p]) for *_, name in yardstick.LINES]
        assert found[0] == pytest.approx(1.0, rel=1e-6)
        assert found[1] == pytest.approx(expected, rel=0.1)


def test_beliefs_learn_and_others_are_refused(data):
    row = yardstick.score('basis_history={"target": "value"}', 1, 2, data)
    # All problems are alike, so that the mean of the batch, which is all that is known at first, is a good guess.
    assert row["error 1"] < row["error 32"] < row["error 10"] < row["error 3"]
    assert [each["group"] for each in yardstick.scores(["rloo"], [1, 2], 1, data)] == [1, 2, 2]
    with pytest.raises(SystemExit, match="values"):
        yardstick.estimator("ppo", data)
    with pytest.raises(SystemExit, match="each token"):
        yardstick.score("otb", 2, 1, data)


def test_the_data_set_is_scored_in_the_order_of_its_problems():
    data = yardstick.Data(yardstick.FILE)
    # What hardly ever succeeds are products of large numbers, and nothing else is as hard.
    kinds = [row["kind"] for row in arithmetic.rows(1800)[400 : 400 + data.problems]]
    by_kind = {kind: [float(v) for v, own in zip(data.values, kinds, strict=True) if own == kind] for kind in kinds}
    assert max(by_kind["out of reach"]) < 0.05
    assert np.mean(by_kind["easy"]) > np.mean(by_kind["learnable"]) > np.mean(by_kind["out of reach"])


@pytest.mark.parametrize("task", ["smollm2", "sums"])
def test_a_data_set_is_made_and_its_projections_are_sums_of_gradients_with_signs(task, tmp_path):
    tok = tooled.tokenizer()
    save(tiny_model(tok), tok, tmp_path / "model")
    path = tmp_path / "data.npz"
    words = ["--quick", "--data", str(path), "--results", str(tmp_path)]
    rows = yardstick.main(
        ["none", "--make", str(tmp_path / "model"), "--rewards", "18", "--logged", "8", "--task", task, *words]
    )
    assert [row["estimator"] for row in rows] == ["true value", "none"]
    assert len({*yardstick.Data(path).texts}) > 60
    assert np.load(path)["gradients"].shape == (64 * 8, yardstick.SKETCH)
    model, _ = load(tmp_path / "model")
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0]])
    mask, places = torch.tensor([[True, True], [True, False]]), torch.tensor([[3, 4], [3, 4]])
    nothing = torch.zeros(2, 2)
    rollouts = Rollouts(ids, mask, places, torch.zeros(2), nothing, nothing.clone(), {})
    ones = {name: torch.ones(weight.shape) for name, weight in model.named_parameters()}
    found = yardstick.sketched(model, rollouts, ones)
    for row in range(2):
        model.zero_grad()
        length = 3 + int(mask[row].sum())
        scores = model(input_ids=ids[row : row + 1, :length]).logits[0].log_softmax(-1)
        sum(scores[place - 1, ids[row, place]] for place in range(3, length)).backward()
        expected = [0.0] * yardstick.SKETCH
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            signs = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8) * 2 - 1
            for place, each in enumerate((weight.grad * signs).flatten().tolist()):
                expected[place % yardstick.SKETCH] += each
        torch.testing.assert_close(found[row], torch.tensor(expected), rtol=1e-3, atol=1e-4)
