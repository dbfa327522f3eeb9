"""The last words of a run: before and after by steps, what it cost, what is there, what to do next."""

import shlex

from basis_rl.cli.train import before_and_after, summary

SPENT = {"num_rollouts": 61440, "num_rollout_tokens": 340_000, "seconds": 3723.4}
LOG = [
    {"step": 10, "reward": 0.25, "eval_avg@1": None},
    {"step": 10, "eval_avg@1": 0.3, "eval_pass@2": 0.4},
    *({"step": step, "reward": 0.5} for step in range(11, 20)),
    {"step": 20, "reward": 0.75},
    {"step": 20, "eval_avg@1": 0.8, "eval_aime24_avg@4": 0.1, **SPENT},
]


def test_before_and_after_are_of_the_first_and_last_log():
    reward, evaluated = before_and_after(LOG, "greedy")
    assert reward == ("reward", 0.25, 0.75, "of the training rollouts, steps 10 and 20")
    assert evaluated == ("eval avg@1", 0.3, 0.8, "greedy, steps 10 and 20")
    assert before_and_after(LOG[:1], "greedy") == []


def test_a_long_log_is_averaged_at_both_ends():
    log = [{"step": step, "reward": float(step)} for step in range(1, 41)]
    ((_, first, last, note),) = before_and_after(log, "greedy")
    assert (first, last) == (2.5, 38.5)
    assert note.endswith("steps 1-4 and 37-40")


def test_the_summary_tells_only_of_files_that_are_there(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    text = summary(LOG, tmp_path, "greedy", ["aime24", "mine=data/mine.jsonl"])
    assert "Trained to step 20 in 1:02:03: 61,440 rollouts with 340,000 tokens." in text
    assert "metrics.jsonl" in text
    assert "training.png" not in text
    assert f"basis-rl eval {tmp_path} --benchmarks aime24,mine=data/mine.jsonl" in text
    plain = summary([], tmp_path, "greedy")
    assert "before" not in plain
    assert f"basis-rl eval {tmp_path}\n" in plain
    # A run with tools.
    assert "basis-rl eval" not in summary(LOG, tmp_path, "greedy", None)


def test_commands_can_be_pasted_whatever_the_folder_is_called(tmp_path):
    folder = tmp_path / "my run's {best} $HOME"
    lines = [line for line in summary(LOG, folder, "greedy", ["a b"]).splitlines() if line.startswith("  basis-rl")]
    assert [shlex.split(line)[2] for line in lines] == [str(folder)] * 3
    assert shlex.split(lines[0])[-1] == "a b"
