"""Every benchmark and study has a help, every command that a text names exists; imports run one way."""

import importlib
import re
from pathlib import Path

import pytest

from tests.test_layers import imported

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("benchmarks", "studies")


def modules(room):
    """Of each module of a room its dotted name and its text."""
    for path in sorted((ROOT / room).rglob("*.py")):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text()


# `python -m benchmarks.gpu` is that of the package; what says that others run it is no command.
COMMANDS = [
    name.removesuffix(".__main__")
    for room in ROOMS
    for name, text in modules(room)
    if '__name__ == "__main__"' in text and not text.startswith('"""Run by ')
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_script_has_a_help_and_a_run_of_seconds(name, capsys):
    module = importlib.import_module(name)
    module = module if hasattr(module, "main") else importlib.import_module(f"{name}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert module.__doc__ in shown
    assert "--quick" in shown or "--cpu" in shown


def test_every_command_that_a_text_names_exists():
    known = {name for room in ROOMS for name, _ in modules(room)}
    paths = [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml")]
    for folder in (*ROOMS, "basis_rl", "docs", "examples", "tests"):
        paths += [path for kind in ("py", "md", "yaml") for path in (ROOT / folder).rglob(f"*.{kind}")]
    for path in paths:
        text = path.read_text()
        for module in re.findall(r"python -m ((?:benchmarks|studies)\.[\w.]*\w)", text):
            assert module in COMMANDS, f"{path} names {module}"
        for module in re.findall(r"`((?:benchmarks|studies)\.[\w.]*\w)", text):
            assert {module, module.rsplit(".", 1)[0]} & known, f"{path} names {module}"
    for names, room in re.findall(r"for name in ([^;]+); do [^;]*-m (\w+)\.\$\$name", (ROOT / "Makefile").read_text()):
        assert {f"{room}.{name}" for name in names.split()} <= set(COMMANDS)


def test_benchmarks_do_not_import_studies_and_the_package_imports_neither():
    for room, forbidden in (("benchmarks", {"studies"}), ("basis_rl", {*ROOMS}), ("examples", {*ROOMS})):
        for name, text in modules(room):
            assert not {module.split(".")[0] for module in imported(text, name.split(".")[:-1])} & forbidden, name
