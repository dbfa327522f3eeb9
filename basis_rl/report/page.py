"""A comparison written out: ``report.md`` with its plots, and ``report.html``, one file that asks for nothing else."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import yaml

from basis_rl import __version__
from basis_rl.report.compare import Comparison
from basis_rl.report.plots import DARK, LIGHT, TABLE, marker, plots, png, svg, table_parts
from basis_rl.report.tables import Table, runs_table, settings_table, tables
from basis_rl.report.verdict import verdict
from basis_rl.text import escape_markdown, markdown_table, render

METHOD = [
    "All runs are cut at the same number of rollouts sampled for training; the greedy ones of ReMax count. A value "
    "table's are extra, and shown where they are.",
    "A logged value is the mean over the rollouts since the value before it, and counts by the part of them that "
    "lies in a window or within the budget.",
    "Curves: means over bins of equal numbers of rollouts (at most 50, and no other smoothing), drawn at the middle "
    "of the bin, over tokens, seconds and steps where the run was then. Evaluations are drawn as they were measured. "
    "Over several seeds: the mean, and a band from the lowest to the highest.",
    "Value table included: the curve begins after the rollouts of its table, the whole table or (dashed) what falls "
    "to one run when the runs of this comparison share it.",
    "Time is wall-clock time of training with its evaluations and checkpoints, on the machines of the runs.",
]


_TITLE = "# Comparison of runs"


def write_report(comparison: Comparison, folder: str | Path) -> Path:
    """Write ``report.html``, ``report.md`` and ``plots/*.png`` into `folder`; returns the page's path."""
    folder = Path(folder)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    earlier = (folder / "report.md").read_text() if (folder / "report.md").is_file() else ""
    for name in re.findall(r"\]\((plots/[\w.-]+\.png)\)", earlier if earlier.startswith(_TITLE) else ""):
        (folder / name).unlink(missing_ok=True)
    (folder / "report.md").write_text(markdown(comparison, folder))
    page = folder / "report.html"
    page.write_text(html(comparison))
    return page


def headline(comparison: Comparison) -> str:
    """What is compared, in a line."""
    runs = sum(len(group.runs) for group in comparison.groups)
    return (
        f"{runs} run{'s' if runs > 1 else ''}, {len(comparison.groups)} "
        f"setting{'s' if len(comparison.groups) > 1 else ''}, {comparison.budget:,.0f} rollouts each; "
        f"differences to '{comparison.reference.label}'"
    )


def markdown(comparison: Comparison, folder: Path) -> str:
    """The report as Markdown; draws the plots that it shows into ``folder/plots``."""
    answer, *details = [escape_markdown(sentence) for sentence in verdict(comparison)]
    text = [_TITLE, " ".join([f"**{answer}**", *details]), escape_markdown(headline(comparison)) + "."]
    text += [f"> {escape_markdown(note)}" for note in comparison.notes]
    first, *others = tables(comparison)
    text.append(_markdown_table(first))
    section = before = ""
    for plot in plots(comparison):
        if plot.section != section:
            section = plot.section
            text.append(f"## {section}")
        file = f"plots/{re.sub(r'[^A-Za-z0-9_]', '_', plot.name)}.png"
        png(comparison, plot, folder / file)
        image = f"![{escape_markdown(plot.title)}]({file})"
        if plot.key == before:
            text[-1] += " " + image
        else:
            text.append(image)
        before = plot.key
    text += [_markdown_table(table) for table in (*others, settings_table(comparison), runs_table(comparison)) if table]
    text.append("## How this was computed\n\n" + "\n".join(f"- {line}" for line in METHOD))
    text.append(f"basis-rl {__version__}, {datetime.date.today().isoformat()}")
    return "\n\n".join(text) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [[escape_markdown(cell) for cell in row.cells] for row in table.rows]
    for cells, row in zip(rows, table.rows, strict=True):
        for i in row.strong:
            cells[i] = f"**{cells[i]}**"
    text = markdown_table(rows, [escape_markdown(title) for title in table.columns])
    return f"## {table.title}\n\n{text}" + (f"\n\n{escape_markdown(table.caption)}" if table.caption else "")


def html(comparison: Comparison) -> str:
    """The report as one page. Whatever comes from a file is escaped by the template."""
    from markupsafe import Markup

    sections: dict[str, list[dict[str, Any]]] = {}
    broken = len(table_parts(comparison)) > 1
    for plot in plots(comparison):
        picture = Markup(svg(comparison, plot))
        sections.setdefault(plot.section, []).append(
            {"title": plot.title, "svg": picture, "wide": plot.x == TABLE and broken}
        )
    first, *others = tables(comparison)
    recipes = [
        {"label": group.label, "text": yaml.safe_dump(group.runs[0].settings, sort_keys=False, allow_unicode=True)}
        for group in comparison.groups
    ]
    groups = [
        {"label": group.label, "color": i % len(LIGHT), "marker": marker(i), "dashes": "4 2" if i >= len(LIGHT) else ""}
        for i, group in enumerate(comparison.groups)
    ]
    versions: dict[str, str] = {}
    for group in comparison.groups:
        for run in group.runs:
            versions.update(run.record.get("versions", {}))
    return render(
        Path(__file__).with_name("page.html.jinja"),
        html=True,
        headline=headline(comparison),
        verdict=verdict(comparison),
        notes=comparison.notes,
        first=first,
        others=others,
        folded=[table for table in (settings_table(comparison), runs_table(comparison)) if table],
        sections=sections,
        recipes=recipes,
        groups=groups,
        method=METHOD,
        light=list(enumerate(LIGHT)),
        dark=list(enumerate(DARK)),
        colors=len(LIGHT),
        footer=f"basis-rl {__version__}, {datetime.date.today().isoformat()}",
        versions=", ".join(f"{name} {found}" for name, found in versions.items()),
    )
