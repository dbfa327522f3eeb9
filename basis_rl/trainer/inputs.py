"""What a Python user hands to `BasisTrainer`, made into the objects that it works with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from basis_rl.baselines import BASELINES, Baseline, build_baseline
from basis_rl.names import import_object
from basis_rl.rewards.registry import POOL, REWARDS, build_reward
from basis_rl.samplers import SAMPLERS, PromptSampler, build_sampler
from basis_rl.trainer.config import BasisConfig


def as_config(args: BasisConfig | None, model: Any) -> BasisConfig:
    """The settings; without any TRL's defaults, in a folder that is named after the model.

    Raises:
        ValueError: something else, such as TRL's `GRPOConfig` or a class.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return BasisConfig(f"{name.rstrip('/').split('/')[-1]}-BASIS")
    refuse_class("args", args, ())
    if not isinstance(args, BasisConfig):
        raise ValueError(f"args must be a BasisConfig, got {type(args).__name__}; it takes the same settings.")
    return args


def as_baseline(baseline: str | Baseline) -> Baseline:
    """The baseline by its registered name, or the object.

    Raises:
        ValueError: an unknown name, a class, or an object that is not a baseline.
    """
    if isinstance(baseline, str):
        return build_baseline(baseline)
    refuse_class("baseline", baseline, [name for name, kind in BASELINES.items() if kind is baseline])
    if not isinstance(baseline, Baseline):
        raise ValueError(
            f"baseline must be a registered name or an object of a subclass of basis_rl.Baseline, got a "
            f"{type(baseline).__name__}."
        )
    return baseline


def as_sampler(sampler: str | PromptSampler) -> PromptSampler:
    """The prompt sampler by its name, or the object.

    Raises:
        ValueError: an unknown name, or a class; `check_sampler_fits` refuses other objects.
    """
    if isinstance(sampler, str):
        return build_sampler(sampler)
    refuse_class("prompt_sampler", sampler, [name for name, kind in SAMPLERS.items() if kind is sampler])
    return sampler


def as_rewards(reward_funcs: Any, args: BasisConfig) -> list[Any]:
    """The reward functions as a list; registered names and ``pool:module:function`` are built, dotted paths imported.

    What is neither, such as a Hub id with a slash, is a reward model, as in TRL.

    Raises:
        ValueError: an unknown name, or a class.
    """
    if reward_funcs is None:
        return []
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    return [_reward(each, args) for each in given]


def _reward(given: Any, args: BasisConfig) -> Any:
    if not isinstance(given, str):
        refuse_class("reward_funcs", given, [name for name, kind in REWARDS.items() if kind is given])
        return given
    if "/" in given or Path(given).is_dir():
        return given
    if "." in given and not given.startswith(POOL):
        return import_object(given, "reward function")
    return build_reward(given, {}, {"max_completion_length": args.max_completion_length})


def as_dataset(rows: Any, what: str) -> Any:
    """A list of rows, each a dictionary, as a `Dataset`, also within a mapping of several; everything else as it is.

    Raises:
        ValueError: a list that is empty or holds something else than dictionaries, a name.
    """
    if isinstance(rows, str):
        raise ValueError(
            f"{what} is the name '{rows}'; load it first: "
            f"basis_rl.data.load_prompts(DataArguments('{rows}'), conversational=True)."
        )
    if isinstance(rows, dict):
        return {name: as_dataset(each, f"{what}['{name}']") for name, each in rows.items()}
    if not isinstance(rows, Sequence):
        return rows
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"{what} must be a Dataset or a list of rows, such as [{{'prompt': '1 + 1 =', 'solution': '2'}}, ...]."
        )
    columns = list(rows[0])
    for index, row in enumerate(rows):
        if set(row) != set(columns):
            raise ValueError(f"{what}: row {index} has the columns {list(row)}, row 0 has {columns}.")
    return Dataset.from_list([dict(row) for row in rows])


def refuse_class(what: str, given: Any, names: Collection[str]) -> None:
    """Raise ValueError for a class where an object is needed; `names` are what it is registered as."""
    if isinstance(given, type):
        name = given.__name__
        registered = "".join(f", or its name '{each}'" for each in names)
        raise ValueError(f"{what} must be an object, and {name} is a class: give {name}(...){registered}.")
