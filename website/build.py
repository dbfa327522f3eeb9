"""Build the documentation site: ``python -m website.build [FOLDER]``, as `make docs` does.

The repository's pages are copied with their own paths, so that their links hold; the API pages name what each package
exports, and mkdocstrings reads the docstrings.
Then zensical builds it, strictly: a link to nothing is an error. Nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

from website.tables import fields_table

ROOT = Path(__file__).resolve().parents[1]
# Every page with the files that it shows; seams.md is of the package, as it is held by the package's tests.
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "docs/*.md", "docs/*.png"),
    *("studies/README.md", "studies/results/*.png", "benchmarks/README.md", "benchmarks/results/*.png"),
    *("examples/papers/README.md", "examples/*.py", "basis_rl/trainer/seams.md"),
)
# Packages whose exports are the public API, and one whose modules are.
EXPORTING = {
    **{"basis_rl.trainer": "Trainer", "basis_rl.baselines": "Baselines", "basis_rl.samplers": "Prompt samplers"},
    **{"basis_rl.objectives": "Objectives", "basis_rl.rewards": "Rewards", "basis_rl.values": "Value tables"},
    **{"basis_rl.clusters": "Clusters", "basis_rl.data": "Data", "basis_rl.tools": "Tools"},
    **{"basis_rl.engine": "Rollouts", "basis_rl.report": "Reports"},
    **{"basis_rl.sandbox": "Sandbox", "basis_rl.conformance": "Checkers"},
}
# Classes of which only these methods are shown; the others override TRL's, or serve the command line.
METHODS = {"basis_rl.trainer.BasisConfig": "[]", "basis_rl.trainer.BasisTrainer": "[train, evaluate]"}
MODULES = {"basis_rl.types": "Batches and advantages", "basis_rl.functional": "Equations"}


def api_entry(name: str) -> str:
    """What mkdocstrings shows of an object; for a dataclass of options also its fields with their help."""
    text = f"::: {name}" + (f"\n    options:\n      members: {METHODS[name]}" if name in METHODS else "")
    found = pkgutil.resolve_name(name)
    fields = fields_table(found) if dataclasses.is_dataclass(found) and isinstance(found, type) else ""
    return f"{text}\n\n{fields}" if fields else text


def api_pages() -> dict[str, str]:
    """Path and Markdown of each page of the API reference."""
    pages = {}
    for name, title in {**MODULES, **EXPORTING}.items():
        module = importlib.import_module(name)
        if name in EXPORTING:
            members = [f"{name}.{member}" for member in module.__all__]
        elif hasattr(module, "__path__"):
            members = [f"{name}.{each.name}" for each in pkgutil.iter_modules(module.__path__)]
        else:
            members = [name]
        text = "\n\n".join(map(api_entry, members))
        pages[f"docs/api/{name.split('.')[-1]}.md"] = f"# {title}: `{name}`\n\n{text}\n"
    entries = [f"- [{text.splitlines()[0].removeprefix('# ')}]({Path(path).name})" for path, text in pages.items()]
    return {"docs/api/index.md": "# API\n\n" + "\n".join(entries) + "\n", **pages}


def linked(path: Path, text: str) -> str:
    """The page with links to modules of the package turned to their place in the API reference."""
    up = "../" * (len(path.parts) - 1)
    return re.sub(r"\]\((?:\.\./)*basis_rl/(\w+)/[\w/]+\.py\)", rf"]({up}docs/api/\1.md)", text)


def with_bars(text: str) -> str:
    """The page with ``\\|`` in a cell's code as GitHub shows it; Python-Markdown would show the backslash too."""
    code = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    return rows.sub(
        lambda row: code.sub(lambda c: f"<code>{html.escape(c[1]).replace(chr(92) + '|', '&#124;')}</code>", row[0]),
        text,
    )


def mathml(formula: str, display: str) -> str:
    """The formula as browsers show it by themselves."""
    # Here, since what else this file has is used without the tools that build the site.
    from latex2mathml.converter import convert

    return str(convert(html.unescape(formula), display=display))


def typeset(site: Path) -> None:
    """Turn the formulas of the built pages, which arithmatex has marked, into MathML, and into text for the search."""
    marked = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
    display = {"span": "inline", "div": "block"}
    for page in site.rglob("*.html"):
        page.write_text(marked.sub(lambda found: mathml(found[2], display[found[1]]), page.read_text()))
    index = site / "search.json"
    searched = json.loads(index.read_text())
    for item in searched["items"]:
        found = re.compile(r"\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
        item["text"] = found.sub(lambda f: re.sub("<.*?>", "", mathml(f[1] or f[2], "inline")), item["text"])
    index.write_text(json.dumps(searched))


def assemble(folder: Path) -> Path:
    """The sources of the site; returns the configuration's path."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in PAGES:
        for source in ROOT.glob(pattern):
            path = source.relative_to(ROOT)
            target = folder / "docs" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix == ".md":
                target.write_text(with_bars(linked(path, source.read_text())))
            else:
                shutil.copy(source, target)
    shutil.copy(ROOT / "website" / "extra.css", folder / "docs")
    for name, text in api_pages().items():
        target = folder / "docs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_bars(text))
    config = (ROOT / "website" / "zensical.toml").read_text().replace('paths = ["../.."]', f'paths = ["{ROOT}"]')
    (folder / "zensical.toml").write_text(config)
    return folder / "zensical.toml"


def main(argv: list[str]) -> int:
    """Build into ``argv[0]``, by default ``build/website``; returns the exit code."""
    folder = Path(argv[0] if argv else ROOT / "build" / "website").resolve()
    config = assemble(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(config)]
    env = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}  # for website.docstrings
    done = subprocess.run(command, cwd=folder, env=env, check=False)
    if done.returncode == 0:
        typeset(folder / "site")
        print(f"The site begins at {folder / 'site' / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
