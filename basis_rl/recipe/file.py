"""Makes settings of what a recipe's file and the command line say."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, NoReturn

from trl import ModelConfig, TrlParser

from basis_rl.data import DataArguments
from basis_rl.names import require_extra
from basis_rl.recipe.keys import Recipe, RunArguments
from basis_rl.recipe.trl_recipes import translate_rewards
from basis_rl.recipe.words import DICT_KEYS, check_keys, peek, read_words, set_environment, with_sections
from basis_rl.rewards.registry import split_params
from basis_rl.run.redact import redact
from basis_rl.trainer import BasisConfig

TYPES = (RunArguments, DataArguments, ModelConfig, BasisConfig)


class Parser(TrlParser):
    """Options from dataclasses; a mistake is a ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def flags(self) -> set[str]:
        """All options that are known."""
        return {flag for action in self._actions for flag in action.option_strings}


def parser() -> Parser:
    """The parser of all keys that a recipe or the command line may hold."""
    return Parser(TYPES, prog="basis-rl", allow_abbrev=False)


def parse_recipe(argv: Sequence[str]) -> Recipe:
    """A recipe from ``[RECIPE.yaml] [--config RECIPE.yaml] [--key value ...]``; the command line wins.

    ``--baseline_kwargs.weighting vop`` changes one entry of a dictionary; an ``env`` mapping in the file sets
    environment variables, as in TRL.

    Raises:
        ValueError: no such file, unknown key ("did you mean"), value of a wrong type, settings that contradict.
    """
    keys = parser()
    words = read_words(argv)
    set_environment(words.config)
    check_keys(words, {action.dest for action in keys._actions} - {"help"}, keys.flags())
    config = {k: v for k, v in words.config.items() if k != "env"}
    arguments = split_lists(words.arguments, keys)
    serve = {**config, **peek(arguments, ["serve"])[0]}.get("serve", False)
    # A server that is started is meant to be used: without these keys, training would generate by itself.
    if str(serve).lower() in ("true", "t", "yes", "y", "1"):
        config = {"use_vllm": True, "vllm_mode": "server", **config}
    # Checked here, because the trainer's settings, which are made below, fail without a GPU.
    if not {**config, **peek(arguments, ["model_name_or_path"])[0]}.get("model_name_or_path"):
        recipe = "" if words.path else " There is no recipe either: `basis-rl init my.yaml` writes one."
        raise ValueError(f"model_name_or_path is missing: a Hub id or the path of a model.{recipe}")
    keys.set_defaults_with_config(**{k: v for k, v in config.items() if k not in DICT_KEYS})
    run, data, model, args = keys.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    for key in DICT_KEYS:
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{key} must be a mapping (`{key}: {{name: value}}`), got {config[key]!r}.")
        setattr(data if key == "dataset_kwargs" else run, key, config.get(key) or {})
    config, notes = take_lists(run, config)
    if model.use_peft:
        require_extra("peft", "use_peft")
    parsed = {**vars(args), **vars(model), **vars(data), **vars(run)}
    given = [token.removeprefix("--").split("=")[0].replace("-", "_") for token in arguments if token.startswith("--")]
    # `--no_KEY` sets KEY to false.
    given = [key if key in parsed else key.removeprefix("no_") for key in given]
    resolved = {**config, **{key: parsed[key] for key in given if key in parsed}}
    if run.environment and "reward_funcs" not in resolved:
        # It may have a reward of its own, which the default would be added to.
        run.reward_funcs = []
    resolved = {key: value.value if isinstance(value, Enum) else value for key, value in resolved.items()}
    if "prompt_template" in resolved:
        # That of a file, so that the recipe of a run does not depend on it.
        resolved["prompt_template"] = data.prompt_template
    # It is saved and pushed, so it must hold no secret.
    resolved = redact(with_sections(resolved))
    notes = [*words.notes, *notes]
    return Recipe(run=run, data=data, model=model, args=args, resolved=resolved, argv=list(argv), notes=notes)


def split_lists(arguments: Sequence[str], keys: argparse.ArgumentParser) -> list[str]:
    """The command line with ``--key a,b`` written as ``--key a b`` for keys that are lists."""
    lists = {flag for action in keys._actions if action.nargs in ("+", "*") for flag in action.option_strings}
    found: list[str] = []
    inside = False
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            inside = flag in lists
            found += [flag, *listed(value)] if inside and equals else [word]
        else:
            found += listed(word) if inside else [word]
    return found


def listed(word: str) -> list[str]:
    """``a,b`` as a list; a text with other characters in it, such as a regular expression, is one entry."""
    parts = [part for part in re.split(r"\s*,\s*", word.strip()) if part]
    return parts if all(re.fullmatch(r"[\w.:/@+=-]+", part) for part in parts) else [word]


def take_lists(run: RunArguments, config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Make lists of what may also be one word, and translate TRL's names of rewards, in `run` and in `config`."""
    for key in ("reward_funcs", "tools", "eval_benchmarks", "values_servers"):
        given = getattr(run, key)
        if given:
            words = [given] if isinstance(given, str) else given
            setattr(run, key, [name for word in words for name in listed(word)])
    run.reward_funcs, parameters, notes = translate_rewards(run.reward_funcs)
    if notes:
        config = {**config, "reward_funcs": run.reward_funcs}
        if parameters:
            own = split_params(run.reward_funcs, run.reward_kwargs or {})
            run.reward_kwargs = {name: {**parameters.get(name, {}), **own[name]} for name in run.reward_funcs}
            config["reward_kwargs"] = run.reward_kwargs
    return config, notes
