"""Tools from a recipe: `basis-rl check` and `basis-rl train`, and the example's own conversations."""

import json
from pathlib import Path

import pytest
import yaml

from basis_rl.cli.main import main
from basis_rl.trainer.turns import read_turn
from examples.quickstart.warm_start import save
from examples.tools.run import RECIPE
from examples.tools.warm_start import conversation, encode
from tests.support.tiny import sums, tiny_model
from tests.support.tooled import tokenizer


@pytest.fixture
def recipe(tmp_path):
    tok = tokenizer()
    save(tiny_model(tok), tok, tmp_path / "model")
    keys = yaml.safe_load(Path(RECIPE).read_text())
    keys |= {
        "model_name_or_path": str(tmp_path / "model"),
        "output_dir": str(tmp_path / "out"),
        "dataset_kwargs": {"size": 64, "seed": 1, "min_terms": 2, "max_terms": 2},
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(keys))
    return str(path)


def test_check_shows_the_tools_and_train_calls_them(recipe, tmp_path, capsys):
    assert main(["check", recipe, "--world_size", "1"]) == 0
    assert "== Tools\ncalculator; calls of a rollout are answered 3 times at most" in capsys.readouterr().out
    more = ["--tools", "calculator", "python", "--tool_kwargs.python.timeout", "5"]
    assert main(["train", recipe, *more]) == 0, capsys.readouterr().err
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert "tools/call_frequency" in log[0]
    saved = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert saved["tools"] == ["calculator", "python"]
    assert saved["tool_kwargs"] == {"python": {"timeout": 5}}


def test_a_value_table_with_tools_is_refused_at_once(recipe, tmp_path, capsys):
    assert main(["values", recipe, "--seed", "1", "--values_output_dir", str(tmp_path / "values")]) != 0
    assert "draws single turns" in capsys.readouterr().err


@pytest.mark.parametrize("use_tool", [False, True])
def test_the_warm_start_learns_what_training_renders(use_tool):
    tok = tokenizer()
    row = sums()[3]
    messages = conversation(row, use_tool=use_tool)
    ids, labels = encode(tok, messages)
    whole = tok.apply_chat_template(messages, return_dict=False)
    assert whole[: len(ids)] == ids
    assert tok.decode(whole[len(ids) :]) == "\n"
    learnt = [token for token in labels if token != -100]
    own = [tok.apply_chat_template([m], tokenize=False) for m in messages if m["role"] == "assistant"]
    assert tok.decode(learnt) == "".join(text.removeprefix("<|im_start|>assistant\n").rstrip("\n") for text in own)
    prefix = tok.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    first = ids[len(prefix) : ids.index(tok.eos_token_id, len(prefix)) + 1]
    read = read_turn(tok, first, prefix=prefix)
    assert (read.get("tool_calls") or []) == (messages[1].get("tool_calls") or [])
