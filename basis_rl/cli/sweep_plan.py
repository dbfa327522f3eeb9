"""Which runs a sweep consists of: one recipe, several baselines, seeds and settings, the same number of rollouts."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import yaml

from basis_rl.baselines import BASELINES, Baseline
from basis_rl.names import did_you_mean, import_object
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.recipe.words import peek
from basis_rl.report.runs import what_counts
from basis_rl.run.seams import attributes
from basis_rl.trainer import BasisConfig

_OURS = {"seed": "--seeds", "baseline": "--baselines", "resume_from_checkpoint": "nothing"}
# Rollouts per prompt for a baseline that needs several, if no setting says how many.
_GROUP = 8
# Keys whose values may contain commas, which do not separate runs. The same holds for keys that do not count as
# settings of a run (`what_counts`).
_WHOLE = {"system_prompt", "prompt_template", "solution_pattern", "keep_columns", "reward_funcs", "serve_args"}


@dataclass(frozen=True)
class Planned:
    """One run: its folder's name, the arguments of `basis-rl train`, and what was adapted to its baseline."""

    name: str
    argv: list[str]
    recipe: Recipe
    notes: list[str]


def parse_entry(text: str) -> tuple[str, dict[str, str]]:
    """One of ``--baselines``, ``NAME[:KEY=VALUE]...``: the name (registered, or ``module:Class``), and the settings
    that only its runs have.

    Raises:
        ValueError: no such baseline.
    """
    parts = text.split(":")
    settings = dict(part.removeprefix("--").split("=", 1) for part in parts if "=" in part)
    name = ":".join(part for part in parts if "=" not in part)
    if ":" not in name and name not in BASELINES:
        raise ValueError(f"Unknown baseline '{name}'.{did_you_mean(name, BASELINES)} Known: {', '.join(BASELINES)}.")
    return name, settings


def plan(
    recipe: str,
    baselines: Sequence[str],
    seeds: Sequence[int],
    output: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    budget: int | None = None,
    num_generations: int | None = None,
) -> list[Planned]:
    """The runs, seed by seed and each with all baselines. All of them draw the same number of rollouts.

    A launcher's processes are those of `several`, within which this is called.

    - A baseline that needs a group, where the recipe has one rollout per prompt, gets `num_generations` of them
      (default 8): as many rollouts per batch, of fewer prompts. The others keep one. Evaluation stays as the recipe
      has it.
    - Parameters of the recipe's ``baseline_kwargs`` that another baseline does not have are left out.
    - ``max_steps`` follows from the number of rollouts, in which the greedy ones of `remax` count.

    Args:
        recipe: path.
        baselines: see `parse_entry`.
        seeds: of the runs.
        output: folder of the sweep; default: the recipe's ``output_dir`` with ``-sweep``.
        overrides: ``--key value`` for all runs; ``--key a,b`` makes a run of each.
        budget: rollouts of each run; default: those of the recipe.
        num_generations: rollouts per prompt; where the recipe has one, of the baselines that need a group.

    Raises:
        ValueError: a setting that is wrong, or a number of rollouts that is not known.
    """
    common, grid = _split_grid(overrides)
    base = parse_recipe([recipe, *common])
    output = output or Path(f"{base.args.output_dir}-sweep")
    total = budget if budget is not None else _total(base, BASELINES.get(base.run.baseline))
    variants: dict[str, tuple[list[str], list[str]]] = {}
    for text in baselines:
        baseline, own = parse_entry(text)
        for values in itertools.product(*grid.values()):
            # The entry's own settings win over those of all runs.
            settings = own | {k: v for k, v in zip(grid, values, strict=True) if k not in own and _takes(baseline, k)}
            name = "-".join([baseline, *(f"{k}={v}" for k, v in settings.items())])
            variants[name] = _adapt([recipe, *common], base, baseline, settings, total, num_generations)
    planned = []
    for seed in seeds:
        for name, (argv, notes) in variants.items():
            folder = re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{name}-seed{seed}")
            arguments = [*argv, "--seed", str(seed), "--output_dir", str(output / folder)]
            arguments += ["--resume_from_checkpoint", "auto"]
            # With one repository, each run would overwrite the one before.
            if base.args.push_to_hub and base.args.hub_model_id:
                own = re.sub(r"[^A-Za-z0-9._-]+", "-", folder)
                arguments += ["--hub_model_id", f"{base.args.hub_model_id}-{own}"]
            planned.append(Planned(folder, arguments, parse_recipe(arguments), notes))
    return planned


def launcher_processes(launcher: str) -> int:
    """How many processes ``accelerate launch ...`` or ``torchrun ...`` starts, by its options or its config file.

    Raises:
        ValueError: it does not say, and a number of rollouts could not be kept.
    """
    words = shlex.split(launcher)
    found, _ = peek(words, ["num_processes", "nproc_per_node", "nnodes", "config_file"])
    if "num_processes" in found:
        return int(found["num_processes"])
    if "nproc_per_node" in found:
        return int(found["nproc_per_node"]) * int(found.get("nnodes") or 1)
    file = Path(str(found.get("config_file", "")))
    if file.is_file():
        return int((yaml.safe_load(file.read_text()) or {}).get("num_processes", 1))
    if words and Path(words[0]).name in ("accelerate", "torchrun"):
        raise ValueError("--launcher: how many processes does it start? Add --num_processes N, or --config_file FILE.")
    return 1


def _split_grid(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Overrides with one value, and those with several."""
    common: list[str] = []
    grid: dict[str, list[str]] = {}
    words = list(overrides)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        key = flag.removeprefix("--")
        if not flag.startswith("--") or (not equals and not words):
            raise ValueError(f"'{flag}': expected `--key value` or `--key value,value`.")
        if key in _OURS:
            raise ValueError(f"--{key} is set by the sweep for each run; give {_OURS[key]} instead.")
        value = value if equals else words.pop(0)
        if "," in value and value[0] not in "[{" and key not in _WHOLE and what_counts({key: value}):
            grid[key] = value.split(",")
        else:
            common += [flag, value]
    return common, grid


def several(processes: int) -> AbstractContextManager[None]:
    """Within it the settings of a run are those that each of `processes` would see, though this is one process."""
    return attributes(BasisConfig, world_size=property(lambda self: processes))


def _kind(name: str) -> type[Baseline]:
    kind: type[Baseline] = import_object(name, "baseline") if ":" in name else BASELINES[name]
    return kind


def _takes(baseline: str, key: str) -> bool:
    """Whether a key is of every recipe, or a parameter that this baseline has."""
    section, _, name = key.partition(".")
    return section != "baseline_kwargs" or name in inspect.signature(_kind(baseline)).parameters


def _adapt(
    argv: Sequence[str], base: Recipe, baseline: str, settings: dict[str, str], total: int, num_generations: int | None
) -> tuple[list[str], list[str]]:
    """The arguments of an entry's runs, and what differs from the recipe because its baseline needs it."""
    kind = _kind(baseline)
    notes = []
    arguments = [*argv, "--baseline", baseline]
    given = base.run.baseline_kwargs or {}
    if baseline != base.run.baseline and given:
        kept = {k: v for k, v in given.items() if k in inspect.signature(kind).parameters}
        arguments += ["--baseline_kwargs", json.dumps(kept)]
        if kept != given:
            notes.append(f"without baseline_kwargs {', '.join(k for k in given if k not in kept)}")
    rollouts = base.args.num_generations
    needed = rollouts < kind.min_group_size
    if "num_generations" not in settings and (needed or (num_generations and rollouts > 1)):
        size = num_generations or _GROUP
        arguments += ["--num_generations", str(size)]
        notes.append(f"num_generations {size}")
    if base.args.eval_strategy != "no" and base.args.num_generations_eval is None:
        arguments += ["--num_generations_eval", str(rollouts)]
    for key, value in settings.items():
        arguments += [f"--{key}", value]
    if "max_steps" in settings:
        return arguments, notes
    drawn, updates = _batch(parse_recipe(arguments), kind)
    batches = total // drawn
    steps = int(batches * updates)
    if steps < 1:
        raise ValueError(f"{baseline}: {total:,} rollouts are less than one optimizer step. Raise --budget.")
    if math.ceil(base.args.max_steps / updates) != batches:
        arguments += ["--max_steps", str(steps)]
        notes.append(f"max_steps {steps}")
    return arguments, notes


def _batch(recipe: Recipe, kind: type[Baseline] | None) -> tuple[int, float]:
    """Rollouts of a generation batch, and optimizer steps on it."""
    args = recipe.args
    rollouts = args.generation_batch_size
    if kind is not None and "greedy_rewards" in kind.requires:
        rollouts += args.generation_batch_size // args.num_generations
    return rollouts, args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps


def _total(base: Recipe, kind: type[Baseline] | None) -> int:
    if base.args.max_steps <= 0:
        raise ValueError(
            "The recipe counts epochs, in which one rollout per prompt and several are not as many rollouts. Give "
            "--budget ROLLOUTS, or max_steps in the recipe."
        )
    rollouts, updates = _batch(base, kind)
    return math.ceil(base.args.max_steps / updates) * rollouts
