"""Without a network: found out once and in seconds, and only where the Hub is asked for something."""

import os
import socket
import time

import pytest
import yaml

from basis_rl.cli import options
from basis_rl.cli.options import asks_the_hub, can_be_reached, go_offline_if_unreachable


@pytest.fixture
def recipe(tmp_path):
    """A recipe of a model in a folder and a dataset in a file."""
    (tmp_path / "model").mkdir()
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path / "model"), "dataset_name": "rows.jsonl"}))
    return str(path)


def test_what_is_local_needs_no_hub(recipe):
    assert not asks_the_hub("train", [recipe])
    assert not asks_the_hub("train", [recipe, "--dataset_name", "reasoning_gym:chain_sum"])
    assert asks_the_hub("train", [recipe, "--dataset_name", "openai/gsm8k"])
    assert asks_the_hub("train", [recipe, "--dataset-name=openai/gsm8k", "--push_to_hub", "false"])
    assert not asks_the_hub("train", [recipe, "--dataset_name", "openai/gsm8k", "--push_to_hub", "true"])
    assert asks_the_hub("train", ["--model_name_or_path", "Qwen/Qwen3-0.6B"])
    assert asks_the_hub("eval", ["runs/a"])


def test_an_address_that_answers_is_reached_and_a_closed_one_is_not(monkeypatch):
    for name in options._PROXIES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert can_be_reached()
    began = time.monotonic()
    assert not can_be_reached()
    assert time.monotonic() - began < 5
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    assert not can_be_reached()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert can_be_reached()


def test_offline_is_said_and_set_once(recipe, monkeypatch, capsys):
    monkeypatch.setattr(options, "can_be_reached", lambda: False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    go_offline_if_unreachable("train", [recipe])
    assert "HF_HUB_OFFLINE" not in os.environ
    go_offline_if_unreachable("eval", ["m"])
    go_offline_if_unreachable("eval", ["m"])
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert capsys.readouterr().err.count("cannot be reached") == 1
