"""The plan of the package: no upward import, no circle of files, heavy libraries in few hands, short functions."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "basis_rl"

# From the lowest to the highest; the layers of one row do not import one another.
LAYERS = [
    {"types", "names", "text", "identity"},
    {"registry", "resources", "functional", "run", "sandbox"},
    {"rewards", "tools", "engine", "data"},
    {"values", "clusters", "environments"},
    {"baselines", "samplers", "objectives"},
    {"evaluation", "report", "conformance", "adapters"},
    {"trainer"},
    {"recipe", "estimate"},
    {"cli"},
]
TOP = {"__init__", "__main__"}
ONLY_IMPORTERS = {
    "math_verify": {"rewards"},
    "vllm": {"engine"},
    "sentence_transformers": {"clusters"},
    "sklearn": {"clusters"},
    "trl": {"engine", "trainer", "estimate", "recipe"},
    "deepspeed": set(),
}
LONGEST_FUNCTION = 60


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(source, package):
    """Full names of all that `source`, a module of `package`, imports anywhere in it; relative imports resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(path):
    parts = ["basis_rl", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path):
    package = ["basis_rl", *path.relative_to(PACKAGE).parts[:-1]]
    return list(imported(path.read_text(), package))


def files_imported(path):
    """The modules of the package that a file imports, by their longest name that is one."""
    for name in imports(path):
        parts = name.split(".")
        found = next((n for i in range(len(parts), 1, -1) if (n := ".".join(parts[:i])) in FILES), None)
        if found is not None:
            yield found


def test_relative_and_package_imports_are_seen():
    source = "from basis_rl import trainer\nfrom ..trainer import x\nfrom . import table\nimport vllm.engine\n"
    names = ["basis_rl.trainer", "basis_rl.trainer.x", "basis_rl.values.table", "vllm.engine"]
    assert list(imported(source, ["basis_rl", "values"])) == names
    guarded = "if TYPE_CHECKING:\n    from basis_rl.trainer.trainer import BasisTrainer\n"
    assert list(imported(guarded, ["basis_rl"])) == ["basis_rl.trainer.trainer.BasisTrainer"]


def test_no_circle_of_files():
    # A package's own __init__ hands names on; a file that imports from it does not import what stands beside it there.
    TopologicalSorter({name: list(files_imported(path)) for name, path in FILES.items()}).prepare()


def test_every_file_has_a_layer():
    assert {layer_of(path) for path in FILES.values()} == set().union(*LAYERS) | TOP


@pytest.mark.parametrize("layer", sorted(set().union(*LAYERS)))
def test_a_layer_imports_only_what_is_below_it(layer):
    height = next(i for i, row in enumerate(LAYERS) if layer in row)
    below = {layer, "__version__"}.union(*LAYERS[:height])
    for path in FILES.values():
        if layer_of(path) == layer:
            used = {name.split(".")[1] for name in imports(path) if name.startswith("basis_rl.")}
            assert used <= below, f"{path} imports {sorted(used - below)}"


def test_heavy_libraries_have_their_importers():
    for path in FILES.values():
        for name in imports(path):
            owners = ONLY_IMPORTERS.get(name.split(".")[0])
            assert owners is None or layer_of(path) in owners, f"{path} imports {name}"


def test_functions_are_short():
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines < LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name} has {lines} lines"
