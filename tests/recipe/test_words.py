"""Keys and help without torch or TRL: the generated list, what a misspelt word gets, recipes of ``trl grpo``."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from enum import Enum
from pathlib import Path

import pytest
import yaml

from basis_rl.cli.eval import parser as eval_parser
from basis_rl.cli.main import COMMANDS
from basis_rl.cli.options import help_of
from basis_rl.evaluation.arguments import EvalArguments
from basis_rl.recipe.file import TYPES, parse_recipe, parser
from basis_rl.recipe.sources import HOMES, known_keys
from basis_rl.recipe.trl_recipes import TRL_REWARDS, from_trl
from basis_rl.recipe.words import check_words

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def written(tmp_path):
    """Writes a recipe and returns its path."""

    def write(**settings):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings))
        return str(path)

    return write


@pytest.mark.parametrize(("of", "types"), [("recipe", TYPES), ("eval", (EvalArguments,))])
def test_the_keys_that_are_read_are_those_of_the_dataclasses(of, types):
    """By name, default, help and flag."""
    keys = {key.name: key for key in known_keys(of)}
    declared = {each.name: each for kind in types for each in fields(kind) if each.init}
    assert list(keys) == list(declared)
    for name, key in keys.items():
        made = declared[name].default_factory() if callable(declared[name].default_factory) else declared[name].default
        made = made.value if isinstance(made, Enum) else made
        assert key.default == (made if isinstance(made, str) else json.dumps(made)), name
        assert key.help == " ".join((declared[name].metadata.get("help") or "").split()), name
    options = parser() if of == "recipe" else eval_parser()
    assert {flag for key in keys.values() for flag in key.flags} == options.flags() - {"-h", "--help"}


WITHOUT_TORCH = CASES["without torch"]


def test_help_and_wrong_names_are_answered_without_torch(written, tmp_path):
    wrong = Path(written(beselin="rloo")).rename(tmp_path / "wrong.yaml")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"ask": "1+1?", "answer": "2"}\n')
    paths = {"WRONG": str(wrong), "RECIPE": written(baseline="rloo", env={"OF_OURS": 1}), "ROWS": str(rows)}
    calls = [[paths.get(word, word) for word in line.split()] for line in WITHOUT_TORCH]
    code = f"""import sys
from basis_rl.cli.main import main
for words in {calls!r}:
    main(words)
    print("=====", flush=True)
heavy = {{"torch", "trl", "transformers", "datasets", "numpy", "pandas"}} & set(sys.modules)
assert not heavy, heavy"""
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-uc", code], cwd=ROOT, env=environment, check=False, **together)
    assert done.returncode == 0, done.stdout
    for said, expected in zip(done.stdout.split("====="), WITHOUT_TORCH.values(), strict=False):
        assert expected in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal_and_shows_its_own_keys_first(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= 80
    assert "--hub_always_push" not in text
    whole = help_of(command, everything=True)
    if command in ("train", "values", "clusters", "check", "sweep"):
        assert whole.index("--dataset_name") < whole.index("--hub_always_push")
        assert whole.count("\n  --learning_rate (") == 1


def test_what_may_stand_in_a_recipe_may_stand_in_all(written, monkeypatch):
    monkeypatch.delenv("OF_OURS", raising=False)
    path = written(baseline="rloo", baseline_kwargs={"a": 1}, env={"OF_OURS": 1})
    check_words([path, "--no_shuffle_dataset", "--learning-rate=1", "--reward_kwargs.overlong.cache", "4"])
    assert os.environ.pop("OF_OURS") == "1"


def test_a_version_that_cannot_be_read_is_left_to_the_dataclasses(written, monkeypatch):
    known_keys.cache_clear()
    monkeypatch.setitem(HOMES, "GRPOConfig", ("trl", "moved/grpo_config.py"))
    check_words([written(a_key_of_tomorrow=1)])
    known_keys.cache_clear()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="a_key_of_tomorrow"):
        check_words([written(a_key_of_tomorrow=1)])


def test_a_recipe_of_trl_grpo_runs_as_it_is(written, tiny_path):
    path = written(
        model_name_or_path=str(tiny_path),
        output_dir="out",
        datasets=[{"path": "trl-lib/DeepMath-103K", "split": "train"}],
        dataset_streaming=False,
        dataset_test_split="test",
        reward_funcs=["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"],
        reward_weights=[1.0, 0.5, 0.5],
        scale_rewards="none",
        use_cpu=True,
        bf16=False,
    )
    check_words([path])
    recipe = parse_recipe([path])
    assert recipe.run.reward_funcs == ["math_verify", "format", "overlong"]
    assert recipe.run.reward_kwargs["format"] == {"form": "think"}
    assert recipe.run.reward_kwargs["overlong"] == {"max_completion_length": 1280, "cache": 256}
    assert (recipe.args.scale_rewards, recipe.data.dataset_name) == ("none", "trl-lib/DeepMath-103K")
    assert recipe.resolved["reward_kwargs"] == recipe.run.reward_kwargs
    assert len(recipe.notes) == 4, recipe.notes
    assert "TRL's reward accuracy_reward is read as math_verify." in recipe.notes
    given = parse_recipe([path, "--reward_kwargs.overlong.cache", "20", "--reward_kwargs.math_verify.timeout", "3"])
    longest = {"max_completion_length": 1280, "cache": 20}
    assert given.run.reward_kwargs == {"math_verify": {"timeout": 3}, "format": {"form": "think"}, "overlong": longest}
    assert given.resolved["reward_kwargs"] == given.run.reward_kwargs
    (name,) = parse_recipe([path, "--reward_funcs", "accuracy_reward", "--reward_weights", "1"]).run.reward_funcs
    assert name == "math_verify"


def test_trls_names_of_rewards_are_those_of_its_script():
    from trl.scripts import grpo

    source = Path(grpo.__file__).read_text()
    assert all(f'"{name}": ' in source for name in TRL_REWARDS)


def test_keys_of_other_commands_stand_in_sections(written, tiny_path):
    """What was resolved reads as the same settings, and the command line has the section in front of the name."""
    given = {"model_name_or_path": str(tiny_path), "output_dir": "out", "use_cpu": True, "bf16": False}
    path = written(**given, values={"num_rollouts": 8, "servers": "http://a:1"}, clusters={"num": 3})
    check_words([path])
    first = parse_recipe([path, "--values_num_rollouts", "4", "--values_serve", "true"])
    assert first.resolved["values"] == {"num_rollouts": 4, "servers": "http://a:1", "serve": True}
    again = parse_recipe([written(**first.resolved)])
    assert vars(again.run) == vars(first.run)
    assert (again.run.values_num_rollouts, again.run.clusters_num) == (4, 3)
    assert parse_recipe([written(**given, values=None)]).run.values_num_rollouts == 32


FLAT = {"values_num_rollouts": 8, "clusters_num": 3, "values_serve": True}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (FLAT, r"write clusters\.num, values\.num_rollouts, values\.serve in sections"),
        ({"values": {"num_rollout": 1}}, r"Unknown key 'values\.num_rollout' in .* mean 'values\.num_rollouts'"),
        ({"values": 3}, r"values in .* must be a mapping"),
    ],
)
def test_a_mistake_about_a_section_is_told_with_it(keys, message, written):
    with pytest.raises(ValueError, match=message):
        check_words([written(seed=1, **keys)])


def test_our_own_recipes_are_left_as_they_are():
    for path in [*ROOT.glob("examples/**/*.yaml"), *ROOT.glob("studies/**/*.yaml")]:
        config = yaml.safe_load(path.read_text())
        assert from_trl(config) == (config, []), path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"reward_model_name_or_path": "m"}, "loads no reward model"),
        ({"datasets": [{"path": "a"}, {"path": "b"}]}, "trains on one dataset"),
        ({"datasets": [{"path": "a", "data_files": "b"}]}, "trains on one dataset"),
    ],
)
def test_what_cannot_be_translated_is_one_message(config, message):
    with pytest.raises(ValueError, match=message):
        from_trl(config)
