"""``basis-rl init``: a commented starting recipe, or a copy of a shipped one."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from basis_rl import resources
from basis_rl.cli.offline import go_offline_if_unreachable
from basis_rl.cli.options import INIT_DATASET, INIT_MODEL, init_parser
from basis_rl.names import FORMATS, Mistakes, check_file
from basis_rl.text import render

_TEMPLATE = Path(__file__).with_name("recipe.yaml.jinja")
# Names of columns that only a new recipe guesses, since it writes them down.
_PROMPTS = ("instruction", "query", "input", "messages", "conversation", "text")
_GOLDS = ("expected_answer", "target", "output", "label", "gold")
# Of the problems; and so many golds are checked here, more take minutes.
_HELD_OUT, _GRADED = 0.05, 1000
_CONFIG = {INIT_DATASET: "main"}
# What asks for the answer that a reward function reads.
_BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_ASKS = {
    "math_verify": _BOXED,
    "exact": _BOXED,
    "choice": "{prompt}\n\nReason step by step, and end with the letter of the right option, such as: Answer: C",
    "code": "{prompt}\n\nWrite the whole program in Python, in one block that begins with ```python.",
}
_FORMAT = re.compile(
    r"\\boxed|####|<answer>|```|\b(?:answer|a)\s*:\s*$|\b(?:answer|reply|respond|end) (?:only )?(?:with|in|by)\b"
    r"|final answer",
    re.IGNORECASE,
)
_FUNCTIONS = ("entry_point", "fn_name", "func_name", "function_name")
_UNREAD = {
    "read": "",
    "keys": {},
    "asks": json.dumps(_BOXED),
    "reward": "math_verify",
    "batch": (8, 16),
    "held_out": True,
}


def main(argv: Sequence[str]) -> int:
    """Write the recipe, and say what to do next."""
    options = init_parser().parse_args(argv)
    file: Path = options.file
    text = recipe_text(options)
    if file.exists() and not options.force:
        raise ValueError(f"'{file}' is there already. Give another name, or --force to replace it.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    shown = quote(str(file))
    print(f"Wrote {file}. Edit it, then\n  basis-rl check {shown}\n  basis-rl train {shown}")
    return 0


def recipe_text(options: argparse.Namespace) -> str:
    """The recipe that is asked for.

    Raises:
        ValueError: no such shipped recipe, or settings in addition to one, which would be lost.
    """
    if options.recipe is not None:
        settings = ("model_name_or_path", "dataset_name", "output_dir", "cpu", "prompt_column", "solution_column")
        if given := [name for name in settings if getattr(options, name)]:
            raise ValueError(f"--recipe copies a recipe as it is: leave out --{given[0]}, and edit the file.")
        return resources.recipe(options.recipe).read_text()
    dataset = options.dataset_name or INIT_DATASET
    return render(
        _TEMPLATE,
        file=options.file,
        model=json.dumps(options.model_name_or_path or INIT_MODEL, ensure_ascii=False),
        output=json.dumps(options.output_dir or f"runs/{options.file.stem}", ensure_ascii=False),
        dataset=json.dumps(dataset, ensure_ascii=False),
        config=_CONFIG.get(dataset),
        cpu=options.cpu,
        **(read_data(options) if options.dataset_name else _UNREAD),
    )


def read_data(options: argparse.Namespace) -> dict[str, Any]:
    """What the recipe says of data that is given: what is in it, keys that it needs, and batches that it suffices for.

    Raises:
        ValueError: it cannot be read, or has no problems, no golds, or none that a reward function could find right.
    """
    check_file(options.dataset_name)
    on_hub = Path(options.dataset_name).suffix not in FORMATS and ":" not in options.dataset_name
    if on_hub:
        go_offline_if_unreachable("init", [])
    from basis_rl.data import problem_text
    from basis_rl.data.prompts import PROMPT_COLUMNS, SOLUTION_COLUMNS, DataArguments, load_prompts, load_rows

    config = _CONFIG.get(options.dataset_name)
    try:
        rows = load_rows(DataArguments(options.dataset_name, config))
    except ValueError as error:
        if not on_hub:
            raise
        return {**_UNREAD, "read": f"Nothing below is fitted to it: {' '.join(str(error).split())[:200]}"}
    tests = tests_in(rows, {*PROMPT_COLUMNS, *_PROMPTS, options.prompt_column})
    keys = _columns(options, rows, (PROMPT_COLUMNS, SOLUTION_COLUMNS), tests.get("column"))
    data = DataArguments(options.dataset_name, config, test_fraction=_HELD_OUT, **keys)
    tried = Mistakes()
    trained = tried.tried(load_prompts, data, conversational=True)
    if trained is None:
        data.on_missing_gold = keys["on_missing_gold"] = "drop"
        trained = load_prompts(data, conversational=True)
    held_out = tried.tried(load_prompts, data, conversational=True, held_out=True)
    if held_out is None:
        data.test_fraction = 0.0
        trained = load_prompts(data, conversational=True)
    golds = list(trained["solution"])[:_GRADED]
    name = options.reward_funcs or fitting(golds, tests, options.dataset_name)
    kwargs = tests if name == "code" else {}
    invalid, others = _invalid(name, kwargs, [trained, held_out])
    if len(invalid) == len(trained):
        raise ValueError(f"'{options.dataset_name}': {name} takes none of its golds for an answer. Name their column "
                         "by --solution_column, or the reward function by --reward_funcs.")  # fmt: skip
    if invalid or others or len(trained) > _GRADED:
        keys["on_invalid_gold"] = "drop"
    keys |= {"reward_kwargs": kwargs} if kwargs else {}
    prompts = len(trained) - len(invalid)
    size = min(8, prompts)
    text = isinstance(trained[0]["prompt"], str)
    asked = [_FORMAT.search(problem_text(prompt)) for prompt in list(trained["prompt"])[:_GRADED]]
    return {
        "read": f"{len(rows)} rows, whose prompts are {'texts' if text else 'conversations'}; the columns are "
        f"{', '.join(rows.column_names)}.",
        "keys": {key: json.dumps(value, ensure_ascii=False) for key, value in keys.items()},
        "asks": json.dumps(_ASKS[name]) if name in _ASKS and text and 2 * sum(map(bool, asked)) < len(asked) else None,
        "reward": name,
        "batch": (size, min(16, prompts // size)),
        "held_out": held_out is not None,
    }


def _columns(
    options: argparse.Namespace, rows: Any, known: tuple[Sequence[str], Sequence[str]], tests: str | None
) -> dict[str, Any]:
    """The columns that a recipe has to name."""
    keys: dict[str, Any] = {}
    columns = rows.flatten().column_names
    guesses = (("prompt_column", known[0], _PROMPTS), ("solution_column", known[1], (tests, *_GOLDS)))
    for key, usual, more in guesses:
        guessed = [] if set(usual) & set(columns) else [name for name in more if name in columns]
        if named := getattr(options, key) or next(iter(guessed), None):
            keys[key] = named
    return keys


def tests_in(rows: Any, others: Collection[str | None]) -> dict[str, str]:
    """The parameters of the reward `code` for rows that have tests of programs in a column; none for others."""
    from basis_rl.rewards.code.tests import parse_tests

    def are_tests(cell: Any, name: Any) -> bool:
        try:
            return all(case.kind != "assert" or "assert" in case.given for case in parse_tests(cell, name))
        except (ValueError, TypeError, AttributeError):
            return False

    first = rows.select(range(min(20, len(rows))))
    named = [name for name in _FUNCTIONS if name in rows.column_names]
    for column in (name for name in rows.column_names if name not in others):
        for function in (None, *named):
            names = first[function] if function else [None] * len(first)
            if all(map(are_tests, first[column], names)):
                return {"column": column, **({"fn_name": function} if function else {})}
    return {}


def fitting(golds: Sequence[Any], tests: Mapping[str, str], dataset: str) -> str:
    """The reward function that can find golds right, by their form.

    Raises:
        ValueError: they are sentences, of which none can.
    """
    from basis_rl.rewards import ChoiceReward
    from basis_rl.rewards.extract import is_prose, is_sentence

    if tests:
        return "code"
    if 20 * len(ChoiceReward().check_golds(golds)) < len(golds):
        return "choice"
    prose = [str(gold) for gold in golds if is_prose(str(gold))]
    if 2 * len(prose) <= len(golds):
        return "math_verify"
    if not any(map(is_sentence, prose)):
        return "exact"
    raise ValueError(
        f"'{dataset}': {len(prose)} of {len(golds)} golds are sentences, such as {prose[0][:80]!r}, and no reward "
        "function here compares those. Write my_reward.py with `def score(completions, solution, **kwargs)`, which "
        "returns a number for each completion, and name it: --reward_funcs my_reward.score."
    )


def _invalid(name: str, kwargs: Mapping[str, str], sets: Sequence[Any]) -> list[list[int]]:
    """Of each set the golds that a reward function can tell to be impossible."""
    from basis_rl.rewards.base import GoldChecker, gold_columns
    from basis_rl.rewards.registry import build_reward

    reward = build_reward(name, kwargs)
    checks = isinstance(reward, GoldChecker)
    cells = [[list(rows[each])[:_GRADED] for each in gold_columns(reward)] if rows and checks else [] for rows in sets]
    found = [reward.check_golds(*each) if each else [] for each in cells]
    getattr(reward, "close", lambda: None)()
    return found
