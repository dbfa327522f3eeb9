"""The pages: each is in the navigation, no link leads to nothing, what is generated is whole, the site is built."""

import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from basis_rl.baselines import BASELINES
from basis_rl.recipe.file import parser
from basis_rl.recipe.sources import section_of
from basis_rl.trainer import BasisConfig
from website.build import EXPORTING, MODULES, PAGES, ROOT, api_pages, linked, with_bars
from website.tables import GENERATED, cell, filled, keys

SHOWN = sorted(path for pattern in PAGES for path in ROOT.glob(pattern) if path.suffix == ".md")
OTHERS = [ROOT / ".github" / "pull_request_template.md"]
NAMES = [str(path.relative_to(ROOT)) for path in SHOWN]


def entries(nav):
    for each in nav:
        for value in each.values():
            yield from entries(value) if isinstance(value, list) else [value]


def slug(heading):
    """The anchor of a heading, as GitHub and Python-Markdown make it for our headings."""
    plain = re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
    return re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    return {slug(line) for line in re.findall(r"^#+ (.*)$", text, re.M)}


def links(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?://", target)]


def test_the_navigation_is_short_and_leads_to_every_page():
    nav = list(entries(tomllib.loads((ROOT / "website" / "zensical.toml").read_text())["project"]["nav"]))
    assert len(nav) == len(set(nav)) <= 20
    assert set(nav) <= {*NAMES, *api_pages()}
    found = {(path.parent / link.partition("#")[0]).resolve() for path in SHOWN for link in links(path)}
    assert {ROOT / name for name in set(NAMES) - set(nav)} <= found


def test_what_is_generated_is_of_today():
    """With the versions that the project pins: half of the keys are TRL's and transformers'."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    if any(version(name) != pinned[name] for name in ("trl", "transformers")):
        pytest.skip("other versions than those of constraints.txt")
    old = [name for name in NAMES if filled((ROOT / name).read_text()) != (ROOT / name).read_text()]
    assert not old, "run `python -m website.tables`"


@pytest.mark.parametrize("path", SHOWN + OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in links(path):
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(found), f"{target}: no such heading, only {sorted(anchors(found))}"
        if found.suffix in (".md", ".png"):
            assert path in OTHERS or any(found in ROOT.glob(pattern) for pattern in PAGES), f"{target} is not there"


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_belongs_to_an_item_of_a_list_is_indented_as_the_site_needs_it(path):
    """GitHub takes two spaces, Python-Markdown four and a blank line before the next item; else the list ends."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    assert not re.findall(r"^\n {1,3}\S.*", text, re.M)
    assert not re.findall(r"^ {4}\S.*\n(?:-|\d+\.) .*", text, re.M)


def test_every_key_is_on_the_page_with_its_meaning():
    there = {name: (section, kind, default, meaning) for section, name, kind, default, meaning in keys()}
    known = {action.dest for action in parser()._actions} - {"help"}
    assert {name.removeprefix("no_") for name in known} == set(there)
    assert all(meaning for *_, meaning in there.values())
    assert all(kind for _, kind, _, _ in there.values())
    assert there["baseline"] == ("What is trained with what", "str", "`'grpo'`", there["baseline"][3])
    assert len({there[name][0] for name in ("baseline", "num_generations", "epsilon", "learning_rate")}) == 4
    page = GENERATED["keys"]()
    assert all(f"\n| `{(section_of(name) or ('', name))[1]}` | `" in page for name in there)
    table = page.split("### The section `values`")[1].split("###")[0]
    assert "| `num_rollouts` | `int` | `32` |" in table


def test_generated_tables_are_all_used_and_baselines_are_all_explained():
    marks = [mark for path in SHOWN for mark in re.findall(r"<!-- generated: (\w+) -->", path.read_text())]
    ends = [mark for path in SHOWN for mark in re.findall(r"<!-- end of (?!table)(\w+) -->", path.read_text())]
    assert sorted(marks) == sorted(ends) == sorted(GENERATED)
    table = (ROOT / "docs" / "estimators.md").read_text()
    written = {name for row in re.findall(r"^\| (`[^|]*) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert set(BASELINES) <= written


def test_cells_and_links_of_the_site():
    assert cell("a\n  <b> and 1 < 2 `x | y`") == "a &lt;b> and 1 < 2 `x | y`"
    lines = [line for make in GENERATED.values() for line in make().splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in lines)
    assert with_bars(r"| `a \| <b>` | c \| `d` |") == r"| <code>a &#124; &lt;b&gt;</code> | c \| `d` |"
    assert with_bars(r"`a \| b`") == r"`a \| b`"
    assert linked(Path("docs/x.md"), "[a](../basis_rl/baselines/base.py)") == "[a](../docs/api/baselines.md)"
    assert linked(Path("README.md"), "[a](basis_rl/samplers/base.py)") == "[a](docs/api/samplers.md)"


def test_the_api_has_every_export():
    pages = api_pages()
    assert len(pages) == len(EXPORTING) + len(MODULES) + 1
    config = pages["docs/api/trainer.md"]
    for field in BasisConfig.__annotations__:
        assert f"| `{field}` | `" in config, field
    for name in EXPORTING:
        page = pages[f"docs/api/{name.split('.')[-1]}.md"]
        exports = [f"{name}.{each}" for each in importlib.import_module(name).__all__]
        assert re.findall(r"^::: (.*)$", page, re.M) == exports
    files = (ROOT / "basis_rl").glob("*/__init__.py")
    exporting = {path.parent.name for path in files if "__all__" in path.read_text()}
    assert {name.split(".")[1] for name in EXPORTING} == exporting


def formulas_are_typeset(pages, search):
    """Each page with dollar signs in its prose has as many formulas; outside of code no dollar sign or TeX is left."""
    for path, page in pages.items():
        prose = re.sub(r"<(pre|code|script|math|annotation)\b.*?</\1>", "", page, flags=re.S)
        assert not re.search(r"\$|\\[(\[]|arithmatex", re.sub(r"<[^>]*>", "", prose)), path
    baselines = next(page for path, page in pages.items() if path.match("docs/baselines.html"))
    assert re.search(r'<math[^>]*display="block".*?<mfrac>', baselines, re.S)
    source = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / "docs" / "estimators.md").read_text(), flags=re.S)
    estimators = next(page for path, page in pages.items() if path.match("docs/estimators.html"))
    assert estimators.count("<math ") == len(re.findall(r"\$[^$]+\$", source)) > 20
    return "\\\\(r" not in search


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="make docs-tools")
@pytest.mark.skipif(importlib.util.find_spec("latex2mathml") is None, reason="make docs-tools")
def test_the_site_is_built_offline_and_strictly(tmp_path):
    """As `make docs` does, without a network where the machine lets us take it away."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        alone = []
    command = [*alone, sys.executable, "-m", "website.build", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(pages) > len(SHOWN) + len(EXPORTING)
    assert not re.findall(r'<(?:script|img|iframe)[^>]*src="https?:', "".join(pages.values()))
    assert not re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:', "".join(pages.values()))
    assert "num_generations" in pages[site / "docs" / "keys.html"]
    api = site / "docs" / "api"
    assert 'id="basis_rl.baselines.Basis"' in pages[api / "baselines.html"]
    shown = set(re.findall(r'id="basis_rl\.trainer\.BasisTrainer\.(\w+)"', pages[api / "trainer.html"]))
    assert shown == {"train", "evaluate"}
    assert formulas_are_typeset(pages, (site / "search.json").read_text())
    (tmp_path / "docs" / "docs" / "tutorial.md").write_text("[nowhere](nowhere.md)")
    again = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(tmp_path / "zensical.toml")]
    assert subprocess.run(again, cwd=tmp_path, check=False, capture_output=True).returncode, "a broken link is an error"
