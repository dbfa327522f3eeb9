"""The command line: recipes, overrides, real rows of GSM8K and MATH, and messages instead of tracebacks."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl.cli.main import main
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.words import read_recipe
from basis_rl.types import Advantages
from basis_rl.values import ValueTable
from examples.custom_baseline import Shrinkage
from tests.cli.conftest import SETTINGS
from tests.support.tiny import Tokenwise

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

ROOT = Path(__file__).resolve().parents[2]


def test_trls_conventions(recipe):
    path = recipe(reward_funcs=["tests.support.tiny.parity_reward"])
    parsed = parse_recipe(["--config", path, "--num_generations=1", "--baseline", "batch_mean"])
    assert parsed.args.num_generations == 1
    parsed = parse_recipe([path, "--save_strategy", "epoch", "--lr_scheduler_type", "constant"])
    resolved = yaml.safe_load(yaml.safe_dump(parsed.resolved))
    assert (resolved["save_strategy"], resolved["lr_scheduler_type"]) == ("epoch", "constant")
    assert parsed.run.reward_funcs == ["tests.support.tiny.parity_reward"]
    without = [f"--{k}={v}" for k, v in SETTINGS.items() if not isinstance(v, dict)]
    assert parse_recipe([*without, "--model_name_or_path", "m"]).args.max_steps == 2


def test_train_saves_a_model_that_loads(recipe, tmp_path, capsys):
    assert main(["train", recipe()]) == 0
    out = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert sum(p.numel() for p in model.parameters()) > 0
    assert (out / "training.png").stat().st_size > 1000
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["baseline/mse_to_reward"] >= 0
    assert yaml.safe_load((out / "recipe.yaml").read_text())["baseline"] == "rloo"
    assert "step 1/2" in capsys.readouterr().out


def test_value_table_then_basis_with_one_rollout(recipe, tmp_path, capsys):
    path = recipe(baseline="basis", baseline_kwargs={"values": str(tmp_path / "values")}, num_generations=1)
    assert main(["train", path]) == 2
    assert "no value table at" in capsys.readouterr().err
    assert main(["values", path]) == 0
    assert "never solved" in capsys.readouterr().out
    table = ValueTable.load(tmp_path / "values")
    assert all(len(table.rewards(p)) == 4 for p in table.prompt_ids)
    assert table.provenance["num_rollouts"] == 4
    assert main(["check", path]) == 0
    shown = capsys.readouterr().out
    assert "16 prompts x 1 rollouts = 16 rollouts on 1 process(es), used for 2 optimizer step(s) of 8" in shown
    assert "<|im_start|>user" in shown
    assert main(["train", path]) == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["finished"]
    assert "of reasoning_gym:chain_sum" in record["data"]
    assert "of reasoning_gym:chain_sum" in (tmp_path / "out" / "README.md").read_text()
    (artefact,) = record["artefacts"]
    assert (artefact["kind"], artefact["source"]) == ("value table", "values")
    assert (artefact["sha256"], artefact["rollouts"]) == (table.digest, 4 * len(table))
    # The same table, another prompt: refused, with both sides and the way out.
    assert main(["check", path, "--prompt_template", "Q {prompt}"]) == 2
    assert re.search(r"rendered otherwise.*table \w{16}, run \w{16}.*accept_mismatch", capsys.readouterr().err, re.S)


BAD = CASES["bad"]


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_get_one_message(case, recipe, capsys):
    changes, arguments, message = BAD[case]
    assert main(["train", recipe(**changes), *arguments]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("basis-rl: error:") == 1
    assert "Traceback" not in said


def growing(first, each):
    """Nine anchors, each nine times the one before."""
    lines = [f"a{i}: &a{i} {each.format(', '.join([f'*a{i - 1}'] * 9), i)}" for i in range(1, 10)]
    return "\n".join([f"a0: &a0 {first}", *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("- a", "must hold `key: value` lines"),
        ("1: a", "each key is a text"),
        (f"a: {'[' * 3000}{']' * 3000}", "nested more than 50 deep"),
        # YAML can be read this deep, but what then goes through it could not.
        (f"a: {'[' * 200}{']' * 200}", "nested more than 50 deep"),
        ("a: &a [*a]", "an anchor contains itself"),
        (growing("[x, x]", "[{}]"), "more than 100,000 entries"),
        (growing("{k: x}", "{{<<: [{}], k{}: x}}"), "more than 100,000 entries"),
        (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]", "more than 100,000 entries"),
        ("a: !!timestamp b", "does not fit its type"),
        ("a: 2026-13-01", "does not fit its type"),
        ("env: [1, 2]", "env must be a mapping"),
        ("env: {1: 2}", "the variable 1 cannot be set"),
        ("env: {A=B: 2}", "the variable 'A=B' cannot be set"),
    ],
    ids=lambda text: text[:30],
)
def test_recipes_that_cannot_be_read(text, message, tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text(text)
    assert main(["check", str(tmp_path / "broken.yaml")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("basis-rl: error:") == 1


def test_a_recipe_may_use_anchors(tmp_path):
    """An entry that replaces one of an anchor is no repetition, also where the mapping is used again."""
    (tmp_path / "r.yaml").write_text("a:\n  b: &b\n    <<: &c {x: 1, y: 2}\n    x: 3\nd: {<<: *b, <<: *c, y: 4}\n")
    both = {"x": 3, "y": 2}
    assert read_recipe(str(tmp_path / "r.yaml")) == {"a": {"b": both}, "d": {"x": 1, "y": 4}}


def test_no_value_of_a_variable_is_shown(tmp_path, capsys):
    for text in ("env: [HF_TOKEN=abcd]", "env: {1: abcd}"):
        (tmp_path / "broken.yaml").write_text(text)
        assert main(["check", str(tmp_path / "broken.yaml")]) == 2
        assert "abcd" not in capsys.readouterr().err


def test_a_configuration_of_accelerate_that_cannot_be_read(recipe, tmp_path, capsys):
    (tmp_path / "zero.yaml").write_text("a: [")
    assert main(["train", recipe(), "--accelerate_config", str(tmp_path / "zero.yaml")]) == 2
    assert "not valid YAML" in capsys.readouterr().err


def test_commands(capsys):
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "Did you mean 'train'" in capsys.readouterr().err
    assert main(["--help"]) == main(["--version"]) == 0


class ByPosition(Tokenwise):
    """Its advantages depend on the order of the rows."""

    token_level = "never"

    def advantages(self, batch):
        values = torch.nan_to_num(batch.rewards) * torch.arange(len(batch.rewards))
        return Advantages(values=values, baseline=torch.zeros_like(values))


def test_a_resume_adds_to_the_log_and_what_it_refuses_moves_nothing(recipe, tmp_path, capsys):
    assert main(["train", recipe(save_strategy="steps", save_steps=1)]) == 0
    assert main(["train", recipe(max_steps=3), "--resume_from_checkpoint", "true"]) == 0
    rows = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows == sorted(rows)
    assert rows[:3] == [1, 2, 2]
    first = str(tmp_path / "out" / "checkpoint-1")
    assert main(["train", recipe(baseline="dr_grpo"), "--resume_from_checkpoint", first]) == 2
    assert 'baseline: "rloo", now "dr_grpo"' in capsys.readouterr().err
    assert main(["train", recipe(prompt_template=None), "--resume_from_checkpoint", first]) == 2
    assert "prompts as the model is given them: " in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


def test_a_finished_run_that_is_resumed_says_so_and_completes_what_is_missing(recipe, tmp_path, capsys):
    """Three times, the second after a kill in the final save; the fourth with fewer steps."""
    out = tmp_path / "out"
    settings = {"save_strategy": "steps", "save_steps": 1}
    again = ["--resume_from_checkpoint", "auto"]
    assert main(["train", recipe(**settings)]) == 0
    weights, log = (out / "model.safetensors").read_bytes(), (out / "metrics.jsonl").read_text()
    record = json.loads((out / "run.json").read_text())
    assert record["finished"]
    capsys.readouterr()
    for steps, torn in ((2, False), (2, True), (1, False)):
        if torn:
            (out / "model.safetensors").write_bytes(b"half")
            (out / "INCOMPLETE").touch()
        (out / "README.md").unlink()
        assert main(["train", recipe(**settings, max_steps=steps), *again]) == 0
        said = capsys.readouterr().out
        assert f"is finished: step 2 of {steps}" in said
        assert ("saving the model" in said) == torn
        assert (out / "model.safetensors").read_bytes() == weights
        assert (out / "metrics.jsonl").read_text() == log
        assert (out / "README.md").is_file()
        assert not (out / "INCOMPLETE").exists()
        assert json.loads((out / "run.json").read_text())["step"] == 2
        assert yaml.safe_load((out / "recipe.yaml").read_text())["max_steps"] == 2
        assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert main(["train", recipe(**settings)]) == 2
    assert "of an earlier run, the newest is checkpoint-2" in capsys.readouterr().err


def test_gradients_that_are_not_finite_end_the_run_with_their_own_exit_code(recipe, capsys):
    path = recipe(reward_funcs=["tests.cli.test_cli.absurd"], baseline="none", max_steps=30, max_nonfinite_steps=2)
    assert main(["train", path]) == 70
    assert "2 steps in a row" in capsys.readouterr().err


def absurd(completions, **kwargs):
    return [3e38 * (i % 2) for i in range(len(completions))]


@pytest.mark.parametrize("words", CASES["checked"])
def test_check_gives_a_baseline_its_arguments_or_takes_a_built_one(words, capsys):
    assert main(["check", *words]) == 0
    assert "keeps the contract: declarations, shape_and_zeros" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), CASES["not checked"])
def test_check_tells_what_it_cannot_check(words, message, capsys):
    assert main(["check", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


BUILT, NUMBER = Shrinkage(3.0), 3
