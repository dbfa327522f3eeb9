"""The search for a row's best learning rate, and what is read from its runs."""

import json

import pytest

from studies.clock import control, run, study


def searched(ends: dict[float, float]) -> tuple[float, list[float]]:
    """The rate that is found if a row's runs at each rate end so, and the rates in the order of their first run."""
    asked: dict[float, None] = {}

    class Given:
        def get(self, row, seed, rate):
            asked[rate] = None
            return {"accuracy": [0.0, ends[rate], ends[rate], ends[rate]]}

    return control.tuned(Given(), "grpo"), list(asked)


def test_the_search_goes_on_towards_the_better_rate_until_the_end_falls():
    assert searched({5e-6: 0.5, 1e-5: 0.4, 2.5e-6: 0.3}) == (5e-6, [5e-6, 1e-5, 2.5e-6])
    assert searched({5e-6: 0.3, 1e-5: 0.4, 2e-5: 0.5, 4e-5: 0.45}) == (2e-5, [5e-6, 1e-5, 2e-5, 4e-5])


def test_a_level_is_reached_where_the_line_between_two_measurements_crosses_it():
    steps, accuracy = [0, 8, 16, 24], [0.1, 0.3, 0.5, 0.4]
    assert control.crossing(steps, accuracy, 0.4) == pytest.approx(12)
    assert control.crossing(steps, accuracy, 0.3) == pytest.approx(8)
    assert control.crossing(steps, accuracy, 0.6) is None


def test_the_end_alone_of_a_tuning_run_is_measured(tmp_path, monkeypatch):
    """And a counted run is measured from the start, once for all that begin with this model."""
    plans = []

    def made(plan, folder):
        plans.append(plan)
        steps = [s for s in range(0, 41, 8) if s == 0 or s >= plan["measured_from"]]
        accuracy = 0.5 - abs(plan["settings"]["learning_rate"] - 5e-6) * 1e3
        columns = {"step": steps, "accuracy": [accuracy] * len(steps)}
        return {**columns, "cpu": [float(s) for s in steps]}

    monkeypatch.setattr(study, "run", made)
    monkeypatch.setitem(control.COUNTED, "grpo", 1)
    asked = ["--rows", "grpo", "--output", str(tmp_path / "runs"), "--results", str(tmp_path)]
    first = tmp_path / "runs/other/points.json"
    first.parent.mkdir(parents=True)
    first.write_text(json.dumps([{"step": 0, "accuracy": {"all": 0.1}}, {"step": 8}]))
    control.main([*asked, "--at_most", "3"])
    assert len(plans) == 3
    runs = control.main(asked)
    assert [(plan["settings"]["seed"], plan["measured_from"]) for plan in plans[-1:]] == [(0, 0)]
    assert {plan["measured_from"] for plan in plans[:-1]} == {24}
    assert all(len(json.loads(file.read_text())) == 1 for file in tmp_path.glob("runs/arithmetic-*/points.json"))
    assert [run["learning_rate"] for run in runs if run["seed"] == 0] == [5e-6]
    assert (tmp_path / "control.png").is_file()
    # On another machine, which has the table alone.
    again = control.main(["--rows", "grpo", "--output", str(tmp_path / "elsewhere"), "--results", str(tmp_path)])
    assert again == runs
    assert len(plans) == len(runs)


def test_the_clock_measures_from_its_first_step_on(tmp_path):
    clock = run.Clock(lambda: {"all": 0.5}, 8, tmp_path / "points.json", start=24)

    class State:
        global_step = 0

    class Control:
        should_save = False

    clock.on_train_begin(None, State(), Control())
    for State.global_step in range(1, 41):
        clock.on_step_end(None, State(), Control())
    assert [point["step"] for point in clock.points] == [0, 24, 32, 40]
