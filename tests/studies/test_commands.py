"""Every benchmark and study is found: by its command, by its first lines, by its README; imports run one way."""

import ast
import importlib
import re
from pathlib import Path

import pytest

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


def texts():
    """Every text of the project that may name a command."""
    for folder in (*ROOMS, "basis_rl", "docs", "examples", "tests"):
        for kind in ("py", "md", "yaml"):
            yield from ((path, path.read_text()) for path in (ROOT / folder).rglob(f"*.{kind}"))
    yield from ((ROOT / name, (ROOT / name).read_text()) for name in ("README.md", "Makefile", "pyproject.toml"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_the_head_of_the_script_and_says_what_where_and_quick(name, capsys):
    module = importlib.import_module(name)
    module = module if hasattr(module, "main") else importlib.import_module(f"{name}.__main__")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    shown, head = capsys.readouterr().out, module.__doc__
    assert head in shown
    assert "--quick" in shown or "--cpu" in shown
    question = head.splitlines()[0]
    assert question.endswith(("?", ".")), question
    assert f"python -m {name}" in head
    assert re.search(r"^Results", head, re.MULTILINE), "says where its results go"


def test_every_command_that_a_text_names_exists():
    known = {name for room in ROOMS for name, _ in modules(room)}
    for name, text in texts():
        for module, _ in re.findall(r"python -m ((benchmarks|studies)\.[\w.]*\w)", text):
            assert module in COMMANDS, f"{name} names {module}"
        for module, _ in re.findall(r"`((benchmarks|studies)\.[\w.]*\w)", text):
            found = {module, module.rsplit(".", 1)[0]} & known
            assert found, f"{name} names {module}"
        for path, _ in re.findall(r"(?<![\w/])((benchmarks|studies)/[\w/.]+\.(?:py|md|json|png))", text):
            assert (ROOT / path).is_file() or "DEVICE" in path, f"{name} names {path}"


def test_the_makefile_runs_commands_that_exist():
    text = (ROOT / "Makefile").read_text()
    named = re.findall(r"for name in ([^;]+); do [^;]*-m (benchmarks|studies)\.\$\$name", text)
    assert {room for _, room in named} == set(ROOMS)
    for names, room in named:
        assert {f"{room}.{name}" for name in names.split()} <= set(COMMANDS)


@pytest.mark.parametrize("room", ROOMS)
def test_the_readme_has_every_script_and_every_result(room):
    readme = (ROOT / room / "README.md").read_text()
    table = [line for line in readme.splitlines() if line.startswith("| `python -m")]
    listed = [re.search(r"python -m ([\w.]*\w)", line)[1] for line in table]
    assert sorted(set(listed)) == [name for name in COMMANDS if name.startswith(room)]
    named = {name for line in table for name in re.findall(r"results/([\w.]+\.json)", line)}
    kept = {path.name for path in (ROOT / room / "results").glob("*.json")}
    assert named == kept
    for path in (ROOT / room / "results" / "gpu").glob("*.json"):
        assert path.name in readme, f"{path}: a section says what was run"
    for path in (ROOT / room / "results").glob("*.png"):
        assert any(path.name.startswith(name.removesuffix(".json")) for name in kept), path


def test_benchmarks_do_not_import_studies_and_the_package_imports_neither():
    for room, forbidden in (("benchmarks", {"studies"}), ("basis_rl", {*ROOMS}), ("examples", {*ROOMS})):
        for name, text in modules(room):
            for node in ast.walk(ast.parse(text)):
                imported = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
                imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {module.split(".")[0] for module in imported} & forbidden, name
