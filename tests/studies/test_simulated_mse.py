"""The simulations of a baseline's error, and what `basis_history` promises in them."""

import pytest
import torch

from studies.simulated_mse import DRIFTS, of_history, reference, run, simulate


def test_a_table_is_of_as_many_reference_rollouts_as_it_says():
    torch.manual_seed(0)
    p, ids, table = reference(3000, margin=0.01)
    assert ((p >= 0.01) & (p <= 0.99)).all()
    rate = table.tilt(ids, 0.0)(torch.tensor([torch.inf], dtype=torch.float64))[0][0]
    assert float(((rate - p) ** 2).mean()) == pytest.approx(float((p * (1 - p)).mean()) / 32, rel=0.1)


@pytest.mark.parametrize("group", [1, 4])
def test_a_simulated_run_has_every_prompt_once_before_any_comes_again(group):
    values = torch.arange(12).double() / 12
    steps = list(run(lambda step: values / (step + 1), prompts=12, steps=6, rollouts=4 * group, group=group))
    for epoch in (steps[:3], steps[3:]):
        seen = [int(i) for _, batch in epoch for i in batch.prompt_ids]
        assert sorted(seen) == sorted(list(range(12)) * group)
    for step, (truth, batch) in enumerate(steps):
        assert batch.step == step
        assert truth.tolist() == [float(values[int(i)]) / (step + 1) for i in batch.prompt_ids]
        by_group = dict(zip(batch.group_ids.tolist(), batch.prompt_ids, strict=True))
        assert [by_group[g] for g in batch.group_ids.tolist()] == batch.prompt_ids
        assert len(by_group) == 4


def test_prompts_drift_to_the_deviation_that_is_asked_for():
    direction, walked = torch.tensor([1.0, -2.0]), torch.tensor([5.0, 6.0])
    assert DRIFTS["sqrt"](direction, walked, 0.25).tolist() == [0.5, -1.0]
    assert DRIFTS["linear"](direction, walked, 0.25).tolist() == [0.25, -0.5]
    assert DRIFTS["walk"](direction, walked, 0.25) is walked


def compared(table):
    names = ("basis", "basis_history", "basis_history, drift 0.003")
    return {name: estimator for name, estimator in of_history(table).items() if name in names}


@pytest.mark.long
@pytest.mark.parametrize(
    ("d", "tilt", "of_group"), [(0.0, 0.0, None), (0.0, 2.5, None), (0.5, 2.5, 0.33), (1.5, 2.5, 0.65)]
)
def test_history_pays_late_in_a_run(d, tilt, of_group):
    result = simulate(DRIFTS["sqrt"], d, tilt=tilt, seed=0, estimators_of=compared)
    late = result["basis_history"]["last"]
    assert late < result["basis"]["last"]
    if of_group:
        assert late <= of_group * result["group mean of 8"]["last"]
    else:  # no prompt drifts
        assert late <= 0.6 * result["basis"]["last"]
        assert late <= 0.75 * result["basis_history, drift 0.003"]["last"]
        assert result["basis_history"]["first"] <= result["basis"]["first"]
