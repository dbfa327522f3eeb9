"""One line a log on the terminal, every metric in the file, and nothing of what a resume does again."""

import json
from types import SimpleNamespace

from basis_rl.trainer import progress
from basis_rl.trainer.progress import ProgressLines


def begin(folder, step, first=True, max_steps=10):
    lines, args = ProgressLines(), SimpleNamespace(output_dir=str(folder))
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
    lines.on_log(args, state, None, {"reward": 0.51239, "loss": None, "kl": 0.0, "odd": 3, "eval_reward": 0.25})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["odd"] == 3
    said = capsys.readouterr().out
    assert said == "step 5/10  reward 0.5124  kl 0  eval_reward 0.25  1000.50 s/step, 1:23:22 left\n"
    lines.on_log(args, state, None, {"odd": 1})
    assert capsys.readouterr().out == ""
    state.is_world_process_zero = False
    lines.on_log(args, state, None, {"reward": 1.0})
    assert steps(tmp_path) == [5, 5]
    assert capsys.readouterr().out == ""
