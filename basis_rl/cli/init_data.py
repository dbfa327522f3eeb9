"""What ``basis-rl init`` writes about data: its columns, the reward function, the template and the batches."""

from __future__ import annotations

import argparse
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from datasets import Dataset

from basis_rl.data.choices import how_read, read_options
from basis_rl.data.prompts import GYM_COLUMN, PROMPT_COLUMNS, SOLUTION_COLUMNS, DataArguments, load_prompts
from basis_rl.data.rows import bare_problem, gold_text
from basis_rl.names import Mistakes
from basis_rl.rewards import ChoiceReward
from basis_rl.rewards.base import read_columns
from basis_rl.rewards.code.tests import parse_tests
from basis_rl.rewards.extract import is_prose, is_sentence
from basis_rl.rewards.golds import invalid_golds
from basis_rl.rewards.math.reward import gold_answers
from basis_rl.rewards.registry import build_reward
from basis_rl.text import BOXED

# Names of columns that only a new recipe guesses, since it writes them down.
_PROMPTS = (
    "instruction", "query", "input", "messages", "conversation", "text", "question_stem", "stem", "ctx", "sentence",
)  # fmt: skip
_GOLDS = ("expected_answer", "target", "output", "label", "gold")
# Of texts without which a problem cannot be answered.
_CONTEXTS = frozenset({"context", "passage", "article", "document", "paragraph", "input"})
# Of multiple-choice questions also these.
_KEYS = ("answerKey", "answer_key", "answer_idx", "answer_index", "correct", "correct_answer", "correct_option", "cop")
_OPTIONS = re.compile("choice|option|ending|candidate|alternative", re.IGNORECASE)
_FUNCTIONS = ("entry_point", "fn_name", "func_name", "function_name")
# Share of the problems.
_HELD_OUT = 0.05
# The golds and prompts that are looked at: more take minutes.
_MOST = 1000
# Asks for the answer in the form that a reward function reads.
_ASKS = {
    "math_verify": BOXED,
    "exact": BOXED,
    "reasoning_gym": BOXED,
    "choice": "{prompt}\n\nReason step by step, and end with the letter of the right option, such as: Answer: C",
    "code": "{prompt}\n\nWrite the whole program in Python, in one block that begins with ```python.",
}
# Of a judge, whose address and model only the user knows; without a gold also what it is asked.
_JUDGE: dict[str, Any] = {"base_url": "http://localhost:8000/v1", "model": "Qwen/Qwen3-32B"}
_RUBRIC: dict[str, Any] = {"rubric": "How good is this answer?\nTask: {prompt}\nAnswer: {completion}", "scale": [1, 10]}
# The tests of a row as a text, by what its cell is.
_TESTS: dict[type, str] = {list: '({0} or []) | join("\\n")', str: '({0} or "")'}
# The first test of a row with what stands before it: all of them would tell a program what to return. The only one of a
# row is shown where the problem does not name the function that it calls.
_SHOWN = r"""{{% set parts = ("\n" ~ {0}).split("\nassert") %}}
{{{{ "\n\nIt has to pass this test, and others:\n\n" ~ parts[:2] | join("\nassert") | trim
    if parts[2:] or (parts[1:] and parts[1].split("(")[0] | trim not in prompt) else "" }}}}"""
_ASSERT = re.compile(r"^assert\b", re.MULTILINE)
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\(")
# In problems that say by themselves how the answer is to be given, or that are in a chat template already.
_FORMAT = re.compile(
    r"\\boxed|####|<answer>|```|\b(?:answer|a)\s*:\s*$|\b(?:answer|reply|respond) (?:only )?(?:with|in|by)\b"
    r"|<\||\[INST\]|<start_of_turn>",
    re.IGNORECASE,
)
# What asks for an answer in these places, of those that `exact` can be told by `answer_in`.
_PLACES = {"box": r"\boxed", "tag": "<answer>", "hashes": "####"}


def fitted(data: DataArguments, rows: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """What is in the data, the keys that it needs, the reward function, and batches that it suffices for.

    Args:
        data: which data set it is.
        rows: of it, as they are.
        options: of the command line: columns and a reward function that are named.

    Raises:
        ValueError: it has no problems, no golds that the reward function reads, or none that it could find right.
    """
    name = options.reward_funcs
    tests = tests_in(rows, options.prompt_column) if name in (None, "code") else {}
    choices = choices_in(rows, options.solution_column) if name in (None, "choice") and not tests else {}
    name = name or ("code" if tests else "choice" if choices else None)
    kwargs = _judged(options.solution_column, rows.flatten().column_names) if name == "judge" else tests
    reward = build_reward(name, kwargs) if name else None
    keys: dict[str, Any] = {**_column_keys(rows, options, tests), **choices}
    data = replace(data, test_fraction=_HELD_OUT, **keys)
    load = partial(load_prompts, conversational=True, gold=reward is None or "solution" in read_columns([reward]))
    tried = Mistakes()
    # A gold may be missing on one side of the split only.
    if tried.tried(load, replace(data, test_fraction=0.0)) is None:
        data.on_missing_gold = keys["on_missing_gold"] = "drop"
    trained = load(data)
    held_out = tried.tried(load, data, held_out=True)
    first = trained.select(range(min(_MOST, len(trained))))
    if name is None or reward is None:
        name = fitting(first, data.dataset_name)
        reward = build_reward(name, {})
    invalid = invalid_golds(reward, first)
    others = invalid_golds(reward, held_out.select(range(min(_MOST, len(held_out))))) if held_out else []
    getattr(reward, "close", lambda: None)()
    if len(invalid) == len(trained):
        raise ValueError(f"'{data.dataset_name}': {name} takes none of its golds for an answer. Name their column "
                         "by --solution_column, or the reward function by --reward_funcs.")  # fmt: skip
    if invalid or others or len(trained) > _MOST:
        keys["on_invalid_gold"] = "drop"
    template = _template(name, first, tests, with_choices=bool(choices))
    counts = {place: sum(mark in f"{each} {template}" for each in first["prompt"]) for place, mark in _PLACES.items()}
    place = next((place for place, count in counts.items() if 2 * count >= len(first)), "whole")
    kwargs = {"answer_in": place} if name == "exact" and place != "box" else kwargs
    keys |= {"reward_kwargs": kwargs} if kwargs else {}
    prompts = len(trained) - len(invalid)
    size = min(8, prompts)
    kind = "texts" if isinstance(first[0]["prompt"], str) else "conversations"
    return {
        "read": f"{len(rows)} rows, whose prompts are {kind}; the columns are {', '.join(rows.column_names)}.",
        "keys": {key: json.dumps(value, ensure_ascii=False) for key, value in keys.items()},
        "asks": template and json.dumps(template),
        "reward": name,
        "batch": (size, min(16, prompts // size)),
        "held_out": held_out is not None,
    }


def _first(names: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _column_keys(rows: Dataset, options: argparse.Namespace, tests: Mapping[str, str]) -> dict[str, str]:
    """The keys for columns that are not found by their usual names, for a column of texts that belong to the problems
    by its name, unless these hold them already, and for golds that are lists of names, which mostly mean the same."""
    columns = [*rows.flatten().column_names, *rows.column_names]
    prompt = options.prompt_column or _first([*PROMPT_COLUMNS, *_PROMPTS], columns)
    gold = options.solution_column or _first([*SOLUTION_COLUMNS, *tests.values(), *_GOLDS], columns)
    keys = {"prompt_column": prompt, "solution_column": gold}
    cells = rows.flatten().select(range(min(_MOST, len(rows)))).to_dict()
    for name in sorted(_CONTEXTS.intersection(cells) - {prompt, gold, *tests.values()}):
        pairs = zip(cells.get(str(prompt), []), cells[name], strict=False)
        if any(isinstance(a, str) and isinstance(b, str) and b not in a for a, b in pairs):
            keys["context_column"] = name
    lists = [cell for cell in cells.get(str(gold), []) if isinstance(cell, list) and len(cell) > 1 and not tests]
    if 2 * sum(all(isinstance(each, str) for each in cell) and is_prose(cell[0]) for cell in lists) > len(lists):
        keys["solution_list"] = "any"
    found = (_first(PROMPT_COLUMNS, columns), _first(SOLUTION_COLUMNS, columns))
    return {key: value for key, value in keys.items() if value and value not in found}


def _template(reward: str, problems: Dataset, tests: Mapping[str, str], *, with_choices: bool) -> str | None:
    """The user's turn around these problems; None leaves conversations as they are, and texts in a chat template.

    Other texts need one for the chat template. It asks for the form of the answer that the reward function reads, if
    most of the problems do not say it; conversations are not asked for a box, without which math_verify finds the
    answer too.
    """
    prompts = problems["prompt"]
    texts = isinstance(prompts[0], str) and not any(mark in prompts[0] for mark in ("<|", "[INST]", "<start_of_turn>"))
    # A template takes known instructions out of a text.
    asked = [
        bare_problem(each) or "" if isinstance(each, str) else "\n".join(str(turn["content"]) for turn in each)
        for each in prompts
    ]
    says_the_form = 2 * sum(_FORMAT.search(text) is not None for text in asked) >= len(asked)
    body = "{prompt}\n\n{choices}" if with_choices else "{prompt}"
    template = body if texts or with_choices else None
    if reward in _ASKS and not says_the_form and (texts or reward != "math_verify"):
        template = _ASKS[reward].replace("{prompt}", body)
    if shown := _first_test(problems, tests):
        template = (template or "{prompt}").replace("{prompt}", "{{ prompt }}") + shown
    return template


def choices_in(rows: Dataset, solution_column: str | None) -> dict[str, str]:
    """The columns of the options and of the gold, if the rows are multiple-choice questions.

    Options are in one column, or in some that are lettered or numbered, and the golds name them (`how_read`).
    """
    first = rows.select(range(min(_MOST, len(rows))))
    names = rows.column_names
    several = [[name[:-1] + chr(ord(name[-1]) + i) for i in range(26)] for name in names if name[-1] in "Aa01"]
    runs = [list(takewhile(names.__contains__, run)) for run in several]
    for columns in [*([name] for name in names if _OPTIONS.search(name)), *(run for run in runs if len(run) > 1)]:
        options = [
            Mistakes().tried(read_options, cells) for cells in zip(*(first[name] for name in columns), strict=True)
        ]
        for gold in [solution_column] if solution_column else [*SOLUTION_COLUMNS, *_GOLDS, *_KEYS]:
            if gold not in names or gold in columns:
                continue
            golds = [(gold_text(cell) or "", each or []) for cell, each in zip(first[gold], options, strict=True)]
            if 20 * how_read(golds)[1] >= 19 * len(golds):
                return {"choices_column": ", ".join(columns), "solution_column": gold}
    return {}


def tests_in(rows: Dataset, prompt_column: str | None) -> dict[str, str]:
    """The parameters of the reward `code` for rows that have tests of programs in a column; none for others."""

    def are_tests(cell: Any, name: Any) -> bool:
        cases = parse_tests(cell, name)
        return bool(cases) and all(case.kind != "assert" or "assert" in case.given for case in cases)

    first = rows.select(range(min(20, len(rows))))
    functions = [name for name in _FUNCTIONS if name in rows.column_names]
    for column in rows.column_names:
        if column in (*PROMPT_COLUMNS, *_PROMPTS, prompt_column):
            continue
        for function in (None, *functions):
            names = first[function] if function else [None] * len(first)
            if 2 * sum(map(are_tests, first[column], names)) > len(first):
                return {"column": column} | ({"fn_name": function} if function else {})
    return {}


def _judged(solution_column: str | None, columns: Sequence[str]) -> dict[str, Any]:
    """Parameters of a judge to be filled in: with golds it compares with them, else it needs a question."""
    return _JUDGE if solution_column or set(SOLUTION_COLUMNS) & set(columns) else _JUDGE | _RUBRIC


def _first_test(problems: Dataset, tests: Mapping[str, str]) -> str | None:
    """In Jinja the first of a row's ``assert`` statements, if most problems do not name the function that these call,
    as in MBPP: no program could pass; else None."""
    cells = problems[tests["column"]] if list(tests) == ["column"] else []
    untold = 0
    for prompt, cell in zip(problems["prompt"], cells, strict=False):
        text = "\n".join(map(str, cell)) if isinstance(cell, list) else str(cell)
        # Functions of tests, and JSON, are no list of statements whose first could be shown.
        called = set(_CALLED.findall(text)) - set(dir(builtins)) if _ASSERT.search(text) and "def " not in text else ()
        untold += bool(called) and not any(name in str(prompt) for name in called)
    kind = next((type(cell) for cell in cells if cell), None)
    return _SHOWN.format(_TESTS[kind].format(tests["column"])) if kind and 2 * untold > len(problems) else None


def fitting(problems: Dataset, dataset: str) -> str:
    """The reward function that can find golds right, by their form.

    Raises:
        ValueError: most golds are sentences, and no reward function compares sentences.
    """
    if GYM_COLUMN in problems.column_names:
        return "reasoning_gym"
    golds = [gold for cell in problems["solution"] for gold in gold_answers(cell)]
    if 20 * len(ChoiceReward().check_golds(golds)) < len(golds):
        return "choice"
    sentences = list(filter(is_sentence, golds))
    if 2 * len(sentences) <= len(golds):
        return "exact" if 2 * sum(map(is_prose, golds)) > len(golds) else "math_verify"
    raise ValueError(
        f"'{dataset}': {len(sentences)} of {len(golds)} golds are sentences, such as {sentences[0][:80]!r}, and no "
        "reward function here compares those. Write my_reward.py with `def score(completions, solution, **kwargs)`, "
        "which returns a number for each completion, and name it: --reward_funcs my_reward.score."
    )
