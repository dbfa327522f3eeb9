"""The import rules of the design: no upward import, one importer for each heavy library."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "basis_rl"

# A layer may import the layers named before it in its own list.
BELOW = {
    "sandbox": [],
    "types": [],
    "functional": ["types"],
    "rewards": ["sandbox"],
    "rollout": [],
    "tools": ["sandbox"],
    "data": [],
    "artefacts": [],
    "values": ["types", "functional", "rewards", "rollout", "data", "artefacts"],
    "clusters": ["types", "artefacts"],
    "baselines": ["types", "functional", "values", "clusters"],
    "report": ["types", "functional", "rewards", "rollout", "data", "values", "clusters", "baselines"],
    "trainer": [
        "types",
        "functional",
        "rewards",
        "rollout",
        "tools",
        "data",
        "values",
        "clusters",
        "baselines",
        "report",
    ],
    "evaluation": ["types", "functional", "rewards", "rollout", "data", "values", "clusters", "baselines"],
}
TOP = {"recipe", "recipe_file", "recipe_objects", "cli", "__init__", "__main__"}
ONLY_IMPORTER = {
    "math_verify": "rewards",
    "vllm": "rollout",
    "sentence_transformers": "clusters",
    "sklearn": "clusters",
}


def layer_of(path):
    part = path.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imports(path):
    package = ["basis_rl", *path.relative_to(PACKAGE).parts[:-1]]
    return imported(path.read_text(), package)


def imported(source, package):
    """Full names of all that `source`, a module of `package`, imports; relative imports resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_relative_and_package_imports_are_seen():
    source = "from basis_rl import trainer\nfrom ..trainer import x\nfrom . import table\nimport vllm.engine\n"
    names = ["basis_rl.trainer", "basis_rl.trainer.x", "basis_rl.values.table", "vllm.engine"]
    assert list(imported(source, ["basis_rl", "values"])) == names


def files():
    return list(PACKAGE.rglob("*.py"))


def test_every_file_has_a_layer():
    assert {layer_of(path) for path in files()} <= set(BELOW) | TOP


def test_no_upward_import():
    for path in files():
        layer = layer_of(path)
        if layer in TOP:
            continue
        for name in imports(path):
            if name.startswith("basis_rl.") and name != "basis_rl.__version__":
                target = name.split(".")[1]
                assert target == layer or target in BELOW[layer], f"{path}: {layer} imports {name}"


def test_heavy_libraries_have_one_importer():
    for path in files():
        for name in imports(path):
            owner = ONLY_IMPORTER.get(name.split(".")[0])
            assert owner is None or layer_of(path) == owner, f"{path} imports {name}"


def test_only_the_trainer_and_the_top_import_trl():
    for path in files():
        if any(name.split(".")[0] == "trl" for name in imports(path)):
            assert layer_of(path) in {"trainer", "recipe"}, path


def test_files_are_short():
    for path in files():
        assert len(path.read_text().splitlines()) <= 400, path
