"""One line per log on the terminal, every metric in the file, and nothing of what a resume does again."""

import json
import re
from types import SimpleNamespace

import pytest

from basis_rl.report import plot_training
from basis_rl.run import progress
from basis_rl.run.progress import ProgressLines, evaluation_lines, how_sampled


def begin(folder, step, first=True, max_steps=10, **more):
    lines = ProgressLines(plot_training)
    args = SimpleNamespace(output_dir=str(folder), temperature=0.7, top_k=0, **more)
    state = SimpleNamespace(global_step=step, is_world_process_zero=first, max_steps=max_steps)
    lines.on_train_begin(args, state, None)
    return lines, args, state


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_keeps_what_was_logged_until_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "reward": 0.1 * step} for step in range(1, 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "rew')
    begin(tmp_path, 4, first=False)
    assert path.read_text().count("\n") == 5, "another rank leaves the file alone"
    begin(tmp_path, 4)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:4]
    begin(tmp_path, 0)
    assert path.read_text() == ""


def test_every_metric_is_in_the_file_and_the_main_ones_on_the_line(tmp_path, capsys, monkeypatch):
    now = iter([0.0, 100.0, 100.0 + 3 * 1000.5, 5000.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    lines, args, state = begin(tmp_path, 2)
    state.global_step = 5
    logs = {"reward": 0.51239, "loss": None, "kl": 0.0, "odd": 3, "eval_reward": 0.25, "eval_avg@4": 0.25}
    lines.on_log(args, state, None, logs)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["odd"] == 3
    *_, heads, row, evaluated = capsys.readouterr().out.splitlines()
    assert row.split() == ["step", "5/10", "0.512", "1:23:22"]
    assert heads.index("reward") + len("reward") == row.index("0.512") + len("0.512")
    assert evaluated.startswith("step 5/10  eval  avg@4 0.25  ")
    lines.on_log(args, state, None, {"odd": 1})
    assert capsys.readouterr().out == ""
    state.is_world_process_zero = False
    lines.on_log(args, state, None, {"reward": 1.0})
    assert steps(tmp_path) == [5, 5]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("steps", [9, 400, 100_000])
@pytest.mark.parametrize("value", [0, -0.00012345, 12345.6, 1e-6, 0.5, 1e20])
def test_columns_stay_where_they_are(steps, value, streams, tmp_path, capsys):
    """Each value ends where its heading does, whichever are missing; a line has at most 80 characters."""
    lines, args, state = begin(tmp_path, 0, max_steps=steps, streams=streams)
    state.global_step = steps
    keys = [key for key, *_ in progress._COLUMNS]
    logged = [dict.fromkeys(keys, value), {keys[0]: value}, {keys[1]: value}, dict.fromkeys(keys[2:], value)]
    for logs in logged:
        lines.on_log(args, state, None, logs)
    *explained, heads, full, first, second, rest = capsys.readouterr().out.splitlines()
    assert max(map(len, [*explained, heads, full, first, second, rest])) <= 80
    ends = [match.end() for match in re.finditer(r"\S+", heads)]
    assert [match.end() for match in re.finditer(r"\S+", full)][2:] == ends
    assert [match.end() for match in re.finditer(r"\S+", first)][2:] == [ends[0], ends[-1]]
    assert [match.end() for match in re.finditer(r"\S+", second)][2:] == [ends[1], ends[-1]]
    assert [match.end() for match in re.finditer(r"\S+", rest)][2:] == ends[2:]
    assert ("wait" in heads) == streams
    assert all(f"{head}: " in " ".join(explained) for head in heads.split()[:-1])
    assert float(full.split()[2]) == pytest.approx(value, rel=0.3)


def test_headings_come_again(tmp_path, capsys):
    lines, args, state = begin(tmp_path, 0, max_steps=60)
    for state.global_step in range(1, 61):
        lines.on_log(args, state, None, {"reward": 0.5})
    said = capsys.readouterr().out.splitlines()
    assert sum("reward" in line and "left" in line for line in said) == 3
    assert sum("mean reward of" in line for line in said) == 1


def test_the_plot_of_a_run_has_its_evaluations(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("basis_rl.report.plots._dress", lambda axis, metric: drawn.append(metric.key))
    log = [{"step": i, "reward": 0.5, "eval_reward": 0.1, "eval_avg@4": 0.2, "eval_b_reward": 0.3} for i in (1, 2)]
    plot_training(log, tmp_path / "plot.png")
    assert drawn == ["reward", "eval_avg@4", "eval_b_reward"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plot_training([{"step": 9, "train_runtime": 1.0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists(), "a run that has logged nothing"


def test_the_plot_of_a_streamed_run_has_its_staleness_and_the_waiting_of_both_sides(tmp_path, monkeypatch):
    axes = {}
    monkeypatch.setattr("basis_rl.report.plots._dress", lambda axis, metric: axes.update({metric.key: axis}))
    log = [{"step": 1, "reward": 0.5}]
    for step in (2, 4):
        waited = {"rollout/waited_share": 0.1 * step, "rollout/server_waited_share": 0.2 * step}
        log += [{"step": step, "rollout/staleness": 1.5, **waited}, {"step": step + 1, "reward": 0.5}]
    plot_training(log, tmp_path / "plot.png")
    assert list(axes) == ["reward", "rollout/staleness", "rollout/waited_share"]
    trainer, _, server, _ = axes["rollout/waited_share"].get_lines()
    assert trainer.get_xydata().tolist() == [[2, 0.2], [4, 0.4]]
    assert server.get_xydata().tolist() == [[2, 0.4], [4, 0.8]]
    assert [each.get_text() for each in axes["rollout/waited_share"].get_legend().get_texts()] == ["trainer", "server"]


def test_evaluations_say_how_they_were_drawn():
    logs = {"eval_aime24_avg@4": 0.5, "eval_aime24_pass@2": 0.6, "eval_aime24_pass@4": 0.75, "eval_my_set_avg@1": 1.0}
    lines = ["eval aime24  avg@4 0.5  pass@4 0.75  (greedy)", "eval my_set  avg@1 1  (greedy)"]
    assert evaluation_lines(logs, "greedy") == lines
    assert evaluation_lines({"eval_reward": 1.0, "reward": 1.0}, "greedy") == []
    assert how_sampled(SimpleNamespace(temperature=0.6, top_k=1)) == "greedy"
    assert how_sampled(SimpleNamespace(temperature=0.6, top_k=0)) == "sampled at temperature 0.6"


def test_a_plot_that_fails_is_a_warning(tmp_path, caplog):
    lines, args, state = begin(tmp_path, 0)
    state.log_history = [{"step": 1, "reward": 0.5}]
    lines.on_train_end(args, state, None)
    assert (tmp_path / "training.png").stat().st_size > 1000
    args.output_dir = str(tmp_path / "gone")
    lines.on_train_end(args, state, None)
    assert "could not be drawn" in caplog.text
