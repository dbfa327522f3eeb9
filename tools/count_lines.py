"""Lines of code per room: neither blank, comment nor docstring, counted from the syntax tree.

    python tools/count_lines.py [FOLDER ...]        # default: basis_rl tests benchmarks studies
    python tools/count_lines.py --at COMMIT basis_rl

Prints, for each folder and each room in it, files, code lines and all lines. A line is code if a token other than a
comment or a docstring stands on it, so a statement of three lines counts three.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings stand on; a bare string in a body counts as one."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(source: str) -> int:
    """The number of lines of a file that are neither blank, comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def sources(folder: str, commit: str | None) -> dict[str, str]:
    """Each Python file that git tracks below `folder`, with its text in the working tree or in `commit`."""
    listed = ["git", "ls-tree", "-r", "--name-only", commit, folder] if commit else ["git", "ls-files", folder]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = {}
    for name in filter(lambda name: name.endswith(".py"), names):
        if commit:
            shown = ["git", "show", f"{commit}:{name}"]
            texts[name] = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        elif Path(name).exists():
            texts[name] = Path(name).read_text()
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["basis_rl", "tests", "benchmarks", "studies"])
    parser.add_argument("--at", metavar="COMMIT", help="count what this commit has instead of the working tree")
    chosen = parser.parse_args()
    for folder in chosen.folders:
        rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for name, text in sources(folder, chosen.at).items():
            inner = name.removeprefix(folder.rstrip("/") + "/").split("/")
            for room in (inner[0] if len(inner) > 1 else "(top)", "total"):
                counts = (1, code_lines(text), len(text.splitlines()))
                rooms[room] = [a + b for a, b in zip(rooms[room], counts, strict=True)]
        print(f"{folder:24} files    code     all")
        for room in sorted(rooms, key=lambda room: (room == "total", room)):
            files, code, lines = rooms[room]
            print(f"  {room:22} {files:5} {code:7} {lines:7}")


if __name__ == "__main__":
    main()
