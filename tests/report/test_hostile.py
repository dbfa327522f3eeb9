"""A comparison reads folders of others: whatever is in their files, it says what it left out and compares the rest."""

import json
import os
import random
import time

import numpy as np
import pandas as pd
import pytest

from basis_rl.cli.main import main
from basis_rl.report import page
from basis_rl.report.compare import compare_runs, rollouts_to, window_mean
from basis_rl.report.runs import Run, read_run
from tests.report.folders import write_rows, write_run

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
# File, what is in it, and whether the run is left out.
FILES = {
    "a record that is a list": ("run.json", "[1, 2]", True),
    "a record that ends early": ("run.json", '{"baseline": "rlo', True),
    "a record of depth": ("run.json", "[" * 100_000, True),
    "a record that is no text": ("run.json", b"\xff\xfe\x00", True),
    "a large record": ("run.json", json.dumps({"recipe": "x" * (2 << 20)}), True),
    "a recipe that is no YAML": ("recipe.yaml", "a: [1, 2", True),
    "a recipe that is a text": ("recipe.yaml", "hello", True),
    "a recipe that holds itself": ("recipe.yaml", "a: &a [*a]", True),
    "a recipe of millions": ("recipe.yaml", BOMB, True),
    "a recipe that runs code": ("recipe.yaml", "a: !!python/object/apply:os.system ['touch ran']", True),
    "a recipe in a record that is no YAML": ("run.json", '{"recipe": "a: [1, 2"}', True),
    "parts of other types in a record": ("run.json", '{"baseline_parameters": 3, "sampler": {"a": [1]}}', False),
    "a recipe of millions in a record": ("run.json", json.dumps({"recipe": BOMB}), True),
    "keys of other types": ("recipe.yaml", "1: 2\n2020-01-01: [{2020-01-02: 3}]\nnull: {true: !!binary aGk=}", False),
    "facts of other types": ("run.json", json.dumps({
        "baseline": {"a": [1]}, "objective": 3, "seed": [1], "compared": [], "hardware": {"a": 1}, "finished": "no",
        "recipe": [1], "versions": {"torch": 3, "a": "b"}, "artefacts": [1, {"kind": "value table"}, {"kind": []}],
    }), False),
    "artefacts that are none": ("run.json", '{"artefacts": null, "versions": null}', False),
    "letters that are none": ("run.json", '{"baseline": "\\ud800\\u001b[31m<b>", "versions": {"\\ud800": "1"}}', False),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch):
    monkeypatch.setattr(page, "png", lambda *args: None)
    monkeypatch.setattr(page, "svg", lambda *args: "")


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_another_form_costs_at_most_its_run(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, content, left_out = FILES[case]
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "odd", baseline="grpo")
    if "in a record" in case:
        (tmp_path / "runs" / "odd" / "recipe.yaml").unlink()
    write = (tmp_path / "runs" / "odd" / name).write_bytes
    write(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    assert main(["compare", "runs", "--output_dir", "report"]) == 0
    said = capsys.readouterr().out
    assert said.replace("\n", "").isprintable()
    assert (f"A run was left out: 'runs/odd/{name}' cannot be read: " in said) == left_out
    assert not (tmp_path / "ran").exists()
    if left_out:
        assert main(["compare", "runs/odd", "--output_dir", "report"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


ODD = [float("nan"), float("inf"), -5, 0, "3", None, [1], {"a": 1}, True, 10**400, 1e308]


@pytest.mark.parametrize(
    "key", ["step", "num_rollouts", "reward", "advantages/zero", "seconds", "eval_avg@1", "eval_\ud800_avg@1"]
)
def test_what_is_no_number_in_a_log_is_passed_over(key, tmp_path, capsys):
    """Some rows of one key are odd, the others are as they were."""
    good, odd = tmp_path / "runs" / "good", tmp_path / "runs" / "odd"
    write_run(good)
    write_run(odd, baseline="grpo", **{"eval_avg@1": 0.5})
    rows = rows_of(odd)
    for row, value in zip(rows, ODD, strict=False):
        row[key] = value
    write_rows(odd, rows)
    with (odd / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n[1]\nnull\n" + '{"step": ')
    assert main(["compare", str(tmp_path / "runs"), "--output_dir", str(tmp_path / "report")]) == 0
    assert "left out" not in capsys.readouterr().out
    assert read_run(odd).rollouts == read_run(good).rollouts


def test_a_log_of_nothing_but_oddities_is_no_run(tmp_path):
    write_run(tmp_path / "odd")
    write_rows(tmp_path / "odd", [{"step": i, "reward": 1.0, "num_rollouts": 0} for i in range(3)])
    with pytest.raises(ValueError, match="has sampled no rollouts"):
        compare_runs([tmp_path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_run_that_may_not_be_read_is_left_out(tmp_path):
    write_run(tmp_path / "good")
    write_run(tmp_path / "odd")
    (tmp_path / "odd" / "run.json").chmod(0)
    assert "left out" in compare_runs([tmp_path]).notes[0]


def plainly(x, y, target, budget):
    width = 0.1 * budget
    places = [*x[(x >= width) & (x < budget)], budget]
    return next((float(n) for n in places if window_mean(x, y, n - width, n) >= target), float("nan"))


def test_the_place_where_a_reward_is_reached_is_that_of_a_plain_search(tmp_path):
    draw = random.Random(0)
    for case in range(200):
        count = draw.randrange(1, 40)
        places = sorted(draw.sample(range(1, 200), count))
        rows = [{"num_rollouts": x, "reward": draw.choice([0, 0.25, 1, draw.random()])} for x in places]
        run = Run(tmp_path, pd.DataFrame(rows))
        budget = draw.choice([places[-1], places[-1] * 0.7, float(places[0])])
        x, y = run.series("reward")
        for target in (0.0, 0.25, 0.5, draw.random(), 2.0, window_mean(x, y, 0.9 * budget, budget)):
            assert rollouts_to(run, target, budget) == pytest.approx(plainly(x, y, target, budget), nan_ok=True), case


def test_a_long_log_takes_seconds(tmp_path):
    draw = random.Random(0)
    rows = [{"step": i + 1, "num_rollouts": 8 * (i + 1), "reward": draw.random()} for i in range(400_000)]
    began = time.process_time()
    run = Run(tmp_path, pd.DataFrame(rows))
    assert np.isnan(rollouts_to(run, 0.9, run.rollouts))
    assert time.process_time() - began < 5.0
