"""Break the package on purpose, one small change of the syntax tree at a time, and see which changes the tests notice.

    python tools/mutate.py --count 200 --seed 0 --workers 2 --output mutants.jsonl
    python tools/mutate.py --like mutants.jsonl --output again.jsonl

A mutant changes a comparison, a constant or a sign, drops a statement, or swaps two arguments. It meets the fast tests
of its own folder and the conformance matrix of the baselines, in a copy of the committed tree. With `--like` each
mutant of an earlier file is looked for again by its function, kind and text, also where the function has moved; one
that is gone is replaced by a random one of the same kind. The output gets a line per mutant; what it has is not redone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in"}
COMPARED |= {ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
# What the conformance matrix of the baselines imports, except for the baselines, whose folder has it.
BELOW_BASELINES = {"types", "names", "functional", "values", "clusters", "conformance", "samplers"}
Mutant = dict[str, Any]


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
        return "constant", str(not node.value) if isinstance(node.value, bool) else f"({node.value} + 1)"
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return "statement", "pass"
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second = part(node.args[0]), part(node.args[1])
        rest = [part(argument) for argument in (*node.args[2:], *node.keywords)]
        return "arguments", f"{part(node.func)}({', '.join([second, first, *rest])})"
    return None


def sites(name: str, text: str) -> list[Mutant]:
    """All mutants of one file. Docstrings, annotations and what stands outside of functions offer none."""
    found: list[Mutant] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
            children: list[ast.AST] = list(node.body)
        elif isinstance(node, ast.JoinedStr):
            return  # before Python 3.12 what stands within has wrong positions
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        else:
            children = list(ast.iter_child_nodes(node))
        offered = changes(node, text) if function else None
        old = ast.get_source_segment(text, node) if offered else None
        if offered and old and ast.unparse(node) != offered[1]:
            where = [node.lineno, node.col_offset, node.end_lineno, node.end_col_offset]  # type: ignore[attr-defined]
            found.append({"file": name, "function": function, "kind": offered[0], "old": old, "new": offered[1]})
            found[-1]["where"] = where
        for child in children:
            visit(child, function)

    visit(ast.parse(text), "")
    return found


def mutated(text: str, mutant: Mutant) -> str:
    """The file with the change; columns of a syntax tree count bytes."""
    first, begin, last, end = mutant["where"]
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    changed = b"".join([*lines[: first - 1], lines[first - 1][:begin], mutant["new"].encode(), lines[last - 1][end:]])
    return (changed + b"".join(lines[last:])).decode()


def again(earlier: list[Mutant], everything: list[Mutant], chance: random.Random) -> list[Mutant]:
    """For each earlier mutant the same one of today's tree, or one like it."""
    chosen: list[Mutant] = []
    for mutant in earlier:
        alike = [m for m in everything if all(m[key] == mutant[key] for key in ("function", "kind", "old"))]
        same_name = [m for m in alike if Path(m["file"]).name == Path(mutant["file"]).name]
        candidates = same_name or alike or [m for m in everything if m["kind"] == mutant["kind"]]
        chosen.append((candidates[0] if alike else chance.choice(candidates)) | {"replaced": not alike})
    return chosen


def tests_of(tree: Path, file: str) -> list[str]:
    """The tests of the file's folder, and the conformance matrix where it can reach the file."""
    room = file.split("/")[1].removesuffix(".py")
    own = [f"tests/{room}"] if (tree / "tests" / room).is_dir() else sorted(map(str, Path("tests").glob("test_*.py")))
    return [*own, *(["tests/baselines/test_conformance.py"] if room in BELOW_BASELINES else [])]


def judge(tree: Path, mutant: Mutant, timeout: float) -> Mutant:
    """Break the copy, run the tests until the first failure, and put the copy back."""
    path, begun = tree / mutant["file"], time.monotonic()
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long", "--basetemp", str(tree.parent / "tmp")]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests_of(tree, mutant["file"])],
        cwd=tree, stdout=(tree.parent / "log.txt").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        killed = run.wait(timeout) != 0
        how = "failed" if killed else "survived"
    except subprocess.TimeoutExpired:
        how = "timeout"
    finally:
        os.killpg(run.pid, signal.SIGKILL) if run.poll() is None else None
        path.write_text(text)
    lines = (tree.parent / "log.txt").read_text().splitlines()
    by = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return {**mutant, "result": how, "by": by[:200], "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--like", type=Path, help="the output of an earlier call")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per mutant")
    chosen = parser.parse_args()
    package = sorted(Path("basis_rl").rglob("*.py"))
    everything = [mutant for path in package for mutant in sites(str(path), path.read_text())]
    chance = random.Random(chosen.seed)
    mutants = chance.sample(everything, chosen.count)
    if chosen.like:
        mutants = again([json.loads(line) for line in chosen.like.read_text().splitlines()], everything, chance)
    done = chosen.output.read_text().splitlines() if chosen.output.exists() else []
    trees: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.workers) as pool:
        for worker in range(chosen.workers):
            tree = Path(folder, str(worker), "tree")
            shutil.copytree(".", tree, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "build"))
            if Path("../shared").is_dir():  # data that some tests read
                (tree.parent / "shared").symlink_to(Path("../shared").resolve())
            trees.put(tree)

        def work(mutant: Mutant) -> None:
            tree = trees.get()
            result = judge(tree, mutant, chosen.timeout)
            trees.put(tree)
            with chosen.output.open("a") as file:
                print(json.dumps(result), file=file)
            print(result["result"], mutant["file"], mutant["where"][0], mutant["kind"], result["seconds"], flush=True)

        list(pool.map(work, mutants[len(done) :]))
    results = Counter(json.loads(line)["result"] for line in chosen.output.read_text().splitlines())
    print(dict(results), f"killed: {1 - results['survived'] / sum(results.values()):.3f}")


if __name__ == "__main__":
    main()
