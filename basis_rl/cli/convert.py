"""``basis-rl convert FOLDER [RECIPE]``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from basis_rl.cli.options import convert_parser
from basis_rl.clusters import codebook
from basis_rl.data import DataArguments, load_prompts, prompt_id
from basis_rl.data.rows import bare_problem
from basis_rl.evaluation.rollouts import read_rollouts
from basis_rl.evaluation.runner import golds_fingerprint
from basis_rl.identity import ID_SCHEME
from basis_rl.recipe.build import build_recipe_baseline, build_rewards, load_training_data
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.run.artefacts import METADATA, Kind, write_whole
from basis_rl.run.checkpoint import LAST, MANIFEST, checkpoints, damage, finish
from basis_rl.trainer.plan import Plan, with_data
from basis_rl.trainer.state import FILE_NAME, SETTINGS, as_json, dataset_identity
from basis_rl.values import table

_EVALUATION = ".settings.json"


def main(argv: Sequence[str]) -> int:
    """Convert what is in the folder. Ids of the present scheme stay as they are."""
    options = convert_parser().parse_args(list(argv))
    folder: Path = options.folder
    _put_back(folder)
    of_run = [path for path in (folder, *checkpoints(folder), folder / LAST) if (path / MANIFEST).is_file()]
    kinds = [kind for kind in (table.KIND, codebook.KIND) if (folder / kind.main_file).is_file()]
    evaluations = sorted(folder.glob(f"*{_EVALUATION}"))
    if not (of_run or kinds or evaluations):
        raise ValueError(f"'{folder}' holds no value table, prompt codebook, checkpoint or evaluation. Name theirs.")
    for path in evaluations:
        convert_evaluation(path)
    if of_run or kinds:
        problems = None if options.own_ids else IdMap(_recipe(folder, options.recipe))
        for kind in kinds:
            convert_artefact(folder, kind, problems)
        for path in of_run:
            convert_checkpoint(path, problems)
    return 0


def _put_back(folder: Path) -> None:
    """Undo half of a conversion: killed between its two renames, it has left a checkpoint under its temporary name."""
    for old in folder.glob(".*.old"):
        place = folder / old.name[1:].removesuffix(".old")
        if (old / FILE_NAME).is_file() and not place.exists():
            old.rename(place)


def _recipe(folder: Path, given: str | None) -> Recipe:
    files = [place / "recipe.yaml" for place in (folder, folder.parent)]
    found = given or next((str(file) for file in files if file.is_file()), None)
    if found is None:
        raise ValueError(
            f"'{folder}' does not say which problems it is of. Name the recipe that it was made with, `basis-rl "
            f"convert {shlex.quote(str(folder))} RECIPE`; or, if the data set has its own column prompt_id, --own_ids."
        )
    return parse_recipe([found])


class IdMap:
    """The problems of a recipe by their ids, of all rows of the data set, whatever the recipe holds out.

    Attributes:
        recipe: names them.
        old: present id -> that of scheme 1.
        new: id of scheme 1 -> the present one, of the first row with that text.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        bare: Any = {"prompt_template": None, "system_prompt": None, "test_fraction": 0.0, "max_train_samples": None}
        rows = _rows(replace(recipe, data=replace(recipe.data, **bare)))
        strip = recipe.data.strip_instructions
        texts = {row["prompt_id"]: bare_problem(row["prompt"], strip_instructions=strip) for row in rows}
        self.old = {name: prompt_id(text or "") for name, text in texts.items()}
        self.new = {before: name for name, before in reversed(self.old.items())}

    @cached_property
    def trained(self) -> list[str]:
        """Present ids of the problems that the recipe trains on, in their order."""
        plan = Plan(self.recipe.args, reward_funcs=build_rewards(self.recipe))
        return list(with_data(plan, _rows(self.recipe)).train_dataset["prompt_id"])


def _rows(recipe: Recipe) -> Any:
    """The recipe's problems as plain texts: their ids do not depend on a tokenizer."""
    tokenizer: Any = SimpleNamespace(chat_template=None)
    return load_training_data(recipe, tokenizer)


def convert_artefact(folder: Path, kind: Kind, problems: IdMap | None) -> None:
    """Rename the prompts of a value table or codebook.

    Raises:
        ValueError: it has prompts that are not the recipe's.
    """
    _, metadata = kind.open(folder, any_ids=True)
    known = metadata["provenance"]
    # Older tables did not record the template's day; most are built within one day.
    if kind is table.KIND and "date" in known:
        metadata["provenance"] = {"template_day": known["date"], **known}
    if problems is not None:
        path = folder / kind.main_file
        rows = pq.read_table(path)
        names = rows["prompt_id"].to_pylist()
        unknown = [name for name in names if name not in problems.new and name not in problems.old]
        if unknown:
            raise ValueError(
                f"{len(unknown)} of {len(names)} prompts of the {kind.what} '{folder}' are not in the data set of the "
                f"recipe; the first is prompt_id '{unknown[0]}'. Name the recipe that it was made with."
            )
        renamed = pa.array([problems.new.get(name, name) for name in names], pa.string())
        part = path.with_name(f".{path.name}.part")
        pq.write_table(rows.set_column(rows.column_names.index("prompt_id"), "prompt_id", renamed), part)
        part.replace(path)
    write_whole(folder / METADATA, json.dumps({**metadata, "id_scheme": ID_SCHEME}, indent=2) + "\n")
    print(f"Converted the {kind.what} {folder}.")


def convert_checkpoint(folder: Path, problems: IdMap | None) -> None:
    """Rename the prompts in the states of a checkpoint: beliefs, draws, batches that are still to be trained on.

    Raises:
        ValueError: it is damaged, or was trained on other problems, or the data set has rows with one text and other
            golds, of which the run has not trained on all.
    """
    content = torch.load(folder / FILE_NAME, weights_only=True)
    if what := damage(folder):
        raise ValueError(f"The checkpoint '{folder}' is damaged ({what}) and cannot be converted. Restore its files.")
    ids: Mapping[str, str] = {}
    fixed: dict[str, Any] = {}
    if problems is not None:
        ids = problems.new
        names = problems.trained
        before = [problems.old[name] for name in names]
        if content.get("dataset") not in (None, dataset_identity(before), dataset_identity(names)):
            raise ValueError(
                f"The checkpoint '{folder}' was trained on other problems than those of the recipe, or only on the "
                "first of several rows with one text and different golds. Start a new run from its model."
            )
        content["dataset"] = content.get("dataset") and dataset_identity(names)
        parameters = build_recipe_baseline(problems.recipe.run).parameters
        fixed = {f"baseline.{key}": as_json(value) for key, value in parameters.items() if hasattr(value, "digest")}
    whole = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(whole, ignore_errors=True)
    # Links instead of copies, because weights are large.
    shutil.copytree(folder, whole, copy_function=os.link)
    _save(whole / FILE_NAME, {**_renamed(content, ids), "id_scheme": ID_SCHEME})
    for path in whole.glob("phase_*.pt"):
        _save(path, _renamed(torch.load(path, weights_only=True, map_location="cpu"), ids))
    if (whole / SETTINGS).is_file():
        settings = json.loads((whole / SETTINGS).read_text())
        settings["fixed"] |= fixed
        settings["data"] |= {"dataset": content.get("dataset"), "id_scheme": ID_SCHEME}
        write_whole(whole / SETTINGS, json.dumps(settings, indent=1, sort_keys=True) + "\n")
    finish(whole)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    whole.rename(folder)
    shutil.rmtree(old)
    print(f"Converted the checkpoint {folder}.")


def _save(path: Path, content: Any) -> None:
    # The file is a hard link: without this, the original would be overwritten.
    path.unlink()
    torch.save(content, path)


def _renamed(value: Any, ids: Mapping[str, str]) -> Any:
    """A state with other prompt ids, as keys and as values."""
    if isinstance(value, str):
        return ids.get(value, value)
    if isinstance(value, dict):
        return {_renamed(key, ids): _renamed(entry, ids) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_renamed(entry, ids) for entry in value)
    return value


def convert_evaluation(path: Path) -> None:
    """Rename the problems of the rollouts beside a file of settings.

    Raises:
        ValueError: it is not finished, or its problems are not where they were.
    """
    settings = json.loads(path.read_text())
    rollouts = path.with_name(path.name.removesuffix(_EVALUATION) + ".jsonl")
    if settings.get("id_scheme") == ID_SCHEME:
        return
    bare = {**settings["source"], "prompt_template": "{prompt}", "on_missing_gold": "drop"}
    new: dict[str, str] = {}
    for row in load_prompts(DataArguments(**bare), conversational=False):
        new.setdefault(prompt_id(row["prompt"]), row["prompt_id"])
    found = read_rollouts(rollouts)
    # A conversion that was stopped may have renamed the rollouts, but not the settings yet.
    kept = {name: found.get(name) or found[new[name]] for name in new if name in found or new[name] in found}
    golds = [(name, kept[name][0].gold) for name in new if name in kept]
    if golds_fingerprint(golds) != settings["problems"]:
        raise ValueError(
            f"'{rollouts}' cannot be converted: it is not finished, or {settings['source']} has other problems by now. "
            "Finish it with the version that began it, or choose another --output_dir."
        )
    settings |= {"problems": golds_fingerprint((new[name], gold) for name, gold in golds), "id_scheme": ID_SCHEME}
    lines = [replace(row, prompt_id=new[name]).line() for name, rows in kept.items() for row in rows]
    write_whole(rollouts, "".join(lines))
    write_whole(path, json.dumps(settings, indent=2) + "\n")
    print(f"Converted the evaluation {rollouts}.")
