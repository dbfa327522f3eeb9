"""One line per log on the terminal, every metric in the file, and nothing of what a resume does again."""

import json
from types import SimpleNamespace

from basis_rl.report import plot_training
from basis_rl.run import progress
from basis_rl.run.progress import ProgressLines, evaluation_lines, how_sampled


def begin(folder, step, first=True, max_steps=10):
    lines, args = ProgressLines(plot_training), SimpleNamespace(output_dir=str(folder), temperature=0.7, top_k=0)
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
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "step 5/10  reward 0.512  kl 0  1:23:22 left"
    assert said[2].startswith("step 5/10  eval  avg@4 0.25  ")
    lines.on_log(args, state, None, {"odd": 1})
    assert capsys.readouterr().out == ""
    state.is_world_process_zero = False
    lines.on_log(args, state, None, {"reward": 1.0})
    assert steps(tmp_path) == [5, 5]
    assert capsys.readouterr().out == ""


def test_a_line_fits_and_keeps_what_matters_most(tmp_path, capsys):
    lines, args, state = begin(tmp_path, 0, max_steps=100_000)
    state.global_step = 12_345
    lines.on_log(args, state, None, {key: -0.00012345 for key, _, _ in progress._SHOWN})
    *explained, line = capsys.readouterr().out.splitlines()
    assert max(map(len, [*explained, line])) <= 80
    assert line.startswith("step 12345/100000  reward -0.000123  err -0.000123  ")
    assert line.endswith(" left")
    labels = [label for _, label, _ in progress._SHOWN]
    assert all(f"{label}: " in " ".join(explained) for label in labels)
    lines.on_log(args, state, None, {"reward": 1.0})
    assert capsys.readouterr().out.count("\n") == 1, "explained once"


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
