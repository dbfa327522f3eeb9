"""What the pages read off the code: every key of a recipe, every registered part, as Markdown.

``python -m website.tables`` writes it into the pages, between their marks.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from trl import GRPOConfig

from basis_rl.baselines import BASELINES
from basis_rl.cli.main import COMMANDS
from basis_rl.objectives import OBJECTIVES, TrlObjective
from basis_rl.recipe.file import parser
from basis_rl.recipe.sources import section_of
from basis_rl.rewards.registry import REWARDS
from basis_rl.samplers import SAMPLERS
from basis_rl.text import markdown_table
from basis_rl.trainer import BasisConfig

# Whose key it is, by the class that defines it, from ours to those that everybody has.
_SECTIONS = {
    "RunArguments": "What is trained with what",
    "values": "The section `values`, for `basis-rl values`",
    "clusters": "The section `clusters`, for `basis-rl clusters`",
    "DataArguments": "Data",
    "BasisConfig": "The trainer's own",
    "ModelConfig": "The model (TRL's `ModelConfig`)",
    "GRPOConfig": "The trainer (TRL's `GRPOConfig`)",
    "TrainingArguments": "The trainer (transformers' `TrainingArguments`)",
}


def cell(text: Any) -> str:
    """A text that may hold anything, in a cell of a table: one line, no markup of its own but code."""
    line = " ".join(str(text).split())
    return re.sub(r"<(?=[\w/])", "&lt;", line)


def _owner(cls: type, name: str) -> str:
    """The class that a key is listed under: where it is defined or, for ours, redefined."""
    if cls is not BasisConfig:
        return cls.__name__
    if name in BasisConfig.__annotations__:
        return "BasisConfig"
    return "TrainingArguments" if name in {f.name for f in dataclasses.fields(TrainingArguments)} else "GRPOConfig"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if not isinstance(annotation, (str, type)):
        text = str(annotation)
    return text.replace("typing.", "").replace("transformers.trainer_utils.", "")


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default is not dataclasses.MISSING else None
    if value is None and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    value = getattr(value, "value", value)
    return "" if value is None else f"`{cell(repr(value) if isinstance(value, (str, list, dict)) else value)}`"


def keys() -> Iterator[tuple[str, str, str, str, str]]:
    """Section, name, type, default and meaning of every key that a recipe may hold."""
    for cls in parser().dataclass_types:
        for field in dataclasses.fields(cls):
            if field.init:
                meaning = cell(field.metadata.get("help", ""))
                section = (section_of(field.name) or (_owner(cls, field.name),))[0]
                yield _SECTIONS[section], field.name, _type(field.type), _default(field), meaning


def fields_table(cls: type) -> str:
    """The fields with help that a dataclass has of its own; nothing where it has none."""
    rows = [
        [f"`{field.name}`", f"`{_type(field.type)}`", _default(field), cell(field.metadata["help"])]
        for field in dataclasses.fields(cls)
        if field.name in cls.__annotations__ and "help" in field.metadata
    ]
    return markdown_table(rows, ["field", "type", "default", "meaning"]) if rows else ""


def keys_page() -> str:
    """A table of keys for each section."""
    rows: dict[str, list[list[Any]]] = {title: [] for title in _SECTIONS.values()}
    for section, name, kind, default, meaning in keys():
        rows[section].append([f"`{(section_of(name) or ('', name))[1]}`", f"`{kind}`", default, meaning])
    tables = (
        f"### {title}\n\n{markdown_table(found, ['key', 'type', 'default', 'meaning'])}"
        for title, found in rows.items()
        if found
    )
    return "\n\n".join(tables)


def parameters(build: Callable[..., Any]) -> str:
    """What it is built with: ``name = default``, in code."""
    found = inspect.signature(build).parameters.values()
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return ", ".join(f"`{p.name}`" if p.default is p.empty else f"`{p.name} = {cell(repr(p.default))}`" for p in named)


def first_sentence(documented: Any) -> str:
    """The first sentence of a docstring, in Markdown."""
    text = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return cell(text.replace("``", "`"))


def link(cls: type) -> str:
    """The class, linked to its file; the site turns that into its page of the API reference."""
    return f"[{cls.__name__}](../{cls.__module__.replace('.', '/')}.py)"


def baselines_table() -> str:
    """Every registered baseline."""
    rows = [
        [
            f"`{name}`",
            link(cls),
            cls.min_group_size,
            "yes" if cls.uses_own_reward else "no",
            "yes" if cls.reads_kl else "no",
            parameters(cls) or "none",
        ]
        for name, cls in BASELINES.items()
    ]
    heads = ["baseline", "class", "least group", "own reward in b", "KL in the reward", "`baseline_kwargs`"]
    return markdown_table(rows, heads)


def objectives_table() -> str:
    """Every registered objective."""
    rows = []
    for name, each in OBJECTIVES.items():
        if isinstance(each, TrlObjective):
            level = each.importance_sampling_level
            rows.append([f"`{name}`", f"TRL's `loss_type: {each.loss_type}`, ratio of each {level}"])
        else:
            rows.append([f"`{name}`", first_sentence(each.function)])
    return markdown_table(rows, ["objective", "loss"])


def registered(registry: dict[str, type], parameter: str) -> str:
    """Every class of a registry."""
    rows = [[f"`{name}`", link(cls), first_sentence(cls), parameters(cls) or "none"] for name, cls in registry.items()]
    return markdown_table(rows, [parameter.split("_kwargs")[0], "class", "what it does", f"`{parameter}`"])


def commands_table() -> str:
    """Every command."""
    return markdown_table([[f"`{name}`", cell(text)] for name, text in COMMANDS.items()], ["command", "what it does"])


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands_table,
    "keys": keys_page,
    "baselines": baselines_table,
    "objectives": objectives_table,
    "samplers": lambda: registered(SAMPLERS, "prompt_sampler_kwargs"),
    "rewards": lambda: registered(REWARDS, "reward_kwargs"),
}

PAGES = Path(__file__).resolve().parents[1] / "docs"
_MARKED = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end of (?:\1) -->", re.DOTALL)

# `_owner` counts on it.
assert issubclass(BasisConfig, GRPOConfig)


def filled(text: str) -> str:
    """The page with what is generated between its marks."""
    return _MARKED.sub(
        lambda mark: f"<!-- generated: {mark[1]} -->\n\n{GENERATED[mark[1]]()}\n\n<!-- end of {mark[1]} -->", text
    )


if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        page.write_text(filled(page.read_text()))
