"""What a recipe's file and the command line say, made into settings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import ModelConfig, TrlParser

from basis_rl.data import DataArguments
from basis_rl.hub.redact import redact
from basis_rl.names import did_you_mean
from basis_rl.recipe.keys import DICT_KEYS, Recipe, RunArguments
from basis_rl.trainer import BasisConfig


def split_path(argv: list[str]) -> tuple[str | None, list[str]]:
    """The recipe's path, if one is given, and the other arguments."""
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 >= len(argv):
            raise ValueError("--config needs the path of a recipe.")
        return argv[at + 1], argv[:at] + argv[at + 2 :]
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return None, argv


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes ``1e-6`` for a string, since it has no point; everybody means the number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """YAML in which ``1e-6`` is a number."""
    return yaml.load(text, Loader=_Loader)


def read(path: str) -> dict[str, Any]:
    """The keys of a recipe's file.

    Raises:
        ValueError: no such file, or no mapping in YAML.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no recipe '{path}'.")
    try:
        config = parse_yaml(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"'{path}' is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"'{path}' must hold `key: value` lines.")
    return config


def _put(config: dict[str, Any], key: str, entry: str, value: Any) -> None:
    """Set ``entry`` of the dictionary, or with ``outer.entry`` (the outer one may hold dots) that of one in it."""
    outer, _, inner = entry.rpartition(".")
    whole = config.get(key) or {}
    if not isinstance(whole, dict) or (outer and not isinstance(whole.get(outer) or {}, dict)):
        raise ValueError(f"--{key}.{entry}: {key}{'.' + outer if outer and isinstance(whole, dict) else ''} must be a "
                         "mapping in the recipe.")  # fmt: skip
    config[key] = {**whole, outer: {**(whole.get(outer) or {}), inner: value}} if outer else {**whole, entry: value}


def take_dictionaries(argv: list[str], config: dict[str, Any]) -> list[str]:
    """Put ``--dict_key JSON`` and ``--dict_key.entry value`` into `config`; return the other arguments.

    ``--reward_kwargs.overlong.cache 4096`` is the entry of a dictionary within.
    """
    rest: list[str] = []
    i = 0
    while i < len(argv):
        flag, equals, inline = argv[i].partition("=")
        key, dot, entry = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or key not in DICT_KEYS:
            rest.append(argv[i])
            i += 1
            continue
        if not equals and i + 1 >= len(argv):
            raise ValueError(f"{flag} needs a value.")
        text = inline if equals else argv[i + 1]
        value = parse_yaml(text)
        if dot:
            _put(config, key, entry, value)
        elif isinstance(value, dict):
            config[key] = value
        else:
            raise ValueError(f"{flag} must be a JSON object, got {text!r}.")
        i += 1 if equals else 2
    return rest


class Parser(TrlParser):
    """Options from dataclasses; what is wrong is a ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def check_flags(self, words: Sequence[str]) -> None:
        """Raise ValueError for an option that is not known, with the nearest one that is."""
        flags = {flag for action in self._actions for flag in action.option_strings}
        for word in words:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in flags:
                raise ValueError(f"Unknown option '{flag}'.{did_you_mean(flag, flags)}")


def parser() -> Parser:
    """The parser of all keys that a recipe or the command line may hold."""
    types = (RunArguments, DataArguments, ModelConfig, BasisConfig)
    return Parser(types, prog="basis-rl", allow_abbrev=False)


def parse_recipe(argv: Sequence[str]) -> Recipe:
    """A recipe from ``[RECIPE.yaml] [--config RECIPE.yaml] [--key value ...]``; the command line wins.

    ``--baseline_kwargs.weighting vop`` changes one entry of a dictionary; an ``env`` mapping in the file sets
    environment variables, as in TRL.

    Raises:
        ValueError: no such file, unknown key ("did you mean"), value of a wrong type, settings that contradict.
    """
    keys = parser()
    path, rest = split_path(list(argv))
    config = read(path) if path else {}
    for name, value in (config.pop("env", None) or {}).items():
        os.environ[name] = str(value)
    known = {action.dest for action in keys._actions} - {"help"}
    for key in config:
        if key not in known:
            raise ValueError(f"Unknown key '{key}' in {path}.{did_you_mean(key, known)}")
    arguments = take_dictionaries(rest, config)
    keys.check_flags(arguments)
    keys.set_defaults_with_config(**{k: v for k, v in config.items() if k not in DICT_KEYS})
    run, data, model, args = keys.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    for key in DICT_KEYS:
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{key} must be a mapping (`{key}: {{name: value}}`), got {config[key]!r}.")
        setattr(data if key == "dataset_kwargs" else run, key, config.get(key) or {})
    if isinstance(run.reward_funcs, str):
        run.reward_funcs = [run.reward_funcs]
    if isinstance(run.tools, str):
        run.tools = [run.tools]
    if run.eval_benchmarks:
        words = [run.eval_benchmarks] if isinstance(run.eval_benchmarks, str) else run.eval_benchmarks
        run.eval_benchmarks = [name for word in words for name in word.split(",") if name]
    if not model.model_name_or_path:
        raise ValueError("model_name_or_path is missing: a Hub id or the path of a model.")
    parsed = {**vars(args), **vars(model), **vars(data), **vars(run)}
    given = [token.removeprefix("--").split("=")[0].replace("-", "_") for token in arguments if token.startswith("--")]
    resolved = {**config, **{key: parsed[key] for key in given if key in parsed}}
    resolved = {key: value.value if isinstance(value, Enum) else value for key, value in resolved.items()}
    resolved = redact(resolved)  # it is saved and pushed
    return Recipe(run=run, data=data, model=model, args=args, resolved=resolved, argv=list(argv))
