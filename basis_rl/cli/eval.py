"""``basis-rl eval MODEL --benchmarks NAME,NAME``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from basis_rl.cli.main import LOST, STOPPED, fail
from basis_rl.data import DataArguments
from basis_rl.engine import ServersLost
from basis_rl.engine.server import ServerError
from basis_rl.evaluation.arguments import EvalArguments
from basis_rl.evaluation.plan import EvalPlan
from basis_rl.recipe.build import load_by_name
from basis_rl.recipe.file import Parser, split_lists, take_lists
from basis_rl.recipe.keys import RunArguments
from basis_rl.recipe.words import check_flags, parse_value, peek, read_words
from basis_rl.rewards.registry import build_reward, split_params
from basis_rl.run.record import RUN_FILE
from basis_rl.trainer import BasisConfig

_MATH = "math_verify"
# They judge whether a rollout has the right form, not whether it is right.
_FORMS = ("format", "overlong")
# Keys of a recipe that say which problems are taken; the other keys of data say how a row is read.
_WHICH = {"dataset_name", "dataset_config", "dataset_kwargs", "dataset_train_split", "dataset_test_split",
          "max_train_samples", "test_fraction"}  # fmt: skip


def parser() -> Parser:
    """The options, `EvalArguments`; dashes and underscores are the same."""
    return Parser(EvalArguments, prog="basis-rl eval MODEL", allow_abbrev=False)


def recipe_of(model: str) -> str | None:
    """The recipe of the run whose folder `model` is or lies in (``final``, ``checkpoint-N``).

    None for other models, and for runs of a script, which have no recipe.
    """
    place = Path(model)
    folder = place.parent if place.name == "final" or place.name.startswith("checkpoint-") else place
    is_there = all((folder / name).is_file() for name in (RUN_FILE, "recipe.yaml"))
    return str(folder / "recipe.yaml") if is_there else None


def of_recipe(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an evaluation from a recipe: the problems, their prompts, the reward that grades, the length.

    Args:
        path: of the recipe.
        given: options of the command line. The rows of a ``dataset_name`` are read as the recipe reads its own.
            Benchmarks are mathematics: they take prompts and reward only from a recipe of mathematics.
    """
    config = read_words([path]).config
    if (config.get("tools") or config.get("environment")) and not given.get("benchmarks"):
        raise ValueError(
            f"'{path}' has tools or an environment, and basis-rl eval draws single turns without them. Measure it in "
            "training, by eval_strategy, or as a model without them: --recipe none and what to ask."
        )
    run = RunArguments(**{key: config[key] for key in ("reward_funcs", "reward_kwargs") if config.get(key)})
    take_lists(run, config)
    reward = grading(run.reward_funcs)
    names = {each.name for each in fields(DataArguments)} | {"on_invalid_gold"}
    if given.get("dataset_name"):
        names -= _WHICH
    if given.get("benchmarks"):
        names = {"prompt_template", "system_prompt"} if reward == _MATH else set()
    found = {key: value for key, value in config.items() if key in names}
    if names and not given.get("reward_funcs"):
        found["reward_funcs"] = [reward]
        found["reward_kwargs"] = split_params(run.reward_funcs, run.reward_kwargs or {})[reward]
    # A model of the run has it already.
    if given.get("recipe") and config.get("chat_template"):
        found["chat_template"] = config["chat_template"]
    if template := config.get("chat_template_kwargs"):
        found["chat_template_kwargs"] = template if isinstance(template, str) else json.dumps(template)
    found["max_new_tokens"] = config.get("max_completion_length", BasisConfig.max_completion_length)
    return found


def grading(names: Sequence[str]) -> str:
    """The reward function that grades: the first one that judges more than form and length."""
    return next((name for name in names if name not in _FORMS), names[0])


def build_grader(options: EvalArguments) -> Any:
    """The reward function that grades.

    Raises:
        ValueError: a name or parameters that do not fit.
    """
    kwargs = options.reward_kwargs
    kwargs = parse_value("--reward_kwargs", kwargs) if isinstance(kwargs, str) else kwargs
    name = grading(options.reward_funcs)
    params = split_params(options.reward_funcs, kwargs)[name]
    if options.answer_in != "auto":
        params["answer_in"] = options.answer_in
    if options.num_workers is not None:
        params["num_workers"] = options.num_workers
    return build_reward(name, params, {"answer_in": "auto"})


def parse(argv: Sequence[str]) -> EvalArguments:
    """The options; where the command line says nothing, those of the recipe, which are printed."""
    keys = parser()
    check_flags(argv, keys.flags())
    given = peek(argv, ["model", "recipe", "dataset_name", "benchmarks", "reward_funcs"])[0]
    asked = given.get("recipe")
    path = recipe_of(str(asked or given.get("model"))) or asked
    taken = of_recipe(str(path), given) if path and path != "none" else {}
    keys.set_defaults_with_config(**taken)
    (options,) = keys.parse_args_into_dataclasses(split_lists(argv, keys), look_for_args_file=False)
    if held := [f"{key} {value!r}" for key, value in taken.items() if value and getattr(options, key) == value]:
        print(f"From '{path}', where options say nothing else: {', '.join(held)}.", flush=True)
    return options


def main(argv: Sequence[str]) -> int:
    """Evaluate; returns the exit code."""
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--model")
    options = parse(words)
    named = (options.model, options.revision, options.trust_remote_code)
    config, tokenizer = load_by_name(*named, options.chat_template)
    kept = f"The rollouts so far are in {options.folder}; the same command resumes."
    reward = build_grader(options)
    try:
        plan = EvalPlan(options, config, tokenizer, reward)
        print(f"\n{plan.run()}\n\nRollouts and results are in {options.folder}.", flush=True)
        return 0
    except (ServerError, ServersLost) as error:
        return fail(f"{error} {kept}", LOST)
    except KeyboardInterrupt:
        return fail(f"Interrupted. {kept}", STOPPED)
    finally:
        getattr(reward, "close", lambda: None)()
