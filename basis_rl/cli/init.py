"""``basis-rl init``: a commented starting recipe, or a copy of a shipped one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from basis_rl import resources
from basis_rl.cli.options import INIT_DATASET, INIT_MODEL, go_offline_if_unreachable, init_parser
from basis_rl.names import data_files
from basis_rl.text import BOXED, render

_TEMPLATE = Path(__file__).with_name("recipe.yaml.jinja")
_CONFIG = {INIT_DATASET: "main"}
_UNREAD = {
    "read": "",
    "keys": {},
    "asks": json.dumps(BOXED),
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
        boxed=json.dumps(BOXED),
        cpu=options.cpu,
        **(read_data(options) if options.dataset_name else _UNREAD),
    )


def read_data(options: argparse.Namespace) -> dict[str, Any]:
    """What the recipe says of data that is given; the usual where a data set of the Hub cannot be read.

    Raises:
        ValueError: a file that cannot be read, or see `fitted`.
    """
    name = options.dataset_name
    on_hub = not data_files(name) and ":" not in name and not Path(name).exists()
    if on_hub:
        go_offline_if_unreachable("init", [])
    from basis_rl.cli.init_data import fitted
    from basis_rl.data.prompts import DataArguments, load_rows

    data = DataArguments(name, _CONFIG.get(name))
    try:
        rows = load_rows(data)
    except ValueError as error:
        if not on_hub:
            raise
        return {**_UNREAD, "read": f"Nothing below is fitted to it: {' '.join(str(error).split())[:200]}"}
    return fitted(data, rows, options)
