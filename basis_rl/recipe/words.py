"""The words of a recipe and of the command line, read without importing torch or TRL.

A misspelt key and ``--help`` are answered from the sources of the configurations (`basis_rl.recipe.sources`).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from basis_rl import resources
from basis_rl.names import Mistakes, as_name, check_columns, data_files, did_you_mean
from basis_rl.recipe.sources import SECTIONS, known_keys, section_of
from basis_rl.recipe.trl_recipes import from_trl

# The keys whose values are mappings, which argparse does not know.
DICT_KEYS = (
    "baseline_kwargs", "reward_kwargs", "dataset_kwargs", "tool_kwargs", "environment_kwargs", "prompt_sampler_kwargs",
)  # fmt: skip
_COLUMNS = ("prompt_column", "solution_column", "context_column", "difficulty_column")


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-6`` is a number: to YAML 1.1 it is a string, because it has no point. A key that stands twice
    is an error, instead of taking its last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if str(key.value) in lines and key.tag != "tag:yaml.org,2002:merge":
                both = f"lines {lines[str(key.value)]} and {line}"
                raise yaml.YAMLError(f"the key '{key.value}' stands twice, in {both}. Leave one out.")
            lines[str(key.value)] = line
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_ENTRIES:
            raise yaml.YAMLError(f"its anchors make a mapping of more than {_MOST_ENTRIES:,} entries")


# Above what any recipe has, and below what a recursion over it can take.
_MOST_ENTRIES = 100_000
_MOST_NESTED = 50
_FLOAT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


@dataclass(frozen=True)
class Words:
    """What the user wrote, before any value is checked.

    Attributes:
        path: the recipe's file; None without one.
        config: the keys of the file, named as on the command line, with the dictionaries of the command line merged in.
        arguments: the other words of the command line.
        notes: what was translated from a ``trl grpo`` file, in sentences.
    """

    path: str | None
    config: dict[str, Any]
    arguments: list[str]
    notes: list[str]


def read_words(argv: Sequence[str]) -> Words:
    """``[RECIPE.yaml] [--config RECIPE.yaml] [--key value ...]``, where keys of a ``trl grpo`` file are translated.

    Raises:
        ValueError: no such file, no mapping in YAML, a dictionary's entry that does not fit, a key outside its section.
    """
    path, rest = split_path(list(argv))
    config, notes = from_trl(without_sections(read_recipe(path), path)) if path else ({}, [])
    return Words(path, config, take_dictionaries(rest, config), notes)


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


def parse_yaml(text: str) -> Any:
    """YAML in which ``1e-6`` is a number.

    Raises:
        YAMLError: also where it is nested too deep, grows by its anchors, or has a value that does not fit its tag.
    """
    try:
        value = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {_MOST_NESTED} deep") from None
    # What PyYAML's constructors raise for dates, numbers and tags.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise yaml.YAMLError(f"a value does not fit its type: {error}") from error
    _check_size(value)
    return value


def _check_size(value: Any) -> None:
    """What stands in several places by an anchor counts in each of them, and long texts count by their lines."""
    entries = 0
    left = [(value, 0)]
    while left:
        each, depth = left.pop()
        inner = [*each.values()] if isinstance(each, dict) else each if isinstance(each, list) else []
        entries += len(inner) + (len(each) // 80 if isinstance(each, str) else 0)
        if entries > _MOST_ENTRIES:
            raise yaml.YAMLError(f"it has more than {_MOST_ENTRIES:,} entries, or anchors make so many of it")
        if depth > _MOST_NESTED:
            raise yaml.YAMLError(f"it is nested more than {_MOST_NESTED} deep, or an anchor contains itself")
        left += [(entry, depth + 1) for entry in inner]


def parse_value(flag: str, text: str) -> Any:
    """The value of an option, as YAML; a ValueError that names the option if it is not YAML."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{flag} {text}: this is not valid YAML: {problem}. Quote a text: '\"{text}\"'.") from error


def peek(arguments: Sequence[str], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of some options by their names, without parsing any other; and the words that remain.

    An option is ``--name value``, ``--name=value`` or ``--name`` alone, which is True; dashes and underscores are the
    same. The last one counts.
    """
    # No abbreviations: --lr must not be read as --lr_scheduler_type.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in names:
        parser.add_argument(*{f"--{name}", f"--{name.replace('_', '-')}"}, dest=name, nargs="?", const=True)
    found, rest = parser.parse_known_args(list(arguments))
    return vars(found), rest


def read_recipe(path: str) -> dict[str, Any]:
    """The keys of a recipe's file, or of a shipped recipe's (``papers/basis-qwen3-4b``).

    Raises:
        ValueError: no such file, or no mapping in YAML.
    """
    return read_mapping(resources.recipe(path), path)


def read_mapping(file: Path, path: str) -> dict[str, Any]:
    """The keys of a file in YAML, which messages call `path`.

    Raises:
        ValueError: it is no mapping in YAML.
    """
    try:
        config = parse_yaml(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' is not valid YAML: {error}") from error
    if config is None:
        raise ValueError(f"'{path}' is empty. It must hold `key: value` lines.")
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ValueError(f"'{path}' must hold `key: value` lines, in which each key is a text.")
    return config


def with_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as a recipe has them, from their names on the command line."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        section, name = section_of(key) or ("", key)
        place = found.setdefault(section, {}) if section else found
        place[name] = value
    return found


def without_sections(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Keys by their names on the command line, from those of the recipe at `path`.

    Raises:
        ValueError: a section that is no mapping, a key that stands outside its section.
    """
    if outside := ", ".join(".".join(place) for place in map(section_of, config) if place):
        raise ValueError(f"'{path}': write {outside} in sections of their own, as in `values: {{num_rollouts: 8}}`.")
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key not in SECTIONS:
            found[key] = value
        elif isinstance(value or {}, dict):
            found |= {f"{key}_{name}": each for name, each in (value or {}).items()}
        else:
            raise ValueError(f"{key} in '{path}' must be a mapping, `{key}: {{name: value}}`, got {value!r}.")
    return found


def set_environment(config: Mapping[str, Any]) -> None:
    """Set the variables of the recipe's ``env`` mapping, as TRL does."""
    given = config.get("env") or {}
    # Messages name no value, which may be a secret.
    if not isinstance(given, dict):
        raise ValueError(f"env must be a mapping (`env: {{NAME: value}}`), got a {type(given).__name__}.")
    for name, value in given.items():
        try:
            os.environ[name] = str(value)
        except (TypeError, ValueError, OSError) as error:
            raise ValueError(f"env: the variable {name!r} cannot be set: {error}.") from error


def _put(config: dict[str, Any], flag: str, path: Sequence[str], value: Any) -> None:
    """Set the value at a path of names, ``[reward_kwargs, overlong, cache]``; dictionaries on the way are copied."""
    place = config
    for depth, name in enumerate(path[:-1], 1):
        if not isinstance(place.get(name) or {}, dict):
            raise ValueError(f"{flag}: {'.'.join(path[:depth])} must be a mapping in the recipe.")
        place[name] = dict(place.get(name) or {})
        place = place[name]
    place[path[-1]] = value


def take_dictionaries(argv: Sequence[str], config: dict[str, Any]) -> list[str]:
    """Put ``--dict_key JSON`` and ``--dict_key.entry value`` into `config`; return the other arguments.

    ``--reward_kwargs.overlong.cache 4096`` is the entry of a dictionary within.
    """
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, inline = word.partition("=")
        key, dot, entry = flag.removeprefix("--").partition(".")
        # The key of a reward may hold dots itself: `module.name`. Only the last one separates.
        path = [key, *filter(None, entry.rpartition(".")[::2])]
        if not flag.startswith("--") or key not in DICT_KEYS:
            rest.append(word)
            continue
        text = inline if equals else next(words, None)
        if text is None:
            raise ValueError(f"{flag} needs a value.")
        value = parse_value(flag, text)
        if not dot and not isinstance(value, dict):
            raise ValueError(f"{flag} must be a JSON object, got {text!r}.")
        _put(config, flag, path, value)
    return rest


def check_keys(words: Words, keys: Collection[str], flags: Collection[str]) -> None:
    """Raise ValueError for keys of the file and options that are not known, with the nearest ones that are."""
    wrong = Mistakes()
    for key in words.config:
        if key not in keys and key != "env":
            shown = ".".join(section_of(key) or [key])
            near = did_you_mean(shown, [".".join(section_of(each) or [each]) for each in keys])
            wrong.found.append(ValueError(f"Unknown key '{shown}' in {words.path}.{near}"))
    wrong.tried(check_flags, words.arguments, flags)
    wrong.tell()


def check_flags(arguments: Sequence[str], flags: Collection[str]) -> None:
    """Raise ValueError for options that are not known, with the nearest ones that are."""
    wrong = Mistakes()
    for word in arguments:
        flag = word.split("=")[0]
        if flag.startswith("--") and flag not in flags:
            wrong.found.append(ValueError(f"Unknown option '{flag}'.{did_you_mean(flag, flags)}"))
    wrong.tell()


def check_data(config: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Raise ValueError for a file of problems that is not there, or lacks a column that is named for it.

    Args:
        config: keys of a recipe.
        arguments: of the command line, which win.
    """
    given = {**config, **peek(arguments, ["dataset_name", *_COLUMNS])[0]}
    name = as_name(given.get("dataset_name"))
    data_files(name)
    check_columns(name, {key: given.get(key) for key in _COLUMNS})


def check_words(argv: Sequence[str]) -> None:
    """Refuse the wrong names that `parse_recipe` would refuse, in a fraction of its time; also sets the recipe's
    ``env``.

    Raises:
        ValueError: see `read_words` and `check_keys`; and a file of problems that is not there.
    """
    words = read_words(argv)
    set_environment(words.config)
    try:
        keys = known_keys()
    except LookupError:
        # A version of TRL or transformers that we cannot read: leave the check to `parse_recipe`, which imports them.
        return
    wrong = Mistakes()
    wrong.tried(check_keys, words, [key.name for key in keys], {flag for key in keys for flag in key.flags})
    wrong.tried(check_data, words.config, words.arguments)
    wrong.tell()
