"""Datasets in: columns, templates, ids, hold-out, and what a wrong one is answered with."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from basis_rl.data import DataArguments, load_prompts, problem_text, prompt_id
from basis_rl.data.files import load_files
from basis_rl.rewards import MathVerifyReward

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"It is\n#### {2 * i}"} for i in range(60)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*ROWS, ROWS[0]]))
    return str(path)


def load(path, conversational=True, held_out=False, **settings):
    return load_prompts(DataArguments(dataset_name=path, **settings), conversational=conversational, held_out=held_out)


def test_columns_are_found_and_duplicates_dropped(path):
    dataset = load(path, solution_pattern=r"####\s*(.+)", prompt_template="{prompt} Why?")
    assert len(dataset) == 60
    assert dataset[3]["solution"] == "6"
    assert list(dataset["prompt_id"]) == list(dict.fromkeys(dataset["prompt_id"]))
    (message,) = dataset[3]["prompt"]
    assert message == {"role": "user", "content": "What is 3 + 3? Why?"}
    assert dataset[3]["answer"] == "It is\n#### 6"


def test_the_id_is_a_hash_of_the_bare_problem_and_its_gold(path):
    plain = load(path, conversational=False, prompt_template="{prompt}")
    chat = load(path, prompt_template="Q: {prompt}", system_prompt="Be brief.")
    assert plain["prompt_id"] == chat["prompt_id"]
    assert plain[0]["prompt_id"] == prompt_id("  What is 0 + 0?\n", {"solution": "0"})
    assert chat[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert load(path, conversational=False, system_prompt="Be brief.")[0]["prompt"].startswith("Be brief.\n\nWhat is 0")
    assert prompt_id(" one \n") == hashlib.sha256(b"one").hexdigest()[:16]
    one, two = [{"role": "user", "content": "x"}], [{"content": "x", "role": "user"}]
    assert prompt_id(one) == prompt_id(two) != prompt_id([{"role": "system", "content": "x"}])


def write(tmp_path, rows):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_kept_columns_and_limits_are_those_of_the_row(tmp_path):
    rows = [
        {"problem": f"p{i // 2}", "answer": i // 2, "level": f"level {i}", "before": f" It is {i}. "} for i in range(10)
    ]
    rows[1]["before"] = None
    path = write(tmp_path, rows)
    kept = load(path, keep_columns=["level"], max_train_samples=3)
    assert list(kept["level"]) == ["level 0", "level 2", "level 4"]
    both = [load(path, keep_columns=["level"], test_fraction=0.4, held_out=held_out) for held_out in (False, True)]
    for row in [*both[0], *both[1]]:
        assert row["level"] == f"level {2 * int(row['solution'])}"
    for template in ({}, {"prompt_template": "{prompt}"}):
        told = load(path, conversational=False, context_column="before", max_train_samples=2, **template)
        assert list(told["prompt"]) == ["It is 0.\n\np0", "p0"]


def test_every_column_is_kept_as_it_is_without_another_id(tmp_path):
    rows = [
        {
            "problem": f"p{i}",
            "answer": i,
            "solution": "so",
            "level": {"name": f"l{i}", "tests": [i]},
            "prompt_id": "own",
            "image": "a.png",
            "completions": "TRL's name",
        }
        for i in range(12)
    ]
    path = write(tmp_path, rows)
    found = load(path, test_fraction=0.5)
    assert set(found.column_names) == {"prompt", "problem", "answer", "solution", "level", "prompt_id"}
    assert {row["problem"] for row in found} < {row["problem"] for row in rows}
    for row in found:
        i = int(row["problem"][1:])
        assert (row["answer"], row["level"], row["solution"]) == (i, rows[i]["level"], str(i))
        assert row["prompt_id"] == prompt_id(f"p{i}", {"solution": str(i)})
    assert set(load(path, keep_columns=["level"]).column_names) == {"prompt", "solution", "prompt_id", "level"}
    assert load(path, keep_columns=["image"])["image"][0] == "a.png"


SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": " What is 1? "}
TURNS = [USER, {"role": "assistant", "content": "1."}, {"role": "user", "content": "And 2?"}]


@pytest.mark.parametrize("conversational", [True, False])
@pytest.mark.parametrize("prompt", [" What is\n1? ", [USER], [SYSTEM, USER], TURNS, [SYSTEM, *TURNS]])
def test_prompts_are_what_the_dataset_has(prompt, conversational, tmp_path):
    path = write(tmp_path, [{"prompt": prompt, "answer": "1"}])
    found = load(path, conversational)
    assert found[0]["prompt"] == prompt
    assert "as the dataset has them" in found.info.description


def test_template_and_system_prompt_are_added_where_they_are_asked_for(tmp_path):
    def asked(prompt, conversational=True, **settings):
        found = load(write(tmp_path, [{"prompt": prompt, "answer": "1"}]), conversational, **settings)
        assert all(key in found.info.description for key in settings)
        return found[0]["prompt"]

    own = {"role": "system", "content": "Own."}
    assert asked("P", system_prompt="Own.") == [own, {"role": "user", "content": "P"}]
    assert asked([SYSTEM, USER], system_prompt="Own.") == [own, USER]
    assert asked([SYSTEM, *TURNS], prompt_template="Q: {prompt}") == [
        SYSTEM,
        *TURNS[:2],
        {"role": "user", "content": "Q: And 2?"},
    ]
    assert asked([SYSTEM, USER], False, prompt_template="Q: {prompt}") == "Be kind.\n\nQ: What is 1?"
    with pytest.raises(ValueError, match="several turns is no text"):
        asked(TURNS, False, prompt_template="{prompt}")


def test_a_row_with_the_text_of_another_and_another_prompt_is_a_problem_of_its_own(tmp_path):
    other = {"role": "system", "content": "Be brief."}
    prompts = [[USER], [SYSTEM, USER], [other, USER], [SYSTEM, USER], TURNS]
    path = write(tmp_path, [{"prompt": prompt, "answer": "1"} for prompt in prompts])
    found = load(path)
    assert list(found["prompt"]) == [prompts[i] for i in (0, 1, 2, 4)]
    gold = {"solution": "1"}
    assert found[0]["prompt_id"] == prompt_id("What is 1?", gold), "as ever"
    assert list(found["prompt_id"])[1:] == [prompt_id(prompts[i], gold) for i in (1, 2, 4)]
    assert len(load(path, system_prompt="One for all.")) == 2


@pytest.mark.parametrize(
    ("rows", "golds"),
    [
        (
            [{"problem": "p", "answer": 1.0}, {"problem": " p ", "answer": 1.0}, {"problem": "q", "answer": 3.5}],
            ["1", "3.5"],
        ),
        ([{"problem": r"Find $\frac{1}{2} + \{x\}$ {prompt}", "solution": "long", "answer": "7"}], ["7"]),
    ],
)
@pytest.mark.parametrize("parquet", [True, False])
def test_the_first_of_equal_problems_stays_with_its_braces_and_its_answer(parquet, rows, golds, tmp_path):
    path = str(tmp_path / "rows.parquet") if parquet else write(tmp_path, rows)
    if parquet:
        Dataset.from_list(rows).to_parquet(path)
    found = load(path, conversational=False, prompt_template="{prompt}")
    assert list(found["solution"]) == golds
    assert found[0]["prompt"] == rows[0]["problem"]


def test_held_out_problems_are_disjoint_stable_and_complete(path):
    train, test = load(path, test_fraction=0.3), load(path, test_fraction=0.3, held_out=True)
    assert not set(train["prompt_id"]) & set(test["prompt_id"])
    assert len(train) + len(test) == 60
    assert 5 < len(test) < 35
    assert load(path, test_fraction=0.3)["prompt_id"] == train["prompt_id"]
    texts = [row["question"] for row in ROWS if int(prompt_id(row["question"])[:8], 16) < 0.3 * 2**32]
    assert [problem_text(prompt).split("\n")[0] for prompt in test["prompt"]] == texts
    assert set(load(path, test_fraction=0.1, held_out=True)["prompt_id"]) <= set(test["prompt_id"])


TWINS = [
    {"problem": "p", "answer": "1", "kind": "a"},
    {"problem": "p", "answer": "2", "kind": "a"},
    {"problem": " p", "answer": "1", "kind": "b"},
    {"problem": "p", "answer": "1", "kind": "a"},
]


@pytest.mark.parametrize(("reads", "kept"), [((), [0]), (("solution",), [0, 1]), (("solution", "kind"), [0, 1, 2])])
def test_a_row_is_a_duplicate_if_all_that_its_reward_reads_is_equal(reads, kept, tmp_path):
    path = write(tmp_path, TWINS)
    data = DataArguments(dataset_name=path, keep_columns=["kind"])
    found = load_prompts(data, conversational=False, reads=reads)
    assert [(row["solution"], row["kind"]) for row in found] == [(TWINS[i]["answer"], TWINS[i]["kind"]) for i in kept]
    assert len(set(found["prompt_id"])) == len(kept)
    if not reads:
        assert list(found["prompt_id"]) == [prompt_id("p")]


def test_rows_with_one_text_are_on_one_side_of_the_split(tmp_path):
    path = write(tmp_path, [{"problem": f"p{i // 3}", "answer": i} for i in range(60)])
    sides = [load(path, False, held_out, test_fraction=0.4, prompt_template="{prompt}") for held_out in (False, True)]
    train, test = (set(side["prompt"]) for side in sides)
    assert len(sides[0]) + len(sides[1]) == 60
    assert train
    assert test
    assert not train & test


def test_reasoning_gym_is_seeded():
    for kwargs in ({"size": 20, "seed": 4}, {"size": 20}):
        first, second = (load("reasoning_gym:chain_sum", dataset_kwargs=kwargs) for _ in range(2))
        assert first.to_list() == second.to_list()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_column": "questoin"}, r"prompt_column: .* has no column 'questoin', only \['question', 'answer'\]"),
        ({"prompt_template": "no place"}, "prompt_template must hold `{prompt}`"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"test_fraction": 0.1, "dataset_test_split": "test"}, "set one of the two"),
        ({"solution_list": "some"}, "solution_list must be one of all, any"),
        ({"solution_pattern": r"= (\d+)"}, "finds no group in row 0"),
        ({"solution_pattern": "("}, "is not a regular expression"),
    ],
)
def test_bad_settings_are_named(path, settings, message):
    with pytest.raises(ValueError, match=message):
        load(path, **settings)


def test_a_list_of_golds_is_all_that_is_asked_for_or_alternatives(tmp_path):
    answers = {"p": ["1", "27.0"], "q": ["x"], "r": []}
    path = write(tmp_path, [{"problem": problem, "answer": answer} for problem, answer in answers.items()])
    assert load(path, on_missing_gold="drop")["solution"] == ["1, 27.0", "x"]
    golds = load(path, on_missing_gold="drop", solution_list="any")["solution"]
    assert list(golds) == [["1", "27.0"], ["x"]]
    reward = MathVerifyReward(num_workers=1)
    answers = [r"\boxed{27}", r"\boxed{1}", r"\boxed{2}", r"\boxed{x}"]
    assert reward([], answers, [golds[0]] * 3 + [golds[1]]) == [1.0, 1.0, 0.0, 1.0]
    assert reward.check_golds(list(golds)) == []
    reward.close()
    with pytest.raises(ValueError, match=r"Row 2 of .* has no gold"):
        load(path, solution_list="any")


def test_a_template_takes_any_column_but_the_gold_s(tmp_path):
    rows = [{"question": f"Q{i} {{hint}}", "hint": f"H{i}", "tags": ["a", "b"], "answer": i} for i in range(3)]
    path = write(tmp_path, rows)

    def asked(template, **settings):
        return [row["prompt"][-1]["content"] for row in load(path, prompt_template=template, **settings)]

    # What a cell holds is no template, and what LaTeX encloses is no column.
    assert asked("{hint}: {question} \\boxed{answer}")[1] == "H1: Q1 {hint} \\boxed{answer}"
    assert asked("{prompt}\n{tags}")[2] == "Q2 {hint}\na\nb"
    (tmp_path / "turn.jinja").write_text("{% for tag in tags %}<{{ tag }}>{% endfor %} {{ prompt | upper }}")
    assert asked(str(tmp_path / "turn.jinja"))[0] == "<a><b> Q0 {HINT}"
    for template, message in (
        ("{prompt} {answer}", "shows the gold"),
        ("{prompt} {hnit}", "no column 'hnit'.*Did you mean 'hint'"),
        ("{hint}", "must hold `{prompt}` or `{question}`"),
        ("{{ prompt", "Jinja"),
        ("{{ prompt / 0 }}", "fails for a row"),
        ("{% if hint == 'H0' %}{{ prompt }}{% endif %}", "leaves an empty prompt of the problem 'Q1 "),
        (str(tmp_path / "none.jinja"), "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            asked(template)


def test_one_question_with_other_options_or_another_passage_is_another_problem(tmp_path):
    rows = [{"question": "Which?", "choices": c, "p": p, "answer": 0} for c in (["x", "y"], ["y", "z"]) for p in "ab"]
    path = write(tmp_path, [*rows, rows[0]])
    assert len(load(path, choices_column="choices")) == 2
    found = load(path, prompt_template="{p} {question} {choices}")
    assert len(set(found["prompt_id"])) == 4
    assert {row["solution"] for row in found} == {"A"}


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.csv.gz", "a.jsonl.gz", "b*.jsonl", ["b1.jsonl", "b2.jsonl"], "disk", "splits"]
)
def test_files_of_every_kind_have_the_same_rows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What, {i}?", "answer": str(i)} for i in range(6)]
    separator = "\t" if ".tsv" in str(name) else ";"
    lines = [json.dumps(row) for row in rows]
    if "csv" in str(name) or "tsv" in str(name):
        lines = [separator.join(cells) for cells in [rows[0], *(row.values() for row in rows)]]
    text = "".join(f"{line}\n" for line in lines).encode()
    if str(name).startswith("a."):
        Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    Path("b1.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    Path("b2.jsonl").write_text("\n".join(map(json.dumps, rows[2:])))
    Dataset.from_list(rows).save_to_disk("disk")
    DatasetDict({"train": Dataset.from_list(rows), "other": Dataset.from_list(rows[:1])}).save_to_disk("splits")
    found = load(name)
    assert [(row["prompt"], row["solution"]) for row in found] == [(row["question"], row["answer"]) for row in rows]
    if name == "splits":
        assert len(load(name, dataset_train_split="other")) == 1
        with pytest.raises(ValueError, match=r"no 'none', only \['train', 'other'\]"):
            load(name, dataset_train_split="none")


def test_cells_of_a_csv_file_stay_as_they_are_written(tmp_path):
    """And are numbers where nothing is lost by it, for rewards that calculate with them."""
    columns = {
        "answer": ["007", "08"], "missing": ["NA", "None"], "lower": ["true", "false"], "price": ["1.50", "2.5"],
        "long": ["123456789012345678901", "5"], "count": ["1", "2"], "share": ["0.5", "1.25"],
        "given": ["True", "False"],
    }  # fmt: skip
    lines = [columns, *zip(*columns.values(), strict=True)]
    (tmp_path / "a.csv").write_text("".join(",".join(["q", *line]) + "\n" for line in lines))
    (tmp_path / "b.csv").write_text("q,count\n1,1\n2,x\n")
    numbers = {"count": [1, 2], "share": [0.5, 1.25], "given": [True, False]}
    found = load_files("a", [tmp_path / "a.csv"])
    assert {name: list(found[name]) for name in columns} == columns | numbers
    assert list(load_files("b", [tmp_path / "b.csv"])["count"]) == ["1", "x"]
    (tmp_path / "c.csv").write_text("q,count\n3,\n4,5\n")
    both = load_files("b", [tmp_path / "c.csv", tmp_path / "b.csv"])
    assert list(both["q"]) == [3, 4, 1, 2]
    assert list(both["count"]) == [None, "5", "1", "x"]


@pytest.mark.parametrize(
    "golds",
    [
        ["2024-03-01", "2024-03-02"],
        ["2024-03-01T10:00Z", "2024-03-02T10:00Z"],
        [["2024-03-01", "2024-03-03"], ["2024-03-02"]],
        # Beside a fraction the loader has room for 53 bits only.
        [9007199254740993, 0.5],
    ],
)
def test_golds_of_a_json_file_stay_as_they_are_written(golds, tmp_path):
    path = write(tmp_path, [{"question": f"Q{i}", "answer": gold} for i, gold in enumerate(golds)])
    wanted = [", ".join(gold) if isinstance(gold, list) else str(gold) for gold in golds]
    assert list(load(path)["solution"]) == wanted


def test_golds_that_no_number_of_64_bits_holds_are_refused(tmp_path):
    path = write(tmp_path, [{"question": "Q", "answer": 3**50}, {"question": "R", "answer": 12}])
    with pytest.raises(ValueError, match="too big"):
        load(path)


def test_a_conversation_is_taken_up_to_the_assistants_answer(tmp_path):
    answer = {"role": "assistant", "content": "2"}
    path = write(tmp_path, [{"prompt": [SYSTEM, USER, answer], "answer": 1}, {"prompt": [*TURNS, answer], "answer": 2}])
    found = load(path)
    assert list(found["prompt"]) == [[SYSTEM, USER], TURNS]
    assert "2 conversations are taken up to the assistant's answer" in found.info.description
    assert "taken up to" not in load(write(tmp_path, [{"prompt": TURNS, "answer": 1}])).info.description


@pytest.mark.parametrize("empty", ["", " \n", None, []])
def test_rows_whose_problem_is_empty_are_left_out_and_counted(empty, tmp_path):
    full = TURNS if empty == [] else "p"
    path = write(tmp_path, [{"prompt": full, "answer": 1}, {"prompt": empty, "answer": 2}])
    found = load(path)
    assert (list(found["prompt"]), list(found["solution"])) == ([full], ["1"])
    assert "; 1 are left out, whose problem is empty" in found.info.description
    assert "empty" not in load(write(tmp_path, [{"prompt": full, "answer": 1}])).info.description


def test_a_template_may_show_a_column_of_golds_that_nobody_reads(tmp_path):
    path = write(tmp_path, [{"prompt": "p", "tests": ["assert f(1) == 2"]}])
    shown = DataArguments(path, solution_column="tests", prompt_template="{prompt} {tests}")
    found = load_prompts(shown, conversational=False, gold=False)
    assert found[0]["prompt"] == "p assert f(1) == 2"
    with pytest.raises(ValueError, match="shows the gold"):
        load_prompts(shown, conversational=False)


def test_golds_are_asked_for_only_where_one_is_read(tmp_path):
    path = write(tmp_path, [{"prompt": "p"}, {"prompt": "q"}])
    with pytest.raises(ValueError, match="say which one with solution_column"):
        load(path)
    found = load_prompts(DataArguments(path), conversational=True, gold=False)
    assert (list(found["prompt"]), found.column_names) == (["p", "q"], ["prompt", "prompt_id"])
    path = write(tmp_path, [{"prompt": "p", "answer": None}, {"prompt": "q", "answer": "2"}])
    found = load_prompts(DataArguments(path), conversational=True, gold=False)
    assert list(found["solution"]) == [None, "2"]
    assert list(found["prompt_id"]) == [prompt_id("p"), prompt_id("q", {"solution": "2"})]


def test_problem_text_is_what_the_user_says():
    parts = [{"type": "text", "text": "two"}, {"type": "image"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": parts},
    ]
    assert problem_text(messages) == "one\ntwo"
    assert problem_text(" plain \n") == "plain"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", None, "dataset_name is missing"),
        ("no/such.jsonl", None, "there is no file 'no/such.jsonl'"),
        ("reasoning_gym:no_such_task", None, "cannot make 'no_such_task'"),
        ("no-such-owner/no-such-dataset", None, "could not be loaded"),
        ("a.jsonl", b'{"text": "a", "label": "b"}', r"none of the columns .* only \['text', 'label'\]"),
        ("a.jsonl", b'{"problem": "p", "answer": null}', r"Row 0 of .* has no gold: column 'answer' holds None"),
        ("a.json", b"", "the file '.*a.json' holds no rows"),
        ("a.csv", b"question,answer\n", "a.csv' has no training problem"),
        ("a.jsonl", b'{"question": "1", "answer": "2"}\n{"question":\n', r"read as jsonl \(.*parse error.*in row 1"),
        ("a.csv", b"question,answer\na,1+1,2\nb,1+2,3\n", r"read as csv \(ParserWarning: Length of header"),
        ("a.csv", b'question,answer\n"1+1,2\n', r"read as csv \(.*EOF inside string starting at row 1"),
        ("a.parquet", b"hello", r"read as parquet \(.*smaller than the minimum file footer"),
    ],
)
def test_what_cannot_be_read_gives_the_reason(name, content, message, tmp_path):
    if content is not None:
        name = str(tmp_path / name)
        Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(name)


def test_texts_and_conversations_in_one_column_are_refused(tmp_path):
    """The library makes JSON texts of them, quotes included."""
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": [{"role": "user", "content": "2+1?"}], "answer": "3"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="has texts in some rows and conversations in others"):
        load_prompts(DataArguments(str(path)), conversational=True)


def written(tmp_path, *rows, **settings):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(str(tmp_path / "rows.jsonl"), **settings)


def test_cells_of_several_kinds_in_one_column_are_read_as_they_are(tmp_path):
    rows = [
        {"question": "a?", "answer": 7, "hint": 3, "options": [1, "both"]},
        {"question": "b?", "answer": "x + 1", "hint": "look", "options": [2, "none"]},
        {"question": "c?", "answer": ["7"], "hint": None, "options": ["u", "v"]},
    ]
    made = written(tmp_path, *rows, prompt_template="{prompt} {hint}")
    assert made["solution"][:] == ["7", "x + 1", "7"]
    assert [turn["content"] for (turn,) in made["prompt"]] == ["a? 3", "b? look", "c? "]
    chosen = [{**row, "answer": "B"} for row in rows]
    made = written(tmp_path, *chosen, choices_column="options")
    assert [text.split("\n\n")[1] for text in made["prompt"]] == ["A. 1\nB. both", "A. 2\nB. none", "A. u\nB. v"]


@pytest.mark.parametrize(("passage", "before"), [(["one", "two"], "one\ntwo\n\n"), (5, "5\n\n"), ([], ""), (None, "")])
def test_a_passage_may_be_a_list_or_a_number(passage, before, tmp_path):
    (row,) = written(tmp_path, {"question": "q", "answer": "1", "passage": passage}, context_column="passage")
    assert row["prompt"] == f"{before}q"


def test_an_empty_cell_is_nothing_in_every_kind_of_template(tmp_path):
    row = {"question": "q", "answer": "1", "hint": None}
    for template in ("{prompt}[{hint}]", "{{ prompt }}[{{ hint }}]"):
        ((turn,),) = written(tmp_path, row, prompt_template=template)["prompt"]
        assert turn["content"] == "q[]"


def test_a_turn_without_a_text_is_told_with_its_row(tmp_path):
    empty = {"prompt": [{"role": "user", "content": None}], "answer": "1"}
    with pytest.raises(ValueError, match=r"Row 0 of .*content': None"):
        written(tmp_path, empty)


def test_a_place_in_single_braces_is_none_in_a_jinja_template(path):
    with pytest.raises(ValueError, match=r"`\{\{ prompt \}\}`"):
        load(path, prompt_template="{prompt} {{ answer }}")


def test_rows_whose_prompts_lack_a_column_are_told(tmp_path):
    """Alpaca's form: the numbers to add are in a column that the prompt does not show."""
    rows = [{"instruction": "Add.", "input": f"{i} and {i % 2}", "output": str(i % 3)} for i in range(9)]
    columns = {"prompt_column": "instruction", "solution_column": "output"}
    said, odd = load(write(tmp_path, rows), **columns).info.description.split("\n")
    assert "neither the prompt nor a reward function reads 'input'" in said
    assert "2 rows have the prompt of an earlier row and another gold ('Add.' has '0' and '1'), and 6 have its" in odd
    shown = load(write(tmp_path, rows), **columns, context_column="input").info.description
    assert not any(word in shown for word in ("\n", "neither", "left out"))
    # Most rows are lost without a gold, too; a few copies of a problem are usual.
    data = DataArguments(dataset_name=write(tmp_path, rows), prompt_column="instruction")
    assert "\n0 rows" in load_prompts(data, conversational=True, gold=False).info.description
    few = [{"question": f"{i % 7}?", "answer": i % 7, "id": f"row{i}"} for i in range(9)]
    description = load(write(tmp_path, few)).info.description
    assert "2 are left out" in description
    assert not any(word in description for word in ("\n", "neither"))


def test_golds_of_classes_are_their_names(tmp_path):
    names = ["world news", "sports"]
    kinds = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    rows = Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, -1, 0]}, features=kinds)
    rows.save_to_disk(tmp_path / "classes")
    columns = {"prompt_column": "text", "solution_column": "label", "on_missing_gold": "drop"}
    found = load(str(tmp_path / "classes"), **columns)
    assert found["solution"] == ["sports", "world news"]
    assert found["label"] == [1, 0], "rewards of their own read the column as it is"
