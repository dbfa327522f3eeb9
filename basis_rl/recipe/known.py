"""``python -m basis_rl.recipe.known`` writes ``known.json``: every key with its type, default and meaning.

A misspelt key and ``--help`` are answered from that file (`basis_rl.recipe.words`), since the dataclasses themselves
take ten seconds to import.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, fields
from enum import Enum
from importlib.metadata import version
from typing import Any, get_type_hints

from transformers import TrainingArguments
from trl import ModelConfig

from basis_rl.data import DataArguments
from basis_rl.evaluation.arguments import EvalArguments
from basis_rl.recipe.file import TYPES
from basis_rl.recipe.keys import RunArguments
from basis_rl.recipe.words import KNOWN, Key
from basis_rl.trainer import BasisConfig


def known() -> dict[str, Any]:
    """What `known.json` holds: the versions it is of, the keys of a recipe, the options of ``basis-rl eval``."""
    return {
        "versions": {package: version(package) for package in ("transformers", "trl")},
        "recipe": [asdict(key) for kind in TYPES for key in _keys(kind)],
        "eval": [asdict(key) for key in _keys(EvalArguments)],
    }


def _keys(kind: type) -> list[Key]:
    hints = get_type_hints(kind)
    found = []
    for field in fields(kind):
        if field.init:
            made = field.default_factory() if callable(field.default_factory) else field.default
            text = " ".join(str(field.metadata.get("help") or "").split())
            found.append(Key(field.name, _type(hints[field.name]), _default(made), text, _source(kind, field.name)))
    return found


def _type(hint: Any) -> str:
    """A type as one writes it: ``str | None``, ``list[str]``, the values of an enumeration."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(repr(member.value) for member in hint)
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    text = re.sub(r"<class '([\w.]+)'>|<enum '([\w.]+)'>", lambda match: match[1] or match[2], text)
    return re.sub(r"\b(typing|transformers|trl|pathlib|collections\.abc)\.([a-z_]\w*\.)*", "", text)


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    return json.dumps(value, default=str, ensure_ascii=False) if not isinstance(value, str) else value


def _source(kind: type, name: str) -> str:
    """Whose key it is, and of this package's which part's."""
    if kind is RunArguments:
        return name.partition("_")[0] if name.startswith(("values_", "clusters_")) else "run"
    if kind is DataArguments:
        return "data"
    if kind is BasisConfig and name in vars(BasisConfig).get("__annotations__", {}):
        return "trainer"
    if kind is EvalArguments:
        return "eval"
    transformers_keys = {field.name for field in fields(TrainingArguments)}
    return "transformers" if kind is not ModelConfig and name in transformers_keys else "trl"


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    KNOWN.write_text(json.dumps(known(), indent=1, ensure_ascii=False) + "\n")
    print(f"{KNOWN}: {len(known()['recipe'])} keys")


if __name__ == "__main__":
    main()
