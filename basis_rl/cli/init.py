"""``basis-rl init``: a commented starting recipe, or a copy of a shipped one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
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
_UNREAD = {"read": "", "keys": {}, "text": True, "batch": (8, 16), "held_out": True}


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
        ValueError: it cannot be read, or has no problems, no golds, or none that `math_verify` could find right.
    """
    check_file(options.dataset_name)
    on_hub = Path(options.dataset_name).suffix not in FORMATS and ":" not in options.dataset_name
    if on_hub:
        go_offline_if_unreachable("init", [])
    from basis_rl.data.prompts import PROMPT_COLUMNS, SOLUTION_COLUMNS, DataArguments, load_prompts, load_rows
    from basis_rl.rewards import MathVerifyReward

    keys: dict[str, Any] = {}
    config = _CONFIG.get(options.dataset_name)
    try:
        rows = load_rows(DataArguments(options.dataset_name, config))
    except ValueError as error:
        if not on_hub:
            raise
        return {**_UNREAD, "read": f"Nothing below is fitted to it: {' '.join(str(error).split())[:200]}"}
    columns = rows.flatten().column_names
    guesses = (("prompt_column", PROMPT_COLUMNS, _PROMPTS), ("solution_column", SOLUTION_COLUMNS, _GOLDS))
    for key, known, more in guesses:
        guessed = [] if set(known) & set(columns) else [name for name in more if name in columns]
        if named := getattr(options, key) or next(iter(guessed), None):
            keys[key] = named
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
    reward = MathVerifyReward()
    invalid = reward.check_golds(list(trained["solution"])[:_GRADED])
    others = reward.check_golds(list(held_out["solution"])[:_GRADED]) if held_out is not None else []
    reward.close()
    if len(invalid) == len(trained):
        raise ValueError(f"'{options.dataset_name}': math_verify takes none of its golds for an answer. Name their "
                         "column by --solution_column, or write the recipe by hand.")  # fmt: skip
    if invalid or others or len(trained) > _GRADED:
        keys["on_invalid_gold"] = "drop"
    prompts = len(trained) - len(invalid)
    size = min(8, prompts)
    text = isinstance(trained[0]["prompt"], str)
    return {
        "read": f"{len(rows)} rows, whose prompts are {'texts' if text else 'conversations'}; the columns are "
        f"{', '.join(rows.column_names)}.",
        "keys": {key: json.dumps(value, ensure_ascii=False) for key, value in keys.items()},
        "text": text,
        "batch": (size, min(16, prompts // size)),
        "held_out": held_out is not None,
    }
