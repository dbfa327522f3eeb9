"""The starting recipe is in order as it is written, and `--accelerate_config NAME` starts accelerate."""

import json
import sys

import pytest

from basis_rl import names, resources
from basis_rl.cli import main as cli
from basis_rl.cli.main import main
from basis_rl.data import DataArguments, load_prompts
from basis_rl.recipe.build import load_config_and_tokenizer, load_training_data
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.words import read_recipe


def problems(folder):
    rows = [{"prompt": f"What is {i} + {i % 7}?", "solution": str(i + i % 7)} for i in range(300)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def init(tmp_path, tiny_path, monkeypatch):
    """Writes a recipe for rows by `basis-rl init`; returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(rows, *more):
        """Rows, or the name of a data set."""
        if isinstance(rows, str):
            more = (*more, "--data", rows)
            rows = []
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return main(["init", "new.yaml", "--force", "--model", str(tiny_path), "--data", "own.jsonl", "--cpu", *more])

    return run


def loaded():
    """The problems of the recipe that was written."""
    recipe = parse_recipe(["new.yaml"])
    return load_training_data(recipe, load_config_and_tokenizer(recipe.model, recipe.args)[1])


def test_the_recipe_passes_the_check(tmp_path, tiny_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    problems(tmp_path)
    written = ["init", "mine/new.yaml", "--model", str(tiny_path), "--data", "sums.jsonl", "--cpu"]
    assert main(written) == 0
    assert "basis-rl check mine/new.yaml" in capsys.readouterr().out
    recipe = parse_recipe(["mine/new.yaml"])
    assert recipe.args.output_dir == "runs/new"
    assert (recipe.run.baseline, recipe.args.num_generations, recipe.args.use_cpu) == ("basis_history", 1, True)
    assert main(["check", "mine/new.yaml", "--strict"]) == 0, capsys.readouterr().err
    assert "The recipe is in order." in capsys.readouterr().out


SUMS = [{"instruction": f"What is {i} + 1?", "expected_answer": i + 1} for i in range(120)]
CHATS = [
    {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i}?"}],
        "answer": None if i == 3 else "" if i == 4 else str(i),
    }
    for i in range(200)
]


@pytest.mark.parametrize(
    ("rows", "written"),
    [
        (SUMS, {"prompt_column": "instruction", "solution_column": "expected_answer", "test_fraction": 0.05}),
        (SUMS[:3], {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1, "test_fraction": None}),
        (CHATS, {"on_missing_gold": "drop", "on_invalid_gold": "drop", "prompt_template": None}),
    ],
)
def test_a_new_recipe_fits_the_data_that_it_is_given(rows, written, tmp_path, capsys, init):
    assert init(rows) == 0
    keys = read_recipe("new.yaml")
    assert {key: keys.get(key) for key in written} == written
    assert f"# {len(rows)} rows, whose prompts are" in (tmp_path / "new.yaml").read_text()
    assert main(["check", "new.yaml"]) == 0, capsys.readouterr().err
    if rows is CHATS:
        assert capsys.readouterr().out.count("Add.") == 3, "the system message of the three prompts that are shown"


SUMS_NAMED = [{"prompt": row["instruction"], "solution": str(row["expected_answer"])} for row in SUMS]
LETTERS = [{"question": f"{i}+1? A) {i} B) {i + 1}", "answer": "B" if i % 3 else "(A)"} for i in range(30)]
ASSERTS = [
    {"prompt": f"Write f(n), n plus {i}.", "test_list": [f"assert f(1) == {i + 1}", f"assert f(2) == {i + 2}"]}
    for i in range(30)
]
ONE_TEXT = [{"prompt": row["prompt"], "tests": "\n".join(row["test_list"])} for row in ASSERTS]
CHECKS = [
    {"prompt": f"def f{i}(n):", "entry_point": f"f{i}", "canonical_solution": "return n",
     "test": f"def check(candidate):\n    assert candidate(1) == {i}\n"}
    for i in range(30)
]  # fmt: skip
WORDS = [{"prompt": f"The capital of land {i}?", "answer": f"Town {'abcdefghij'[i % 10]}"} for i in range(30)]
LONG = [{**row, "answer": "United States of America"} if i == 3 else row for i, row in enumerate(WORDS)]
WORKED = [
    {"problem": f"{i} + 1?", "solution": rf"We add one to the number, so it is $\boxed{{{i + 1}}}$."} for i in range(30)
]
TOLD = [{**row, "prompt": f"{row['prompt']} Answer with only one name."} for row in WORDS]
TAGS = [{**row, "prompt": f"{row['prompt']} Put it into <answer></answer>."} for row in WORDS]
LAST = [{**row, "prompt": f"{row['prompt']} Think, then give your final answer."} for row in WORDS]
ALIASES = [{**row, "answer": [row["answer"], f"City {row['answer']}"][: 1 + i % 4]} for i, row in enumerate(WORDS)]
BOXES = [{"prompt": f"Put {i} + 1 into \\boxed{{}}.", "answer": str(i + 1)} for i in range(30)]


@pytest.mark.parametrize(
    ("rows", "reward", "kwargs", "asks"),
    [
        (LETTERS, "choice", None, "letter"),
        (ASSERTS, "code", {"column": "test_list"}, "Python"),
        (CHECKS, "code", {"column": "test", "fn_name": "entry_point"}, "Python"),
        (ONE_TEXT, "code", {"column": "tests"}, "Python"),
        (WORDS, "exact", None, "boxed"),
        (LONG, "exact", None, "boxed"),
        # What these ask for is what is read; of a final answer in no place, a box is asked for.
        (TOLD, "exact", {"answer_in": "whole"}, "{prompt}"),
        (TAGS, "exact", {"answer_in": "tag"}, "{prompt}"),
        (LAST, "exact", None, "boxed"),
        (ALIASES, "exact", None, "boxed"),
        (WORKED, "math_verify", None, "boxed"),
        # They ask for a box by themselves; a template puts them into the chat template.
        (BOXES, "math_verify", None, "{prompt}"),
    ],
)
def test_the_reward_is_one_that_can_find_the_golds_right(rows, reward, kwargs, asks, init):
    assert init(rows) == 0
    keys = read_recipe("new.yaml")
    assert (keys["reward_funcs"], keys.get("reward_kwargs")) == ([reward], kwargs)
    assert asks in keys["prompt_template"]
    assert (keys["prompt_template"] == "{prompt}") == (asks == "{prompt}")
    assert main(["check", "new.yaml", "--strict", "--max_completion_length", "32"]) == 0


ALPACA = [{"instruction": "Add.", "input": f"{i} and 1", "output": str(i + 1)} for i in range(30)]
PASSAGES = [
    {"question": "Which town?", "passage": f"In {i} it was {row['answer']}.", **row} for i, row in enumerate(WORDS)
]
HELD = [{**row, "question": f"{row['passage']} Which town?"} for row in PASSAGES]


@pytest.mark.parametrize(
    ("rows", "column"),
    [(ALPACA, "input"), ([{**row, "prompt": "Which town?"} for row in PASSAGES], "passage"), (HELD, None)],
)
def test_a_text_that_belongs_to_the_problem_is_put_before_it_unless_it_is_there(rows, column, init):
    rows = [{key: cell for key, cell in row.items() if key != "prompt"} for row in rows] if rows is HELD else rows
    assert init(rows) == 0
    assert read_recipe("new.yaml").get("context_column") == column
    found = loaded()
    assert len(found) > 25
    assert "\n" not in found.info.description
    text = rows[0][column or "passage"]
    assert found[0]["prompt"][0]["content"].count(text) == 1


@pytest.mark.parametrize(
    ("golds", "read"),
    [
        (["George Orwell", "Orwell"], ["George Orwell", "Orwell"]),
        # All roots are asked for, and all letters; records are one answer.
        (["3", "-2"], "3, -2"),
        (["A", "C"], "A, C"),
        ([{"name": "Orwell"}, {"name": "Blair"}], '[{"name": "Orwell"}, {"name": "Blair"}]'),
    ],
)
def test_of_a_list_of_names_any_is_right_and_of_numbers_all(golds, read, init):
    assert init([{"question": f"Which {i}?", "answer": golds} for i in range(30)], "--reward_funcs", "exact") == 0
    assert read_recipe("new.yaml").get("solution_list") == ("any" if read == golds else None)
    assert loaded()[0]["solution"] == read


def test_texts_in_a_chat_template_are_left_as_they_are(init):
    prompt = "<|im_start|>user\n{} + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert init([{"prompt": prompt.format(i), "answer": i + 1} for i in range(30)]) == 0
    assert "prompt_template" not in read_recipe("new.yaml")
    assert loaded()[0]["prompt"] == prompt.format(0)


def add_one(i):
    return [f"assert plus_one({i + k}) == {i + k + 1}" for k in range(2)]


MBPP = [{"text": f"Write a function that adds one, by way {i}.", "test_list": add_one(i)} for i in range(30)]
IN_TEXT = [{**row, "test_list": "import math\n" + "\n".join(row["test_list"])} for row in MBPP]
SOURCES = [{**row, "test_list": "def test_it():\n    " + row["test_list"][0]} for row in MBPP]
ONE = [
    {"text": row["text"] + " Name it plus_one." * (i % 3 == 0), "test_list": row["test_list"][:1]}
    for i, row in enumerate(MBPP)
]
NAMED = [{**row, "text": f"{row['text']} It is called plus_one."} for row in MBPP]


@pytest.mark.parametrize(
    ("rows", "shown"),
    [(SOURCES, ""), (MBPP, "assert plus_one(0) == 1"), (IN_TEXT, "import math\nassert plus_one(0) == 1"), (NAMED, "")],
)
def test_the_first_test_is_shown_where_problems_do_not_name_the_function(rows, shown, init):
    """Two rows of these have no tests, or no problem, as in data of people."""
    rows = [*rows[:3], {**rows[3], "test_list": rows[3]["test_list"][:0]}, {**rows[4], "text": ""}, *rows[5:]]
    assert init(rows) == 0
    assert read_recipe("new.yaml")["reward_funcs"] == ["code"]
    (turn,) = next(row["prompt"] for row in loaded() if "by way 0." in row["prompt"][0]["content"])
    assert turn["content"].partition("and others:\n\n")[2] == shown
    assert "== 2" not in turn["content"], "the second test"


def test_the_only_test_of_a_row_is_shown_where_it_alone_names_the_function(init):
    assert init(ONE) == 0
    turns = [turn["content"] for (turn,) in loaded()["prompt"]]
    assert {"Name it" in turn for turn in turns} == {True, False}
    assert ["assert plus_one" in turn for turn in turns] == ["Name it" not in turn for turn in turns]


@pytest.mark.parametrize("few", [False, True])
def test_golds_that_are_missing_are_dropped_on_either_side_and_told_once(few, tmp_path, caplog, init):
    held = DataArguments("all.jsonl", test_fraction=0.05)
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS_NAMED))
    first = load_prompts(held, conversational=True, held_out=True)["prompt"][0]
    rows = SUMS_NAMED[:4] if few else SUMS_NAMED
    without = rows[1]["prompt"] if few else first
    rows = [{**row, "solution": None} if row["prompt"] == without else row for row in rows]
    assert init(rows) == 0
    assert read_recipe("new.yaml")["on_missing_gold"] == "drop"
    assert caplog.text.count("left out 1") == 1
    assert ("held-out" in caplog.text) != few


def test_a_judge_has_an_address_to_fill_in(init):
    for gold in ({}, {"answer": "so"}):
        rows = [{"prompt": f"POST: it was {i}.", **gold} for i in range(60)]
        assert init(rows, "--reward_funcs", "judge") == 0
        keys = read_recipe("new.yaml")
        # With a gold the judge's own question compares with it.
        assert ("rubric" in keys["reward_kwargs"]) == (not gold)
        assert keys["reward_kwargs"]["base_url"].startswith("http")


FOUR = ["one", "two", "three", "four"]
MMLU = [{"question": f"Which is {i}?", "choices": FOUR, "answer": i % 4} for i in range(30)]
ARC = [
    {"question": f"Which is {i}?", "choices": {"text": FOUR, "label": labels}, "answerKey": labels[i % 4]}
    for i in range(30)
    for labels in [list("ABCD") if i % 2 else list("1234")]
]
COLUMNS = [
    {"question": f"Which is {i}?", **dict(zip("ABCD", FOUR, strict=True)), "answer": "ABCD"[i % 4]} for i in range(30)
]
PAIRS = [{"sentence": f"_ is {i}.", "option1": "it", "option2": "she", "answer": str(1 + i % 2)} for i in range(30)]
TEXTS = [{"question": f"Which is {i}?", "options": FOUR, "answer": FOUR[i % 4]} for i in range(30)]


def test_an_empty_line_of_a_table_hides_no_options(tmp_path):
    path = tmp_path / "own.csv"
    lines = [f"Which is {i}?;one;two;three;;{'aBC'[i % 3]}\n" for i in range(30)]
    path.write_text("".join(["question;A;B;C;D;correct\n", *lines, ";;;;;\n"]))
    assert main(["init", str(tmp_path / "new.yaml"), "--data", str(path), "--cpu"]) == 0
    data = parse_recipe([str(tmp_path / "new.yaml")]).data
    assert (data.choices_column, data.solution_column) == ("A, B, C, D", "correct")


@pytest.mark.parametrize(
    ("rows", "columns", "gold"),
    [(MMLU, "choices", "answer"), (ARC, "choices", "answerKey"), (COLUMNS, "A, B, C, D", "answer"),
     (PAIRS, "option1, option2", "answer"), (TEXTS, "options", "answer")],
)  # fmt: skip
def test_options_of_every_form_reach_the_prompt_and_golds_are_letters(rows, columns, gold, capsys, init):
    assert init(rows) == 0
    recipe = parse_recipe(["new.yaml"])
    assert recipe.run.reward_funcs == ["choice"]
    assert (recipe.data.choices_column, recipe.data.solution_column) == (columns, gold)
    for row in loaded():
        right = "ABCD".index(row["solution"])
        number = int("".join(filter(str.isdigit, row.get("question") or row["sentence"])))
        assert right == number % (2 if rows is PAIRS else 4)
        line = f"{row['solution']}. {['it', 'she'][right] if rows is PAIRS else FOUR[right]}\n"
        assert line in row["prompt"][-1]["content"]
    if rows is MMLU:
        short = ["--max_completion_length", "32"]
        assert main(["check", "new.yaml", "--strict", *short]) == 0
        capsys.readouterr()
        # Without their options the letters mean nothing.
        bare = ["--prompt_template", "{prompt} Answer with A, B, C or D.", "--choices_column", ""]
        assert main(["check", "new.yaml", *short, *bare, "--reward_kwargs.gold_index", "0"]) == 2
        assert "prompts show no options" in capsys.readouterr().err


def test_without_a_gold_a_reward_that_reads_none_is_taken(tmp_path, monkeypatch, capsys, init):
    """TRL's first example: tldr, and a function of the length alone."""
    monkeypatch.delitem(sys.modules, "my_length", raising=False)
    rows = [{"prompt": f"POST: it was {i}.\n\nTL;DR:", "completion": "so"} for i in range(60)]
    (tmp_path / "my_length.py").write_text(
        "def reward_len(completions, **kwargs):\n    return [-abs(20.0 - len(str(each))) for each in completions]\n"
        "def equal(completions, solution, **kwargs):\n    return [float(each in solution) for each in completions]\n"
    )
    for reads in ([], ["--reward_funcs", "my_length.equal"]):
        assert init(rows, *reads) == 2
        assert "say which one with solution_column" in capsys.readouterr().err
    assert init(rows, "--reward_funcs", "my_length.reward_len") == 0
    keys = read_recipe("new.yaml")
    assert keys["prompt_template"] == "{prompt}"
    assert "solution_column" not in keys
    short = ["--max_completion_length", "8", "--max_steps", "1", "--per_device_train_batch_size", "2"]
    assert main(["train", "new.yaml", *short, "--gradient_accumulation_steps", "1", "--eval_strategy", "no"]) == 0
    said = capsys.readouterr()
    assert "no gold, which no reward function reads" in said.err
    assert "chat template" not in said.err
    assert main(["check", "new.yaml", *short, "--prompt_template", "none"]) == 0
    assert "without the chat template that the model has" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["knights_knaves", "word_ladder"])
def test_a_set_with_a_scorer_of_its_own_is_scored_by_it(name, init):
    pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
    assert init(f"reasoning_gym:{name}") == 0
    assert read_recipe("new.yaml")["reward_funcs"] == ["reasoning_gym"]


def test_sentences_are_refused_unless_a_reward_is_named(tmp_path, monkeypatch, capsys, init):
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    told = [
        {"prompt": f"Why is {i}?", "answer": f"It is so since nobody of {'abcdefghij'[i % 10]} says otherwise."}
        for i in range(30)
    ]
    assert init(told) == 2
    said = capsys.readouterr().err
    assert "my_reward.py" in said
    assert not (tmp_path / "new.yaml").exists()
    (tmp_path / "my_reward.py").write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    assert init(told, "--reward_funcs", "my_reward.score") == 0
    assert main(["check", "new.yaml", "--max_completion_length", "32"]) == 0
    capsys.readouterr()
    # As a recipe of mathematics the same data is refused, with the way out.
    assert main(["check", "new.yaml", "--reward_funcs", "math_verify", "--max_completion_length", "32"]) == 2
    assert "exact" in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "column"), [(ASSERTS, "test_list"), (CHECKS, "test")])
def test_code_without_the_column_or_the_function_s_name_is_refused(rows, column, capsys, init):
    assert init(rows) == 0
    capsys.readouterr()
    assert main(["check", "new.yaml", "--max_completion_length", "32", "--reward_kwargs", "{}"]) == 2
    said = capsys.readouterr().err
    assert "of 30 golds" in said or "of 29 golds" in said or "of 28 golds" in said, said
    assert f"column: {column}" in said


def test_data_that_a_recipe_cannot_be_written_for_is_refused(tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text('{"a": "b", "c": "d"}\n')
    assert main(["init", str(tmp_path / "new.yaml"), "--data", str(tmp_path / "own.jsonl")]) == 2
    assert "only ['a', 'c']; say which one with prompt_column" in capsys.readouterr().err
    assert not (tmp_path / "new.yaml").exists()


def test_without_a_model_and_data_there_are_examples(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    assert main(["init", str(file)]) == 0
    keys = read_recipe(str(file))
    assert (keys["model_name_or_path"], keys["dataset_name"]) == ("Qwen/Qwen3-0.6B", "openai/gsm8k")
    assert (keys["dataset_config"], keys["bf16"]) == ("main", True)
    assert "use_cpu" not in keys
    assert main(["init", str(file), "--cpu"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["init", str(file), "--cpu", "--force", "--model", 'a "b": #c']) == 0
    assert (read_recipe(str(file))["model_name_or_path"], read_recipe(str(file))["use_cpu"]) == ('a "b": #c', True)


def test_a_shipped_recipe_is_copied(tmp_path, capsys):
    file = tmp_path / "copy.yaml"
    assert main(["init", str(file), "--recipe", "papers/basis-qwen3-4b"]) == 0
    assert file.read_text() == resources.recipe("papers/basis-qwen3-4b").read_text()
    assert main(["init", str(file), "--force", "--recipe", "papers/basis-qwen3-4b", "--model", "m"]) == 2
    assert "leave out --model_name_or_path" in capsys.readouterr().err


def test_a_named_configuration_becomes_accelerate_launch(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    called = []
    monkeypatch.setattr(cli.os, "execv", lambda program, words: called.append(words))
    words = ["r.yaml", "--accelerate_config", "cpu", "--num_processes=2", "--learning_rate", "1e-5"]
    cli.launch_training(words)
    start = [sys.executable, "-m", "accelerate.commands.launch"]
    start += ["--config_file", str(resources.accelerate_config("cpu"))]
    rest = ["-m", "basis_rl", "train", "r.yaml", "--learning_rate", "1e-5"]
    assert called == [[*start, "--num_processes", "2", *rest]]
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs deepspeed.*'basis-rl\[deepspeed\]'"):
        cli.launch_command(["r.yaml", "--accelerate_config", "zero3"])
    with pytest.raises(ValueError, match="--accelerate_config needs a value"):
        cli.launch_command(["r.yaml", "--accelerate_config"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="leave one of the two out"):
        cli.launch_command(words)
    assert len(called) == 1


@pytest.mark.long
def test_two_processes_by_name(tmp_path, tiny_path, monkeypatch):
    import os
    import subprocess

    problems(tmp_path)
    monkeypatch.chdir(tmp_path)
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    basis_rl = [sys.executable, "-m", "basis_rl"]
    assert main(["init", str(tmp_path / "r.yaml"), "--model", str(tiny_path), "--data", "sums.jsonl", "--cpu"]) == 0
    short = ["--max_steps", "2", "--gradient_accumulation_steps", "1", "--max_completion_length", "8"]
    short += ["--eval_strategy", "no", "--accelerate_config", "cpu", "--main_process_port", "0"]
    command = [*basis_rl, "train", "r.yaml", *short]
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("== Summary") == 1
    last = json.loads((tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["num_rollouts"] == 2 * 8 * 2
