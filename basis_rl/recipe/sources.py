"""The keys of a recipe, read from the sources of the dataclasses that declare them.

To import TRL's and transformers' configurations takes ten seconds, to read their files a fifth of one. No code is run:
an expression that is more than constants, f-strings and names is shown as it is written.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parents[1]
# The files of classes that TRL and transformers export lazily, so that no import statement leads to them.
HOMES = {
    "TrainingArguments": ("transformers", "training_args.py"),
    "GRPOConfig": ("trl", "trainer/grpo_config.py"),
    "ModelConfig": ("trl", "trainer/model_config.py"),
}
# The commands whose own keys stand in a section of the recipe, `values: {num_rollouts: 8}`. On the command line and in
# the code the section begins the name: --values_num_rollouts.
SECTIONS = ("values", "clusters")
# The source of our own dataclasses' keys; those of RunArguments are told apart by their section.
_SOURCES = {"RunArguments": "run", "DataArguments": "data", "EvalArguments": "eval", "BasisConfig": "trainer"}


@dataclass(frozen=True)
class Key:
    """A key of a recipe or an option of ``basis-rl eval``.

    Attributes:
        name: the key.
        type: its type, as text.
        default: its default, as text.
        help: what it means.
        source: ``run``, ``values``, ``clusters``, ``data``, ``eval``, ``trainer`` (this package's) or ``trl``,
            ``transformers``.
    """

    name: str
    type: str
    default: str
    help: str
    source: str

    @property
    def flags(self) -> set[str]:
        """Its options on the command line; a key that is on by default also has ``--no_key``."""
        on = self.type.startswith("bool") and self.default == "true"
        names = [self.name, f"no_{self.name}"] if on else [self.name]
        return {f"--{form}" for name in names for form in (name, name.replace("_", "-"))}


@lru_cache(maxsize=2)
def known_keys(of: str = "recipe") -> list[Key]:
    """The keys of a recipe, or with ``of="eval"`` the options of ``basis-rl eval``, in the dataclasses' order.

    Raises:
        LookupError: TRL or transformers declare their configurations in other files than the versions we know.
    """
    if of == "eval":
        return _keys(OURS / "evaluation" / "arguments.py", "EvalArguments")
    classes = ("RunArguments", "DataArguments", "ModelConfig", "BasisConfig")
    return [key for name in classes for key in _keys(OURS / "recipe" / "keys.py", name)]


def section_of(key: str) -> tuple[str, str] | None:
    """``("values", "num_rollouts")`` of ``values_num_rollouts``; None for a key that belongs to no section."""
    section, _, name = str(key).partition("_")
    return (section, name) if section in SECTIONS and name else None


def _keys(file: Path, name: str) -> list[Key]:
    """The fields of a dataclass that `file` declares or imports, those of its bases first."""
    found: dict[str, Key] = {}
    home, declared = class_named(file, name)
    for base in declared.bases:
        found |= {key.name: key for key in _keys(home, ast.unparse(base))}
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            key = _key(node.target.id, node, home, declared, found.get(node.target.id))
            if key is not None:
                found[key.name] = key
    return list(found.values())


def _key(name: str, node: ast.AnnAssign, home: Path, declared: ast.ClassDef, inherited: Key | None) -> Key | None:
    """The key of a field; None for one that is no argument."""
    given: dict[str, ast.expr] = {}
    if isinstance(node.value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.value.keywords if keyword.arg}
        # `basis_rl.names.option` takes the default and the help by their places.
        given |= dict(zip(("default", "help"), node.value.args, strict=False))
    elif node.value is not None:
        given = {"default": node.value}
    if "init" in given or "ClassVar" in ast.unparse(node.annotation):
        return None
    values = {key: value_of(home, each, declared) for key, each in given.items()}
    default = values.get("factory", values.get("default_factory", values.get("default")))
    shown = default if isinstance(default, str) else json.dumps(default, default=str, ensure_ascii=False)
    text = values.get("help") or (values.get("metadata") or {}).get("help") or ""
    hint = re.sub(r"\b([a-z_]\w*\.)+(?=[A-Z])", "", ast.unparse(node.annotation))
    theirs = "transformers" if declared.name == "TrainingArguments" else "trl"
    source = _SOURCES.get(declared.name) or (inherited.source if inherited else theirs)
    if declared.name == "RunArguments" and (section := section_of(name)):
        source = section[0]
    return Key(name, hint, shown, " ".join(text.split()), source)


def value_of(file: Path, node: ast.expr, scope: ast.ClassDef | None = None) -> Any:
    """The value of an expression of a `file`, in a class (`scope`) or outside; one that must be run, as written."""
    match node:
        case ast.Lambda():
            return value_of(file, node.body, scope)
        case ast.Name():
            return _named(file, node.id, scope)
        case ast.JoinedStr():
            return "".join(str(value_of(file, part, scope)) for part in node.values)
        case ast.FormattedValue():
            return value_of(file, node.value, scope)
        case ast.Dict():
            found: dict[Any, Any] = {}
            for key, each in zip(node.keys, node.values, strict=True):
                value = value_of(file, each, scope)
                # Without a key it is a dictionary that is unpacked, `**value`.
                found |= value if key is None else {value_of(file, key, scope): value}
            return found
        case ast.Call(func=ast.Attribute(value=between, attr="join"), args=[parts]):
            return value_of(file, between, scope).join(value_of(file, parts, scope))
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _named(file: Path, name: str, scope: ast.ClassDef | None = None) -> Any:
    """The value that a name was last given, in a class or in the module; or the name."""
    for body in filter(None, (scope, _parsed(file))):
        for node in reversed(list(ast.walk(body))):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return value_of(file, node.value)
    if found := _imported(file, name):
        return _named(*found)
    # As a factory, the name of a type makes an empty one.
    return {"list": [], "dict": {}}.get(name, name)


def class_named(file: Path, name: str) -> tuple[Path, ast.ClassDef]:
    """A class and the file that declares it, found along imports.

    Raises:
        LookupError: there is none.
    """
    for node in _parsed(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, node
    found = _imported(file, name)
    if found is None:
        raise LookupError(f"{file} declares no class {name}.")
    return class_named(*found)


def _imported(file: Path, name: str) -> tuple[Path, str] | None:
    """The file that a name is imported from, and its name there."""
    for node in _parsed(file).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    found = _file(file, node, alias.name)
                    return (found, alias.name) if found else None
    return None


def _file(file: Path, node: ast.ImportFrom, name: str) -> Path | None:
    """The file behind ``from ... import name`` in `file`; None for packages other than ours and those of `HOMES`."""
    parts = (node.module or "").split(".")
    if not node.level and parts[0] != OURS.name:
        package, inside = HOMES.get(name, ("", ""))
        spec = find_spec(package) if package else None
        return Path(str(spec.origin)).parent / inside if spec else None
    path = file.parents[node.level - 1].joinpath(*parts) if node.level else OURS.joinpath(*parts[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@lru_cache(maxsize=64)
def _parsed(file: Path) -> ast.Module:
    if not file.is_file():
        raise LookupError(f"There is no file {file}.")
    return ast.parse(file.read_text(encoding="utf-8"))
