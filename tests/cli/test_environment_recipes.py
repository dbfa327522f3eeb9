"""Environments from a recipe: `basis-rl check` plays an episode, `basis-rl train` trains, and the example's games."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from basis_rl.cli.main import main
from basis_rl.recipe.build import build_run_environment, load_config_and_tokenizer, load_training_data
from basis_rl.recipe.file import parse_recipe
from basis_rl.trainer.turns import read_turn
from examples.environments.higher_lower import HigherLower
from examples.environments.run import RECIPE
from examples.environments.warm_start import LAST, game, game_tokenizer, games
from examples.quickstart.warm_start import CHAT_TEMPLATE, save
from examples.tools.warm_start import encode
from tests.support.tiny import tiny_model

SMALL = {
    "num_generations": 2, "per_device_train_batch_size": 4, "steps_per_generation": 1, "max_steps": 1,
    "logging_steps": 1, "max_completion_length": 6,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    """Writes the example's recipe for a tiny model, with changes; None leaves a key out."""

    def write(template=None, **changes):
        tok = game_tokenizer(15, 4)
        if template is not None:
            tok.chat_template = template
            del tok.response_template
        save(tiny_model(tok), tok, tmp_path / "model")
        keys = yaml.safe_load(Path(RECIPE).read_text()) | SMALL
        keys |= {"model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path / "out"), **changes}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in keys.items() if value is not None}))
        return str(path)

    return write


def test_check_plays_an_episode_and_train_is_rewarded_by_the_environment(recipe, tmp_path, capsys):
    path = recipe()
    assert main(["check", path, "--world_size", "1"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    first = build_run_environment(parse_recipe([path]).run)()
    row = load_training_data(parse_recipe([path]), game_tokenizer(15, 4))[0]
    assert first.reset(**row) in said
    assert f"<|im_start|>tool\n{first.guess(1)}<|im_end|>" in said
    assert f"--- rewards: HigherLower {first.get_reward():g}" in said
    assert main(["train", path, "--environment_kwargs.size", "9"]) == 0, capsys.readouterr().err
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert [key for key in log[0] if key.startswith("rewards/") and key.endswith("mean")] == [
        "rewards/HigherLower/mean"
    ]
    saved = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert saved["environment_kwargs"] == {"size": 9, "guesses": 4}


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_broken_environment_is_one_message_and_no_weights_are_loaded(command, recipe, monkeypatch, capsys):
    def never(*given, **more):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("basis_rl.recipe.build.BasisTrainer", never)
    failing = recipe(environment="tests.trainer.test_environments:Failing", environment_kwargs=None)
    assert main([command, failing]) == 2
    assert "'Failing.reset' with the columns seed: AttributeError" in capsys.readouterr().err
    assert main([command, recipe(environment_kwargs={"sise": 3})]) == 2
    assert "unexpected keyword argument 'sise'" in capsys.readouterr().err
    assert main([command, recipe(learning_rate=0.0)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("basis-rl: error: learning_rate is 0"), "its rows need no prompts beside another mistake"


@pytest.mark.parametrize(
    ("command", "message"), [("values", "or an environment take a baseline without a table"), ("clusters", "its own")]
)
def test_what_an_environment_does_not_go_with_is_said_at_once(command, message, recipe, tmp_path, capsys):
    more = ["--clusters_output_dir", str(tmp_path / "book"), "--values_output_dir", str(tmp_path / "table")]
    assert main([command, recipe(), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_template_with_tools_is_set_and_saved_where_the_models_has_none(recipe, tmp_path, capsys):
    path = recipe(template=CHAT_TEMPLATE)
    assert main(["train", path]) == 2
    assert "chat_template: tools" in capsys.readouterr().err
    assert main(["check", path, "--chat_template", "tools"]) == 0, capsys.readouterr().err
    assert '- guess: Guess the number.\n  number: {"type": "integer"' in capsys.readouterr().out
    assert main(["train", path, "--chat_template", "tools"]) == 0, capsys.readouterr().err
    recipe = parse_recipe([path, "--chat_template", "tools"])
    _, expected = load_config_and_tokenizer(recipe.model, recipe.args, "tools")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == expected.chat_template


def test_rows_need_neither_prompts_nor_golds_and_all_that_reset_reads_tells_them_apart(recipe, tmp_path):
    rows = [{"question": f"Play {i % 2}.", "seed": i, "environment": "ab"[i % 2]} for i in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = json.dumps({"a": "examples.environments.higher_lower:HigherLower", "b": f"{__name__}:Other"})
    data = ["--dataset_name", str(file), "--test_fraction", "0"]
    parsed = parse_recipe([recipe(environment=None, environment_kwargs=None), "--environment", named, *data])
    assert {name: type(made()) for name, made in build_run_environment(parsed.run).items()} == {
        "a": HigherLower,
        "b": Other,
    }
    found = load_training_data(parsed, game_tokenizer(15, 4))
    assert [prompt[0]["content"] for prompt in found["prompt"]] == [row["question"] for row in rows]
    assert len(set(found["prompt_id"])) == 8
    without = file.with_name("without.jsonl")
    without.write_text("".join(json.dumps({"seed": i}) + "\n" for i in range(40)))
    given = [recipe(), "--dataset_name", str(without), "--max_train_samples", "100"]
    trained, held_out = (
        load_training_data(parse_recipe([*given, "--test_fraction", "0.3"]), game_tokenizer(15, 4), held_out=held_out)
        for held_out in (False, True)
    )
    assert sorted([*trained["seed"], *held_out["seed"]]) == list(range(40))
    assert 4 <= len(held_out) <= 20


class Other(HigherLower):
    pass


@pytest.mark.parametrize("seed", range(5))
def test_halving_wins_each_game_and_the_warm_start_learns_what_training_renders(seed):
    messages = game(seed, 15, 4, skilled=True)
    assert messages[-2]["content"] == "right"
    tok = game_tokenizer(15, 4)
    ids, labels = encode(tok, messages)
    assert tok.apply_chat_template(messages, return_dict=False)[: len(ids)] == ids
    prefix = tok.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    first = ids[len(prefix) : ids.index(tok.eos_token_id, len(prefix)) + 1]
    assert read_turn(tok, first, prefix=prefix)["tool_calls"] == messages[1]["tool_calls"]
    assert tok.decode([label for label in labels if label != -100]).endswith(f"{LAST}<|im_end|>")


def test_any_numbers_win_few_games():
    won = [each[-2]["content"] == "right" for each in games(400, 15, 4, skilled_share=0.0, seed=0)]
    # 1 - (14/15)^4 = 0.24.
    assert 0.16 < sum(won) / len(won) < 0.32
