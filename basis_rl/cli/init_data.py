"""What ``basis-rl init`` writes about data: its columns, the reward function, the template and the batches."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from basis_rl.data import problem_text
from basis_rl.data.prompts import GYM_COLUMN, PROMPT_COLUMNS, SOLUTION_COLUMNS, DataArguments, load_prompts
from basis_rl.names import Mistakes
from basis_rl.rewards import ChoiceReward, gold_answer
from basis_rl.rewards.code.tests import parse_tests
from basis_rl.rewards.extract import is_prose, is_sentence
from basis_rl.rewards.golds import invalid_golds
from basis_rl.rewards.registry import build_reward
from basis_rl.text import BOXED

# Names of columns that only a new recipe guesses, since it writes them down.
_PROMPTS = ("instruction", "query", "input", "messages", "conversation", "text")
_GOLDS = ("expected_answer", "target", "output", "label", "gold")
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
# In problems that say by themselves how the answer is to be given.
_FORMAT = re.compile(
    r"\\boxed|####|<answer>|```|\b(?:answer|a)\s*:\s*$|\b(?:answer|reply|respond|end) (?:only )?(?:with|in|by)\b"
    r"|final answer",
    re.IGNORECASE,
)


def fitted(data: DataArguments, rows: Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """What is in the data, the keys that it needs, the reward function, and batches that it suffices for.

    Args:
        data: which data set it is.
        rows: of it, as they are.
        options: of the command line: columns and a reward function that are named.

    Raises:
        ValueError: it has no problems, no golds, or none that a reward function could find right.
    """
    tests = tests_in(rows, options.prompt_column) if options.reward_funcs in (None, "code") else {}
    columns = rows.flatten().column_names
    guesses = {
        "prompt_column": options.prompt_column or _guess(columns, PROMPT_COLUMNS, _PROMPTS),
        "solution_column": options.solution_column or _guess(columns, SOLUTION_COLUMNS, [*tests.values(), *_GOLDS]),
    }
    keys: dict[str, Any] = {key: column for key, column in guesses.items() if column}
    data = replace(data, test_fraction=_HELD_OUT, **keys)
    tried = Mistakes()
    trained = tried.tried(load_prompts, data, conversational=True)
    if trained is None:
        data.on_missing_gold = keys["on_missing_gold"] = "drop"
        trained = load_prompts(data, conversational=True)
    held_out = tried.tried(load_prompts, data, conversational=True, held_out=True)
    if held_out is None:
        data.test_fraction = 0.0
        trained = load_prompts(data, conversational=True)
    first = trained.select(range(min(_MOST, len(trained))))
    name = options.reward_funcs or fitting(first, tests, data.dataset_name)
    reward = build_reward(name, tests)
    invalid = invalid_golds(reward, first)
    others = invalid_golds(reward, held_out.select(range(min(_MOST, len(held_out))))) if held_out else []
    getattr(reward, "close", lambda: None)()
    if len(invalid) == len(trained):
        raise ValueError(f"'{data.dataset_name}': {name} takes none of its golds for an answer. Name their column "
                         "by --solution_column, or the reward function by --reward_funcs.")  # fmt: skip
    if invalid or others or len(trained) > _MOST:
        keys["on_invalid_gold"] = "drop"
    if tests:
        keys["reward_kwargs"] = tests
    prompts = len(trained) - len(invalid)
    size = min(8, prompts)
    text = isinstance(first[0]["prompt"], str)
    asking = text and not _says_the_form(first["prompt"])
    return {
        "read": f"{len(rows)} rows, whose prompts are {'texts' if text else 'conversations'}; the columns are "
        f"{', '.join(rows.column_names)}.",
        "keys": {key: json.dumps(value, ensure_ascii=False) for key, value in keys.items()},
        "asks": json.dumps(_ASKS[name]) if asking and name in _ASKS else None,
        "reward": name,
        "batch": (size, min(16, prompts // size)),
        "held_out": held_out is not None,
    }


def _guess(columns: Sequence[str], usual: Sequence[str], others: Sequence[str]) -> str | None:
    """The first of the `others` that is a column; None where a recipe need not name it, since a `usual` one is."""
    return None if set(usual) & set(columns) else next((name for name in others if name in columns), None)


def _says_the_form(prompts: Sequence[Any]) -> bool:
    """Whether at least half of the prompts say how the answer is to be given."""
    return 2 * sum(_FORMAT.search(problem_text(prompt)) is not None for prompt in prompts) >= len(prompts)


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
        if all(are_tests(cell, None) for cell in first[column]):
            return {"column": column}
        for function in functions:
            if all(map(are_tests, first[column], first[function])):
                return {"column": column, "fn_name": function}
    return {}


def fitting(problems: Dataset, tests: dict[str, str], dataset: str) -> str:
    """The reward function that can find golds right, by their form.

    Raises:
        ValueError: most golds are sentences, and no reward function compares sentences.
    """
    if tests:
        return "code"
    if GYM_COLUMN in problems.column_names:
        return "reasoning_gym"
    golds = [gold_answer(gold) for gold in problems["solution"]]
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
