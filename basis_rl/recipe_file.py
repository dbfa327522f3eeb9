"""What a recipe's file and the command line say, before it is made into settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DICT_KEYS = ("baseline_kwargs", "reward_kwargs", "dataset_kwargs", "tool_kwargs")


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
