"""The keys of a recipe, read from the sources of the dataclasses that declare them.

To import TRL's and transformers' configurations takes ten seconds, to read their files a fifth of one. No code is run:
an expression that is more than constants, f-strings and names is shown as it is written.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parents[1]
# The files of classes that TRL and transformers export lazily, so that no import leads to them.
HOMES = {
    "TrainingArguments": ("transformers", "training_args.py"),
    "GRPOConfig": ("trl", "trainer/grpo_config.py"),
    "ModelConfig": ("trl", "trainer/model_config.py"),
}
# The commands whose own keys stand in a section of the recipe, `values: {num_rollouts: 8}`. On the command line and in
# the code the section begins the name: --values_num_rollouts.
SECTIONS = ("values", "clusters")
EMPTY: dict[str, Any] = {"list": [], "dict": {}, "tuple": ()}


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
        return _keys(Module(OURS / "evaluation" / "arguments.py"), "EvalArguments")
    run = Module(OURS / "recipe" / "keys.py")
    classes = ("RunArguments", "DataArguments", "ModelConfig", "BasisConfig")
    return [key for name in classes for key in _keys(run, name)]


def section_of(key: str) -> tuple[str, str] | None:
    """``("values", "num_rollouts")`` of ``values_num_rollouts``; None for a key that belongs to no section."""
    section, _, name = str(key).partition("_")
    return (section, name) if section in SECTIONS and name else None


def _keys(module: Module, name: str) -> list[Key]:
    """The fields of a dataclass, those of its bases first."""
    found: dict[str, Key] = {}
    home, declared = module.class_named(name)
    for base in declared.bases:
        found |= {key.name: key for key in _keys(home, ast.unparse(base))}
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            key = _key(node, home, declared, found.get(node.target.id))
            if key is not None:
                found[key.name] = key
    return list(found.values())


def _key(node: ast.AnnAssign, home: Module, declared: ast.ClassDef, inherited: Key | None) -> Key | None:
    """The key of a field; None for one that is no argument."""
    assert isinstance(node.target, ast.Name), "a field has a name"
    name = node.target.id
    given: dict[str, ast.expr] = {}
    if isinstance(node.value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.value.keywords if keyword.arg}
        # `basis_rl.names.option` takes the default and the help by their places.
        given |= dict(zip(("default", "help"), node.value.args, strict=False))
    elif node.value is not None:
        given = {"default": node.value}
    if "init" in given or "ClassVar" in ast.unparse(node.annotation):
        return None
    values = {key: home.value(each, declared) for key, each in given.items()}
    default = values.get("factory", values.get("default_factory", values.get("default")))
    text = values.get("help") or (values.get("metadata") or {}).get("help") or ""
    hint = re.sub(r"\b([a-z_]\w*\.)+(?=[A-Z])", "", ast.unparse(node.annotation))
    return Key(name, hint, _default(default), " ".join(text.split()), _source(home, declared.name, name, inherited))


def _default(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _source(home: Module, declared: str, name: str, inherited: Key | None) -> str:
    """Whose key it is, and of this package's which part's."""
    ours = {"DataArguments": "data", "EvalArguments": "eval", "BasisConfig": "trainer"}
    if declared == "RunArguments":
        return (section_of(name) or ("run",))[0]
    if declared in ours:
        return ours[declared]
    if inherited is not None:
        return inherited.source
    return "transformers" if declared == "TrainingArguments" else "trl"


class Module:
    """A file of Python that is read and not run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def value(self, node: ast.expr, scope: ast.ClassDef | None = None) -> Any:
        """The value of an expression; one that would have to be run, as it is written."""
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        if isinstance(node, ast.Name):
            return self.named(node.id, scope)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(part, scope)) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.value(node.value, scope)
        if isinstance(node, ast.Dict):
            return dict(self._entries(node, scope))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return self.value(node.func.value, scope).join(self.value(node.args[0], scope))
        try:
            return ast.literal_eval(node)
        except ValueError:
            return ast.unparse(node)

    def _entries(self, node: ast.Dict, scope: ast.ClassDef | None) -> Iterator[tuple[Any, Any]]:
        for key, each in zip(node.keys, node.values, strict=True):
            if key is None:
                yield from self.value(each, scope).items()
            else:
                yield self.value(key, scope), self.value(each, scope)

    def named(self, name: str, scope: ast.ClassDef | None = None) -> Any:
        """The value that a name was last given, in a class or in the module; or the name."""
        for body in (scope, self.tree()):
            for node in reversed(list(ast.walk(body)) if body else []):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                        return self.value(node.value)
        found = self._imported(name)
        return found[0].named(found[1]) if found else EMPTY.get(name, name)

    def class_named(self, name: str) -> tuple[Module, ast.ClassDef]:
        """A class and the module that declares it, found along imports.

        Raises:
            LookupError: there is none.
        """
        for node in self.tree().body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
        found = self._imported(name)
        if found is None:
            raise LookupError(f"{self.file} declares no class {name}.")
        return found[0].class_named(found[1])

    def _imported(self, name: str) -> tuple[Module, str] | None:
        """The module that a name is imported from, and its name there."""
        for node in self.tree().body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        file = self._file(node, alias.name)
                        return (Module(file), alias.name) if file else None
        return None

    def _file(self, node: ast.ImportFrom, name: str) -> Path | None:
        parts = (node.module or "").split(".")
        if node.level:
            return _of(self.file.parents[node.level - 1].joinpath(*parts))
        if parts[0] == OURS.name:
            return _of(OURS.joinpath(*parts[1:]))
        package, inside = HOMES.get(name, ("", ""))
        spec = find_spec(package) if package else None
        return Path(str(spec.origin)).parent / inside if spec else None

    def tree(self) -> ast.Module:
        return _parsed(self.file)


def _of(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@lru_cache(maxsize=64)
def _parsed(file: Path) -> ast.Module:
    if not file.is_file():
        raise LookupError(f"There is no file {file}.")
    return ast.parse(file.read_text(encoding="utf-8"))
