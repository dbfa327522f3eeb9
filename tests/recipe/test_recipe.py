"""From a recipe to a run, piece by piece and without a training: what each key comes to."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from basis_rl.baselines import BASELINES, Baseline, Rloo
from basis_rl.data import GYM_COLUMN
from basis_rl.objectives import OBJECTIVES
from basis_rl.recipe.build import (
    build_rewards,
    build_tools,
    build_trainer,
    load_config_and_tokenizer,
    load_eval_data,
    load_training_data,
    model_init_kwargs,
    plan_recipe,
    server_options,
)
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.words import parse_yaml, split_path
from basis_rl.trainer.plan import as_object, as_rewards
from tests.support.tiny import tiny_tokenizer


class Weighted(Rloo):
    def __init__(self, weight=1.0):
        self.weight = weight


class Graded:
    """A reward of one's own, with a parameter."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [self.scale] * len(completions)


def counted(text: str) -> str:
    return str(len(text))


class Repeated:
    """A tool with one."""

    def __init__(self, times=1):
        self.times = times


HERE = "tests.recipe.test_recipe"


@pytest.fixture
def parsed(tmp_path, tiny_path):
    """Parses a recipe with changes, and arguments."""
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1), "level": f"level {i % 2}"} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def parse(*arguments, **changes):
        settings = {
            "model_name_or_path": str(tiny_path),
            "output_dir": str(tmp_path / "out"),
            "dataset_name": str(tmp_path / "rows.jsonl"),
            "reward_funcs": ["tests.support.tiny.parity_reward"],
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        return parse_recipe([str(path), *arguments])

    return parse


def test_the_recipes_path_may_stand_anywhere():
    assert split_path(["--a", "1", "--config", "r.yaml", "--b", "2"]) == ("r.yaml", ["--a", "1", "--b", "2"])
    assert split_path(["r.yaml", "--a", "1"]) == ("r.yaml", ["--a", "1"])
    assert split_path(["--a", "1"]) == (None, ["--a", "1"])
    with pytest.raises(ValueError, match="--config needs the path"):
        split_path(["--a", "1", "--config"])


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("-2E+3", -2000.0), ("1.5e2", 150.0), ("e5", "e5")])
def test_numbers_without_a_point(text, value):
    assert parse_yaml(text) == value


def test_entries_of_dictionaries_are_put_beside_those_that_are_there(parsed):
    given = {"reward_kwargs": {"overlong": {"cache": 1, "other": 2}, "format": {"form": "box"}}}
    arguments = ["--reward_kwargs.overlong.cache", "5", "--baseline_kwargs.eps=1e-3", "--num_generations", "4"]
    found = parsed(*arguments, **given, baseline_kwargs={"old": True})
    assert found.run.reward_kwargs == {"overlong": {"cache": 5, "other": 2}, "format": {"form": "box"}}
    assert found.run.baseline_kwargs == {"old": True, "eps": 1e-3}
    assert found.args.num_generations == 4
    assert found.resolved["num_generations"] == 4
    assert found.resolved["reward_kwargs"] == found.run.reward_kwargs
    assert parsed("--dataset_kwargs.size", "7").data.dataset_kwargs == {"size": 7}
    assert parsed("--baseline", "baseline_kwargs").run.baseline == "baseline_kwargs"


def test_a_recipe_that_is_saved_says_what_a_flag_with_no_has_set(parsed):
    found = parsed("--no_strip_instructions", "--no-shuffle-dataset", strip_instructions=True)
    assert not found.data.strip_instructions
    assert found.resolved["strip_instructions"] is found.resolved["shuffle_dataset"] is False


def test_the_recipes_environment_wins(parsed, monkeypatch):
    monkeypatch.setenv("A_SETTING_OF_OURS", "outside")
    parsed(env={"A_SETTING_OF_OURS": "inside"})
    assert os.environ["A_SETTING_OF_OURS"] == "inside"


@pytest.mark.parametrize("words", [["--serve"], ["--serve", "true"], ["--serve=yes"], ["--serve", "--seed", "1"]])
def test_who_asks_for_a_server_generates_with_it(words, tmp_path):
    given = ["--model_name_or_path", "m", "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    recipe = parse_recipe([*given, *words])
    assert (recipe.args.use_vllm, recipe.args.vllm_mode) == (True, "server")
    assert recipe.resolved["use_vllm"] is True
    assert not parse_recipe([*given, "--serve", "false"]).args.use_vllm
    assert not parse_recipe([*given, *words, "--use_vllm", "false"]).args.use_vllm


def test_weights_are_as_many_as_rewards(parsed):
    names = [f"{HERE}.Graded", "tests.support.tiny.parity_reward"]
    with pytest.raises(ValueError, match="reward_weights has 1 entries for the 2 reward_funcs"):
        build_rewards(parsed(reward_funcs=names, reward_weights=[1.0]))


def test_rewards_know_the_length_limit(parsed):
    (reward,) = build_rewards(parsed(reward_funcs=["overlong"], reward_kwargs={"cache": 16}, max_completion_length=64))
    ids = [[1] * n for n in (40, 56, 64)]
    assert reward(prompts=["p"] * 3, completions=["x"] * 3, completion_ids=ids) == pytest.approx([0.0, -0.5, -1.0])


def test_tools_of_ones_own(parsed):
    repeated = f"{HERE}.Repeated"
    (tool,) = build_tools(parsed(tools=[repeated], tool_kwargs={repeated: {"times": 4}}).run)
    assert tool.times == 4
    with pytest.raises(ValueError, match="'pyton' is not among the tools"):
        build_tools(parsed(tools=["python"], tool_kwargs={"pyton": {}}).run)


def test_one_syntax_names_what_is_ones_own(parsed):
    found = parsed(reward_funcs=[f"{HERE}:Graded"], reward_kwargs={"scale": 3.0}, tools=[f"{HERE}:counted"])
    assert build_rewards(found)[0](["x"]) == [3.0]
    assert build_tools(found.run)[0]("abc") == "3"
    (reward,) = as_rewards(f"{HERE}:Graded", found.args)
    assert reward.scale == 1.0
    assert as_object("baseline", f"{HERE}:Weighted", BASELINES, Baseline).weight == 1.0


def test_lists_have_commas_or_blanks(tmp_path, tiny_path):
    path = tmp_path / "r.yaml"
    settings = {"model_name_or_path": str(tiny_path), "dataset_name": "x", "output_dir": str(tmp_path)}
    path.write_text(yaml.safe_dump({**settings, "use_cpu": True, "bf16": False}))
    for words in (["a,b"], ["a", "b"], ["a,", "b"]):
        given = ["--reward_funcs", *words, "--reward_weights", "1.0,0.5", "--values_servers=http://a:1,http://b:2"]
        found = parse_recipe([str(path), *given])
        assert found.run.reward_funcs == ["a", "b"]
        assert found.args.reward_weights == [1.0, 0.5]
        assert found.run.values_servers == ["http://a:1", "http://b:2"]
        assert found.resolved["reward_funcs"] == ["a", "b"]
    text = r"^(?!.*head).{1,2}_proj$"
    assert parse_recipe([str(path), "--lora_target_modules", text]).model.lora_target_modules in (text, [text])


def test_prompts_are_padded_and_cut_on_the_left(parsed, tiny_path, tmp_path):
    recipe = parsed()
    _, tokenizer = load_config_and_tokenizer(recipe.model, recipe.args)
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
    folder, unpadded = tmp_path / "unpadded", tiny_tokenizer()
    unpadded.pad_token = None
    unpadded.save_pretrained(folder)
    (folder / "config.json").write_text((Path(tiny_path) / "config.json").read_text())
    recipe = parsed(model_name_or_path=str(folder))
    (folder / "model.safetensors").write_bytes((Path(tiny_path) / "model.safetensors").read_bytes())
    _, tokenizer = load_config_and_tokenizer(recipe.model, recipe.args)
    assert tokenizer.pad_token == tokenizer.eos_token is not None


def test_columns_that_the_run_reads_are_kept(parsed):
    tokenizer = tiny_tokenizer()
    assert "level" in load_training_data(parsed(), tokenizer).column_names
    only = {"keep_columns": ["answer"]}
    assert "level" not in load_training_data(parsed(**only), tokenizer).column_names
    assert "level" in load_training_data(parsed(**only, difficulty_column="level"), tokenizer).column_names
    gym = {"dataset_name": "reasoning_gym:chain_sum", "dataset_kwargs": {"size": 5, "seed": 0}}
    scored = parsed(**gym, reward_funcs=["reasoning_gym"])
    assert GYM_COLUMN in load_training_data(scored, tokenizer).column_names


def test_what_training_is_measured_on(parsed, tmp_path):
    tokenizer = tiny_tokenizer()
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps([{"problem": f"{i} - 1 =", "answer": i - 1} for i in range(8)]))
    with pytest.raises(ValueError, match="eval_benchmarks needs eval_strategy"):
        load_eval_data(parsed(eval_benchmarks=[str(mine)]), tokenizer)
    with pytest.raises(ValueError, match="eval_on_start needs eval_strategy"):
        load_eval_data(parsed(test_fraction=0.3, eval_on_start=True), tokenizer)
    assert load_eval_data(parsed(test_fraction=0.3), tokenizer) is None
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "test_fraction": 0.3, "eval_on_start": True}
    held_out = load_eval_data(parsed(**evaluated), tokenizer)
    trained = load_training_data(parsed(**evaluated), tokenizer)
    assert not set(held_out["prompt_id"]) & set(trained["prompt_id"])
    assert len(held_out) + len(trained) == 30
    sets = load_eval_data(parsed(**evaluated, eval_benchmarks=[str(mine)], max_eval_samples=3), tokenizer)
    assert {name: len(each) for name, each in sets.items()} == {"mine": 3, "held_out": len(held_out)}
    assert sets["held_out"]["prompt_id"] == held_out["prompt_id"]
    (tmp_path / "other").mkdir()
    twice = [str(mine), shutil.copy(mine, tmp_path / "other")]
    for files in (twice, [shutil.copy(mine, tmp_path / "held_out.json")]):
        with pytest.raises(ValueError, match="is the name of two sets"):
            load_eval_data(parsed(**evaluated, eval_benchmarks=list(map(str, files))), tokenizer)


def test_the_recipe_that_is_saved_holds_the_template_and_names_all_files(parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("turn.jinja").write_text("{{ prompt }}!")
    files = [str(tmp_path / "rows.jsonl"), "more.jsonl"]
    Path("more.jsonl").write_text('{"question": "1 + 99 =", "answer": "100", "level": "level 0"}')
    recipe = parsed(prompt_template="turn.jinja", dataset_name=files)
    assert recipe.resolved["prompt_template"] == "{{ prompt }}!"
    _, tokenizer = load_config_and_tokenizer(recipe.model, recipe.args)
    loaded = load_training_data(recipe, tokenizer)
    assert (len(loaded), loaded[30]["prompt"][0]["content"]) == (31, "1 + 99 =!")


def test_what_the_model_is_loaded_with_and_its_token_is_not_saved(parsed):
    found = model_init_kwargs(parsed(dtype="bfloat16", model_init_kwargs={"revision": "r", "variant": "v"}))
    assert found == {"revision": "r", "attn_implementation": None, "dtype": "bfloat16", "variant": "v"}
    assert model_init_kwargs(parsed("--model_init_kwargs", '{"variant": "w"}'))["variant"] == "w"
    given = {"model_init_kwargs": {"token": "hf_secretsecretsecret", "attn_implementation": "sdpa"}}
    assert "hf_secret" not in json.dumps(parsed("--hub_token", "hf_secret", **given).resolved)


def test_what_the_trainer_is_built_with(parsed, monkeypatch):
    monkeypatch.setattr("basis_rl.recipe.build.BasisTrainer", lambda model, plan: plan)
    plain = build_trainer(parsed(baseline="rloo"))
    assert isinstance(plain.baseline, Rloo)
    assert (plain.kwargs["peft_config"], plain.eval_dataset, plain.tools) == (None, None, [])
    named = {"objective": "gspo", "use_peft": True, "lora_r": 4, "test_fraction": 0.3}
    found = build_trainer(parsed(**named, baseline="rloo", eval_strategy="steps", eval_steps=1))
    assert (found.objective, found.kwargs["peft_config"].r) == (OBJECTIVES["gspo"], 4)
    assert len(found.train_dataset) + len(found.eval_dataset) == len(plain.train_dataset) == 30
    assert [reward.__name__ for reward in found.reward_funcs] == ["parity_reward"]
    assert [tool.__name__ for tool in plan_recipe(parsed(tools=["calculator"])).tools] == ["calculator"]


def test_the_server_of_a_recipe(parsed, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    given = {"serve_devices": "1", "serve_args": "--a 1 --b 'x y'", "vllm_max_model_length": 99}
    found = server_options(parsed(**given, model_revision="abc", seed=7), 8123, tmp_path / "log")
    assert (found.port, found.devices, found.max_model_len) == (8123, "1", 99)
    assert found.extra == ["--seed", "7", "--a", "1", "--b", "x y"], "the last one counts"
    assert (found.revision, found.dtype) == ("abc", "float32")
    assert server_options(parsed(dtype="float16"), 1, tmp_path / "log").dtype == "float16"
    assert found.max_lora_rank is None
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_lora_sync": "adapter", "use_peft": True, "lora_r": 12}
    assert server_options(parsed(**served), 1, tmp_path / "log").max_lora_rank == 12
    assert server_options(parsed(model_revision="main"), 1, tmp_path / "log").revision is None
    low = parsed()
    low.args.bf16 = True
    assert server_options(low, 1, tmp_path / "log").dtype == "bfloat16"
