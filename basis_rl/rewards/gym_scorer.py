"""reasoning-gym's scorers, in a worker. Imports nothing of basis_rl.

Some of them ``eval`` the answer, or have sympy do so: a model could write one that changes the scorer, and be right for
ever after. Here they read literals, and formulas without attributes, strings and names of Python's own.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import reasoning_gym
import sympy  # type: ignore[import-untyped]
from reasoning_gym.composite import DatasetSpec
from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

_ARITHMETIC = {"abs", "max", "min", "pow", "round", "sum", "int", "float", "complex", "divmod"}
_PYTHONS_OWN = {name for name in dir(builtins) if name.islower()} - _ARITHMETIC | {"lambda", "yield", "await", "import"}
_NO_FORMULA = re.compile(r"""__|['"\\;:@\[{]|\.\s*[^\W\d]""")
_parse = sympy_parser.parse_expr


def plain_formula(text: str, *args: Any, **kwargs: Any) -> Any:
    """sympy's ``parse_expr`` of what can only be a formula.

    Raises:
        ValueError: it might be more.
    """
    names = set(re.findall(r"[^\W\d]\w*", str(text)))
    if _NO_FORMULA.search(str(text)) or names & _PYTHONS_OWN:
        raise ValueError("no plain formula")
    return _parse(text, *args, **kwargs)


def disarm() -> None:
    """Put both in the place of ``eval`` of answers and ``parse_expr`` in all of reasoning-gym."""
    sympy.parse_expr = sympy_parser.parse_expr = plain_formula
    for name, module in list(sys.modules.items()):
        if not name.startswith("reasoning_gym."):
            continue
        if getattr(module, "parse_expr", None) is _parse:
            module.parse_expr = plain_formula  # type: ignore[attr-defined]
        source = Path(module.__file__).read_text(encoding="utf-8") if module.__file__ else ""
        if re.search(r"\beval\((answer|entry\[)", source):
            module.eval = ast.literal_eval  # type: ignore[attr-defined]


disarm()


def gym_score(answer: str, reference: str) -> float:
    """What the scorer of the entry's set gives an answer; see `basis_rl.rewards.gym` for the reference.

    Raises:
        ValueError: the entry is not the one that the reference was made of.
    """
    known = json.loads(reference, object_hook=_tuples)
    dataset = procedural_set(known["dataset"], json.dumps(known.get("config") or {}, sort_keys=True))
    entry = known["entry"] if "entry" in known else dataset[known["index"]]
    made = hashlib.sha256(entry["question"].encode()).hexdigest()[:16]
    if known.get("question_sha256") not in (None, made):
        raise ValueError(
            f"entry {known.get('index')} of reasoning-gym's '{known['dataset']}' is another one than that of the data: "
            "those are of another version of reasoning-gym. Generate them again."
        )
    try:
        return float(dataset.score_answer(answer, entry))
    except MemoryError:
        raise
    except Exception:
        # Scorers stumble over answers that they cannot read.
        return 0.0


def _tuples(value: dict[str, Any]) -> Any:
    return tuple(value["__tuple__"]) if value.keys() == {"__tuple__"} else value


@cache
def procedural_set(name: str, config: str) -> Any:
    """The set of a name and its configuration (JSON)."""
    options = json.loads(config)
    if name == "composite":
        options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets") or []]
    return reasoning_gym.create_dataset(name, **options)
