"""Break the package on purpose, one small change of the syntax tree at a time, and see which changes the tests notice.

    python tools/mutate.py --count 200 --seed 0 --output mutants.jsonl
    python tools/mutate.py --files 'basis_rl/baselines/*.py' --count 60 --output mutants.jsonl
    python tools/mutate.py --like mutants.jsonl --output again.jsonl

A mutant changes a comparison, a constant or a sign, drops a statement, or swaps two arguments. It meets the fast tests
of its own folder, first those that name its file, and the conformance matrix of the baselines, in a copy of the tree.
With `--like` each mutant of an earlier file is looked for again by its function, kind and text, also where the function
has moved; one that is gone is replaced by a random one of the same kind. The output gets a line per mutant; what it has
is not redone.
"""

import argparse
import ast
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in"}
COMPARED |= {ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
# What the conformance matrix of the baselines imports, except for the baselines, whose folder has it.
BELOW_BASELINES = {"types", "names", "functional", "values", "clusters", "conformance", "samplers"}
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not nightly and not vllm and not gpu"]
Mutant = dict[str, Any]
# Tests run in forks of a process that has imported torch and TRL once.
FORKS = multiprocessing.get_context("forkserver")


def changes(node: ast.AST, text: str) -> tuple[str, str] | None:
    """Kind and new text of the one change that `node` offers; None if it offers none."""

    def part(of: ast.AST) -> str:
        return ast.get_source_segment(text, of) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        return "comparison", f"({part(node.left)} {COMPARED[type(node.ops[0])]} {part(node.comparators[0])})"
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return "sign", f"({part(node.left)} {SIGNS[type(node.op)]} {part(node.right)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        return "sign", f"({part(node.operand)})"
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        return "constant", str(not node.value) if isinstance(node.value, bool) else f"({ast.unparse(node)} + 1)"
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return "statement", "pass"
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second, *rest = map(part, [*node.args, *node.keywords])
        return "arguments", f"{part(node.func)}({', '.join([second, first, *rest])})"
    return None


def sites(name: str, text: str) -> list[Mutant]:
    """All mutants of one file. Docstrings, annotations and what stands outside of functions offer none."""
    found: list[Mutant] = []

    def visit(node: ast.AST, function: str) -> None:
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
            children = list(node.body)
        elif isinstance(node, ast.JoinedStr):
            return  # before Python 3.12 what stands within has wrong positions
        offered = changes(node, text) if function else None
        old = ast.get_source_segment(text, node) if offered else None
        if offered and old and ast.unparse(node) != offered[1]:
            where = [node.lineno, node.col_offset, node.end_lineno, node.end_col_offset]  # type: ignore[attr-defined]
            mutant = {"file": name, "function": function, "where": where, "old": old}
            found.append({**mutant, "kind": offered[0], "new": offered[1]})
        for child in children:
            visit(child, function)

    visit(ast.parse(text), "")
    return found


def mutated(text: str, mutant: Mutant) -> str:
    """The file with the change; columns of a syntax tree count bytes."""
    first, begin, last, end = mutant["where"]
    lines = text.encode().splitlines(keepends=True)
    new = lines[first - 1][:begin] + mutant["new"].encode() + lines[last - 1][end:]
    return b"".join([*lines[: first - 1], new, *lines[last:]]).decode()


def again(mutant: Mutant, everything: list[Mutant], chance: random.Random) -> Mutant:
    """An earlier mutant in today's tree, or one like it."""
    alike = [m for m in everything if all(m[key] == mutant[key] for key in ("function", "kind", "old"))]
    if not alike:
        return chance.choice([m for m in everything if m["kind"] == mutant["kind"]]) | {"replaced": True}
    return max(alike, key=lambda m: (Path(m["file"]).name == Path(mutant["file"]).name, m["where"] == mutant["where"]))


def tests_of(file: str) -> list[str]:
    """The tests of the file's folder, and the conformance matrix where it can reach the file."""
    parts = Path(file).parts
    room = Path("tests", *parts[1:-1])
    layer = parts[1].removesuffix(".py")
    tests = room.glob("test_*.py") if room.name == "tests" else room.rglob("test_*.py")
    ordered = sorted(tests, key=lambda path: (Path(file).stem not in path.read_text(), path))
    return [*map(str, ordered), *(["tests/baselines/test_conformance.py"] if layer in BELOW_BASELINES else [])]


def run_tests(options: list[str], printed: Path) -> None:
    """In a process of its own: pytest, whose output goes into a file; the exit code is pytest's."""
    os.setsid()
    with printed.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.exit(pytest.main(options))


def judge(tree: Path, mutant: Mutant) -> Mutant:
    """Break the copy, run the tests until the first failure, and put the copy back."""
    path, begun, printed = tree / mutant["file"], time.monotonic(), tree.parent / "printed"
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    options = [*PYTEST, "--timeout", "300", "--basetemp", str(tree.parent / "tmp"), *tests_of(mutant["file"])]
    process = FORKS.Process(target=run_tests, args=(options, printed))
    process.start()
    process.join(1200)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    path.write_text(text)
    by = next((line for line in printed.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    seconds = round(time.monotonic() - begun, 1)
    return {**mutant, "result": "failed" if process.exitcode else "survived", "by": by[:200], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=["basis_rl/**/*.py"], help="which files are broken, as globs")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--like", type=Path, help="the output of an earlier call")
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    files = sorted({path for pattern in chosen.files for path in Path().glob(pattern)})
    everything = [mutant for path in files for mutant in sites(str(path), path.read_text())]
    chance = random.Random(chosen.seed)
    earlier = chosen.like.read_text().splitlines() if chosen.like else []
    mutants = [again(json.loads(line), everything, chance) for line in earlier]
    mutants = mutants or chance.sample(everything, chosen.count)
    output = chosen.output.resolve()
    done = len(output.read_text().splitlines()) if output.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(".", tree, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build"))
        (tree.parent / "shared").symlink_to(Path("../shared").resolve())  # data that some tests read
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        FORKS.set_forkserver_preload(["trl.trainer.grpo_trainer", "math_verify", "pytest"])
        for mutant in mutants[done:]:
            result = judge(tree, mutant)
            with output.open("a") as file:
                print(json.dumps(result), file=file)
            print(result["result"], mutant["file"], mutant["where"][0], mutant["kind"], result["seconds"], flush=True)
    results = Counter(json.loads(line)["result"] for line in output.read_text().splitlines())
    print(dict(results), f"killed: {1 - results['survived'] / sum(results.values()):.3f}")


if __name__ == "__main__":
    main()
