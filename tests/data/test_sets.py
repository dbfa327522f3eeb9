"""The sets of mathematics as they are: the real files beside the project, and rows shaped like those on the Hub."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from basis_rl.data import DataArguments, load_prompts, prompt_id
from basis_rl.data.rows import bare_problem, gold_text

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def raw(path):
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def load(name, conversational=True, **settings):
    return load_prompts(DataArguments(dataset_name=str(name), **settings), conversational=conversational)


# The file, settings that it needs, its column of problems, and the gold of a row by a rule of the test's own.
FILES = {
    "gsm8k_train.jsonl": ({}, "question", lambda row: row["answer"].split("####")[1].strip()),
    "gsm8k_test.jsonl": ({}, "question", lambda row: row["answer"].split("####")[1].strip()),
    "math_train.json": ({"on_missing_gold": "drop"}, "problem", lambda row: row["answer"]),
    "math500.jsonl": ({}, "problem", lambda row: row["answer"]),
    "aime24.jsonl": ({}, "problem", lambda row: row["answer"]),
    "aime25.jsonl": ({}, "prompt", lambda row: str(row["answer"])),
    "amc23.jsonl": ({}, "problem", lambda row: f"{row['answer']:.0f}"),
    "minerva_math.jsonl": ({}, "problem", lambda row: row["solution"]),
    "olympiadbench.jsonl": ({}, "question", lambda row: ", ".join(row["final_answer"])),
}


@pytest.mark.parametrize("file", FILES)
def test_real_files_load_as_they_are(file, shared_data):
    settings, column, gold = FILES[file]
    rows = [row for row in raw(shared_data / file) if gold(row) is not None]
    dataset = load(shared_data / file, prompt_template=f"{{prompt}}\n\n{BOXED}", **settings)
    first = {}
    for row in rows:
        first.setdefault(row[column].removesuffix(BOXED).strip(), row)
    assert len(dataset) == len(first)
    for row, (problem, raw_row) in zip(dataset, first.items(), strict=True):
        assert row["prompt"] == [{"role": "user", "content": f"{problem}\n\n{BOXED}"}]
        assert row["solution"] == gold(raw_row)
        assert row["prompt_id"] == prompt_id(problem, {"solution": gold(raw_row)})
        beside = raw_row.keys() - {"prompt", "solution", "prompt_id", "image", "images"}
        assert {name: row[name] for name in beside} == {name: raw_row[name] for name in beside}
    untouched = load(shared_data / file, **settings)
    assert untouched["prompt_id"] == dataset["prompt_id"]
    assert list(untouched["prompt"]) == [row[column] for row in first.values()]


def hub(monkeypatch, rows, **settings):
    """What `load_prompts` makes of a Hub set with these rows, as a list; the id and split that it asked for."""
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_list(rows)

    monkeypatch.setattr("basis_rl.data.prompts.load_dataset", load_dataset)
    dataset = load("owner/set", conversational=False, prompt_template="{prompt}", **settings)
    assert asked == [(("owner/set", settings.get("dataset_config")), {"split": "train"})]
    return [(row["prompt"], row["solution"]) for row in dataset]


SHAPES = CASES["shapes"]


@pytest.mark.parametrize("name", SHAPES)
def test_hub_schemas_are_read_as_documented(name, monkeypatch):
    assert hub(monkeypatch, [SHAPES[name]]) == [("P", "33")]


def test_the_id_is_the_same_whichever_template_a_set_carries():
    plain = "Find $x$ if $x + 1 = 2$."
    carried = [
        f"{plain}\n{BOXED}",
        DAPO.format(plain),
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": DAPO.format(plain)}],
        [{"role": "user", "content": [{"type": "text", "text": plain}]}],
        f"{plain} Let's think step by step and output the final answer within \\boxed{{}}.",
    ]
    assert {prompt_id(bare_problem(value)) for value in carried} == {prompt_id(plain)}
    assert bare_problem(carried[0], strip_instructions=False) == carried[0]
    inside = f"Somebody says: '{BOXED}' How many words is that?"
    assert bare_problem(inside) == inside


@pytest.mark.parametrize("value", [None, 3, "", [], ["a"], [{"role": "system", "content": "a"}]])
def test_what_is_no_problem_is_none(value):
    assert bare_problem(value) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["2", "3"], "2, 3"),
        ([27.0], "27"),
        (0.5, "0.5"),
        (7, "7"),
        ("a\n#### 1,000\n", "1,000"),
        ("#### 5", "5"),
        ("#### Step 1\nIt is \\boxed{4}", "#### Step 1\nIt is \\boxed{4}"),
        (None, None),
        ([], None),
        (["1", None], None),
        # A key that another row has is None here; an order of keys is as good as another, but stays.
        ({"name": "Zoë", "age": 20.0, "other": None}, '{"name": "Zoë", "age": 20}'),
        ([{"a": [1, None]}, {"b": True}], '[{"a": [1, null]}, {"b": true}]'),
        (float("nan"), None),
    ],
)
def test_golds_become_text(value, text):
    assert gold_text(value) == text
