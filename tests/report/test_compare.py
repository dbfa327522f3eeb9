"""Comparison at one number of rollouts, against sums over single rollouts; groups, budgets, differences, messages."""

import json
import math
import random
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pandas as pd
import pytest

from basis_rl.report.compare import (
    _T,
    _t,
    compare_runs,
    curve,
    difference,
    evaluations,
    final_reward,
    measured_at,
    points,
    window_mean,
)
from basis_rl.report.runs import Group, Run, find_runs, group_runs, read_run
from basis_rl.report.tables import _Column, _differences, cost_table, final_table, table_price
from basis_rl.report.verdict import verdict
from tests.report.folders import write_rows, write_run


def run_of(rows, name="r", info=None):
    return Run(Path(name), pd.DataFrame(rows), {}, info or {})


def one_by_one(x, y):
    """The value that stands for each rollout, rollout after rollout."""
    values, before = [], 0
    for place, value in zip(x, y, strict=True):
        values += [value] * round(place - before)
        before = place
    return values


def test_window_means_are_means_over_single_rollouts():
    rng = random.Random(0)
    x = np.cumsum([rng.randint(1, 40) for _ in range(30)]).astype(float)
    y = np.array([rng.random() for _ in x])
    singles = one_by_one(x, y)
    for _ in range(200):
        low, high = sorted(rng.sample(range(int(x[-1]) + 1), 2))
        assert window_mean(x, y, low, high) == pytest.approx(fmean(singles[low:high]))
    assert math.isnan(window_mean(x, y, x[-1], x[-1] + 5))


def test_curves_are_cut_at_the_same_rollouts_wherever_they_were_logged(tmp_path):
    write_run(tmp_path / "a", baseline="rloo", per_step=64, steps=30)
    write_run(tmp_path / "b", baseline="grpo", per_step=50, steps=41)
    found = compare_runs([tmp_path / "a", tmp_path / "b"])
    assert found.budget == 1920
    for group in found.groups:
        (run,) = group.runs
        singles = one_by_one(*run.series("reward"))
        drawn = curve(group, "reward", 1920)
        bins = len(drawn.mean)
        assert bins <= len(run.series("reward")[0])
        assert fmean(drawn.mean) == pytest.approx(fmean(singles[:1920]))
        width = 1920 / bins
        np.testing.assert_allclose(drawn.x, (np.arange(bins) + 0.5) * width)
        per_step = run.log["num_rollouts"].iloc[0]
        np.testing.assert_allclose(run.spent("seconds", drawn.x), drawn.x / per_step * 2.0)
        assert final_reward(run, 1920) == pytest.approx(fmean(singles[1728:1920]))
        assert run.spent("seconds", 1920) == pytest.approx(1920 / per_step * 2.0)


def test_evaluations_are_found_by_any_name_and_avg_goes_before_reward():
    keys = ("eval_my-bench_reward", "eval_aime24_reward", "eval_aime24_avg@4", "eval_aime24_reward_std", "reward")
    group = Group("g", [run_of([dict.fromkeys(keys, 0.5)])], {})
    assert evaluations(group.runs[0].log) == [
        "eval_aime24_avg@4",
        "eval_my-bench_reward",
    ]


def test_the_budget_is_what_every_run_has(tmp_path):
    write_run(tmp_path / "long", steps=30)
    write_run(tmp_path / "short", baseline="grpo", steps=10, finished=False)
    found = compare_runs([tmp_path / "long", tmp_path / "short"])
    assert found.budget == 640
    assert any("rollouts of 'short', which has not finished" in note for note in found.notes)


def test_evaluations_are_interpolated_and_keep_their_places(tmp_path):
    for seed in (0, 1):
        rows = write_run(tmp_path / f"s{seed}", seed=seed)
        for row in rows[4::5]:
            row["eval_reward"] = row["step"] / 100 + seed
        write_rows(tmp_path / f"s{seed}", rows)
    found = compare_runs([tmp_path])
    (group,) = found.groups
    for place, value in ((14, 0.14), (10, 0.10), (4, math.nan), (20, 0.20), (21, math.nan)):
        assert measured_at(group.runs[0], "eval_reward", place * 64) == pytest.approx(value, nan_ok=True)
    assert math.isnan(measured_at(group.runs[0], "eval_avg@1", 640))
    drawn = points(group, "eval_reward", 14 * 64)
    np.testing.assert_allclose(drawn.x, [5 * 64, 10 * 64])
    np.testing.assert_allclose(drawn.mean, [0.55, 0.60])
    short = run_of(group.runs[1].log[:6])
    drawn = points(Group("g", [group.runs[0], short], {}), "eval_reward", 14 * 64)
    np.testing.assert_allclose(drawn.mean, [0.55, 0.10], err_msg="a run says nothing of where it has not measured")


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"rloo-{seed}", seed=seed)
        write_run(tmp_path / f"unb-{seed}", seed=seed, baseline="basis", recipe={"baseline_kwargs": {"values": "v"}})
        kwargs = {"values": "v", "weighting": "vop"}
        write_run(tmp_path / f"vop-{seed}", seed=seed, baseline="basis", recipe={"baseline_kwargs": kwargs})
    write_run(tmp_path / "fast", recipe={"learning_rate": 1e-5, "save_steps": 7, "hub_model_id": "x/y"})
    groups = group_runs([read_run(path) for path in find_runs([tmp_path])])
    sizes = {"rloo lr=1e-05": 1, "rloo lr=1e-06": 2, "basis": 2, "basis weighting=vop": 2}
    assert {group.label: len(group.runs) for group in groups} == sizes
    assert len(find_runs([tmp_path, tmp_path / "fast"])) == 7, "a folder that is named twice is one run"


def test_without_recipes_runs_have_the_names_of_their_folders(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name)
        (tmp_path / name / "recipe.yaml").unlink()
        (tmp_path / name / "run.json").unlink()
    found = compare_runs([tmp_path], reference="two")
    assert [group.label for group in found.groups] == ["one", "two"]
    assert found.reference.label == "two"
    with pytest.raises(ValueError, match=r"There is no 'three' to compare with\. Choose one of: one, two"):
        compare_runs([tmp_path], reference="three")


def test_runs_from_python_are_told_apart_by_their_records(tmp_path):
    """They have no recipe.yaml."""
    for name, weighting, beta in (("unb", "unb", 0.0), ("vop", "vop", 0.0), ("kl", "vop", 0.1)):
        for seed in (0, 1):
            folder = tmp_path / f"{name}{seed}"
            write_run(folder)
            (folder / "recipe.yaml").unlink()
            record = {
                **{"seed": seed, "baseline": "basis", "compared": {"num_generations": 1}, "reward": "exact"},
                **{"baseline_parameters": {"weighting": weighting}, "sampler": "uniform", "sampler_parameters": {}},
                "recipe": f"beta: {beta}\nseed: {seed}\noutput_dir: {folder}\n",
            }
            (folder / "run.json").write_text(json.dumps(record))
    sizes = {"basis weighting=unb": 2, "basis weighting=vop beta=0": 2, "basis weighting=vop beta=0.1": 2}
    found = compare_runs([tmp_path])
    assert {group.label: len(group.runs) for group in found.groups} == sizes
    record = {"seed": 0, "baseline": "basis", "sampler": "frontier", "recipe": None}
    (tmp_path / "kl0" / "run.json").write_text(json.dumps(record))
    assert verdict(compare_runs([tmp_path]))[0].startswith("No verdict: prompt_sampler")


def test_rows_of_one_step_are_one_and_what_is_cut_off_is_none(tmp_path):
    rows = write_run(tmp_path / "a", steps=10)
    (tmp_path / "a" / "run.json").unlink()
    # The run ended here, and was continued.
    evaluation = {"step": 5, "eval_reward": 0.3, "num_rollouts": 5 * 64, "train_runtime": 9.0}
    write_rows(tmp_path / "a", [*rows[:5], evaluation, *rows[5:]])
    path = tmp_path / "a" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 11, "rewa')
    log = read_run(tmp_path / "a").log
    assert log["step"].tolist() == list(range(1, 11))
    assert log["reward"].tolist() == [row["reward"] for row in rows]
    assert log["eval_reward"].dropna().tolist() == [0.3]
    assert not read_run(tmp_path / "a").finished
    write_rows(tmp_path / "a", [*rows, {**evaluation, "step": 10}])
    assert read_run(tmp_path / "a").finished


def test_two_updates_on_one_batch_are_averaged():
    both = run_of([{"step": i, "num_rollouts": 8, "loss": loss} for i, loss in ((1, 1.0), (2, 4.0))])
    assert [values.tolist() for values in both.series("loss")] == [[8.0], [2.5]]


def table_of(left, right, spread):
    """The final table of two settings whose reward lies at these levels, over two seeds each."""

    def column(run):
        return left if run.path.name[0] == "a" else right + spread * run.seed

    runs = {name: [run_of([], f"{name}{s}", {"seed": s, "baseline": name}) for s in (0, 1)] for name in "ab"}
    groups = {name: Group(name, each, {}) for name, each in runs.items()}
    columns = [_Column("x", column, "{:.3f}".format), _Column("y", column, "{:.3f}".format, compared=False)]
    return _differences(groups["b"], groups["a"], columns, 2)


def test_differences_have_their_sign_and_are_bold_only_where_the_interval_leaves_out_zero():
    row = table_of(0.5, 0.4, 0.0002)
    half = 12.706 * 0.0001
    assert row.cells == ["Δ vs a", f"−0.100 [−{0.0999 + half:.3f}, −{0.0999 - half:.3f}]", "", "", ""]
    assert (row.strong, row.group) == ({1}, None)
    assert table_of(0.4, 0.5, 0.0002).cells[1] == f"+0.100 [+{0.1001 - half:.3f}, +{0.1001 + half:.3f}]"
    assert table_of(0.4, 0.5, 0.0002).strong == {1}
    row = table_of(0.5, 0.49, 0.01)
    half = 12.706 * 0.005
    assert row.cells[1] == f"−0.005 [−{0.005 + half:.3f}, +{half - 0.005:.3f}]"
    assert row.strong == set()


def test_differences_over_the_same_seeds_are_paired_and_others_are_not(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    for seed in range(4):
        write_run(tmp_path / f"a{seed}", seed=seed, level=0.5 + 0.1 * seed)
        write_run(tmp_path / f"b{seed}", seed=seed, baseline="grpo", level=0.4 + 0.1 * seed)
        write_run(tmp_path / f"c{seed}", seed=seed + 2, baseline="opo", level=0.4 + 0.1 * seed)
    groups = {group.label: group for group in compare_runs([tmp_path]).groups}
    a, b, c = ([final_reward(run, 1000) for run in groups[name].runs] for name in ("rloo", "grpo", "opo"))
    paired = difference(groups["rloo"], a, groups["grpo"], b)
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (paired.mean - paired.spread, paired.mean + paired.spread) == pytest.approx(tuple(interval), rel=1e-3)
    welch = difference(groups["rloo"], a, groups["opo"], c)
    se = math.sqrt(stdev(a) ** 2 / 4 + stdev(c) ** 2 / 4)
    freedom = int(stats.ttest_ind(a, c, equal_var=False).df)
    assert welch.mean == pytest.approx(fmean(a) - fmean(c))
    assert welch.spread == pytest.approx(stats.t.ppf(0.975, freedom) * se, rel=1e-3)
    assert welch.spread > 3 * paired.spread, "here seeds explain most of the variance"
    assert difference(groups["rloo"], [0.5, *[math.nan] * 3], groups["grpo"], b).spread is None
    assert [round(float(stats.t.ppf(0.975, n)), 3) for n in range(1, len(_T) + 1)] == list(_T)
    assert [_t(freedom) for freedom in (0, 1, 2, 30, 1000)] == [12.706, 12.706, 4.303, 2.042, 2.042]


def test_the_price_of_a_table_is_charged(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed, baseline="basis", table="t")
    write_run(tmp_path / "b", baseline="basis_history", table="t")
    write_run(tmp_path / "c", baseline="batch_mean", level=0.6)
    found = compare_runs([tmp_path])
    prices = {group.label: table_price(group) for group in found.groups}
    assert prices == {"basis": 1000, "basis_history": 1000, "batch_mean": 0}
    cells = {row.cells[0]: row.cells for row in cost_table(found).rows}
    alone, with_table = (float(cell.replace(",", "")) for cell in cells["basis"][1:3])
    assert with_table - alone == pytest.approx(1000)
    assert cells["batch_mean"][1] == cells["batch_mean"][2]


def test_evaluations_are_columns_with_their_mean(tmp_path):
    for name, value in (("rloo", 0.25), ("grpo", 0.5)):
        write_run(tmp_path / name, baseline=name, **{
            "eval_aime24_avg@4": value, "eval_amc23_avg@4": value + 0.1, "eval_aime24_pass@4": 0.9
        })  # fmt: skip
    table = final_table(compare_runs([tmp_path], reference="rloo"))
    rows = {row.cells[0]: dict(zip(table.columns, row.cells, strict=True)) for row in table.rows}
    assert rows["grpo"]["eval aime24 avg@4"] == "0.500"
    assert rows["grpo"]["avg"] == "0.550"
    assert rows["Δ vs rloo"]["avg"] == "+0.250"


def test_messages(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"'.*empty' is not a run and contains none: .* metrics.jsonl"):
        compare_runs([tmp_path / "empty"])
    rows = write_run(tmp_path / "old")
    write_rows(tmp_path / "old", [{k: v for k, v in row.items() if k != "num_rollouts"} for row in rows])
    with pytest.raises(ValueError, match="has logged no `reward` and `num_rollouts` yet"):
        compare_runs([tmp_path / "old"])
    write_run(tmp_path / "good", baseline="grpo")
    write_run(tmp_path / "begun", baseline="opo", steps=0)
    found = compare_runs([tmp_path / name for name in ("good", "old", "begun")])
    assert [group.label for group in found.groups] == ["grpo"]
    assert any("'" + str(tmp_path / "begun") + "' has logged no `reward`" in note for note in found.notes)
