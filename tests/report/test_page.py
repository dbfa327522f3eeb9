"""The report: one file that asks for nothing, whatever the runs are called; Markdown whose tables hold together."""

import re

import numpy as np
import pytest
import yaml

from basis_rl.cli.main import main
from basis_rl.report import plots
from basis_rl.report.compare import Curve, compare_runs
from basis_rl.report.page import html, write_report
from basis_rl.report.plots import _line
from basis_rl.text import aligned
from tests.report.folders import Elements, write_rows, write_run

EVIL = "m:<script>alert(1)</script>|`x`\"'&$\\frac$<img src=https://example.org/x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        write_run(folder / f"basis-{seed}", seed=seed, baseline="basis", table="t", **{"baseline/beta": 0.5})
        rows = write_run(folder / f"evil-{seed}", seed=seed, baseline=EVIL, recipe={"note": EVIL}, level=0.6)
        for row in rows:
            row.update({"gradient/variance": 0.1 * row["step"], "eval_reward": row["reward"]})
        write_rows(folder / f"evil-{seed}", rows)
    write_run(folder / "new", baseline="opo", steps=0, recipe={"note": EVIL})
    return folder


@pytest.fixture(scope="module")
def page(runs):
    return html(compare_runs([runs]))


def test_nothing_is_loaded_from_anywhere(page):
    elements = Elements(page).found
    loading = ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background")
    for tag, attributes in elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "base", "form", "image"}, tag
        for name in loading:
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)'\"]*)", page))
    policy = [a["content"] for tag, a in elements if tag == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_what_comes_from_files_is_text(page):
    elements = Elements(page)
    assert any(EVIL in text for text in elements.text)
    shown = yaml.safe_load(next(text for text in elements.text if "note:" in text))
    assert shown["note"] == EVIL


def test_parts_of_one_plot_do_not_meet_those_of_another(page):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'xlink:href="#([^"]+)"', page)) == set(ids)


def test_a_run_has_one_colour_everywhere(page):
    plots = dict(re.findall(r'aria-label="([^"]+)">(<svg.*?</svg>)', page, re.S))
    assert {"reward over rollouts", "calibrated β", "variance of the gradient", "evaluation over time"} <= set(plots)
    drawn = {title: set(re.findall(r"var\(--run-(\d)\)", svg)) for title, svg in plots.items()}
    assert drawn["reward over rollouts"] == {"0", "1"}
    assert drawn["calibrated β"] == {"0"}, "only basis has a beta"
    assert drawn["variance of the gradient"] == {"1"}
    legend = re.search(r'<ul class="legend">.*?</ul>', page, re.S)[0]
    assert re.findall(r"--run: var\(--run-(\d)\)", legend) == ["0", "1"]
    assert not re.findall(r"#[0-9a-f]{6}", "".join(plots.values())), "colours that would not follow the theme"


def test_markdown_and_its_plots(runs, tmp_path):
    write_report(compare_runs([runs]), tmp_path)
    text = (tmp_path / "report.md").read_text()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
    assert "<script" not in text
    assert "<img" not in text
    assert "| m:&lt;script&gt;alert(1)&lt;/script&gt;\\|\\`x\\`" in text
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(images) >= 8
    assert all((tmp_path / image).read_bytes().startswith(b"\x89PNG") for image in images)
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(i.split("/")[1] for i in images)


def test_tables_keep_their_columns():
    lines = aligned([["s", "rollouts"], ["a", "1"], ["longer", "1,000"]]).split("\n")
    assert lines == ["s       rollouts", "a              1", "longer     1,000"]


class Axis:
    """Keeps what is drawn on it."""

    def __init__(self):
        self.lines, self.bands = [], []

    def plot(self, x, y, **style):
        self.lines.append((np.asarray(x).tolist(), style["linestyle"]))

    def fill_between(self, x, low, high, **style):
        self.bands.append((low.tolist(), high.tolist()))


def test_the_band_is_from_the_lowest_to_the_highest_run():
    axis, y = Axis(), np.array([[1.0, 5.0], [2.0, np.nan], [0.0, 4.0]])
    _line(axis, np.array([1.0, 2.0]), Curve(np.arange(2.0), y), 0, "a")
    assert axis.bands == [([0.0, 4.0], [2.0, 5.0])]
    _line(axis, np.array([1.0, 2.0]), Curve(np.arange(2.0), y[:1]), 0, "a")
    assert len(axis.bands) == 1, "a single run has none"


def test_a_curve_with_its_table_begins_after_the_tables_rollouts(tmp_path, monkeypatch):
    for seed in (0, 1):
        write_run(tmp_path / f"basis-{seed}", seed=seed, baseline="basis", table="t")
    write_run(tmp_path / "rloo")
    drawn = []
    monkeypatch.setattr(plots, "_line", lambda axis, x, *args, **style: drawn.append(x[-1]))
    found = compare_runs([tmp_path])
    (plot,) = [each for each in plots.plots(found) if each.x == plots.TABLE]
    plots.svg(found, plot)
    middle = found.budget * (1 - 1 / 40)  # of the last of 20 bins
    assert drawn == [middle + 1000, middle]


def test_time_is_drawn_in_minutes(tmp_path, monkeypatch):
    rows = write_run(tmp_path / "rloo")
    drawn = []
    monkeypatch.setattr(plots, "_line", lambda axis, x, *args, **style: drawn.append(x[-1]))
    found = compare_runs([tmp_path])
    timed = [each for each in plots.plots(found) if each.x == "seconds"]
    for plot in timed:
        plots.svg(found, plot)
    last = max(row.get("seconds", 0.0) for row in rows)
    assert timed
    assert all(0.9 * last < 60 * x <= last for x in drawn)


def test_the_command(runs, tmp_path, capsys):
    options = ["--output_dir", str(tmp_path / "r"), "--reference", "basis"]
    assert main(["compare", str(runs), *options]) == 0
    said = capsys.readouterr().out
    assert "1,280 rollouts each; differences are from 'basis'" in said
    assert (tmp_path / "r" / "report.html").stat().st_size > 10_000
