"""The written report of a comparison: ``report.md`` with its plots, and ``report.html``, a self-contained file."""

from __future__ import annotations

import datetime
import re
from itertools import groupby
from pathlib import Path

import yaml
from markupsafe import Markup

from basis_rl.report.compare import Comparison
from basis_rl.report.plots import DARK, LIGHT, MARKERS, marker, plots, png, svg
from basis_rl.report.rollouts import extremes
from basis_rl.report.tables import Table, setup_tables, tables
from basis_rl.report.verdict import verdict
from basis_rl.run.artefacts import versions
from basis_rl.text import escape_markdown, markdown_table, render

METHOD = [
    "All runs are compared at the same number of rollouts sampled for training, ReMax's greedy rollouts included and "
    "those of a value table not, except where a table or plot says so.",
    "A logged value is the mean over the rollouts since the previous one. If only a part of them lies in a window or "
    "within the budget, the value is weighted by that part.",
    "Curves are means over at most 50 bins of equal numbers of rollouts, and evaluations are drawn as they were "
    "measured. With several seeds, the line is the mean and the band goes from the lowest to the highest.",
    "A curve that includes the value table begins after its rollouts.",
    "Time is the wall-clock time of the training, with its evaluations and checkpoints, on the machines of the runs.",
]


def write_report(comparison: Comparison, folder: str | Path) -> Path:
    """Write ``report.html``, ``report.md`` and ``plots/*.png`` into `folder` and return the path of the HTML page."""
    folder = Path(folder)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(comparison, folder))
    page = folder / "report.html"
    page.write_text(html(comparison))
    return page


def headline(comparison: Comparison) -> str:
    """One line that says what is compared."""
    counts = f"Runs: {len(comparison.runs)}, settings: {len(comparison.groups)}, {comparison.budget:,.0f} rollouts each"
    return f"{counts}; differences are from '{comparison.reference.label}'"


def markdown(comparison: Comparison, folder: Path) -> str:
    """Return the report as Markdown, and draw its plots into ``folder/plots``."""
    answer, *details = map(escape_markdown, verdict(comparison))
    text = ["# Comparison of runs", " ".join([f"**{answer}**", *details]), escape_markdown(headline(comparison)) + "."]
    text += [f"> {escape_markdown(note)}" for note in comparison.notes]
    first, *others = map(_markdown_table, [*tables(comparison), *setup_tables(comparison)])
    text.append(first)
    for section, drawn in groupby(plots(comparison), key=lambda plot: plot.section):
        text.append(f"## {section}")
        # Plots of one metric share a line.
        for _, same in groupby(drawn, key=lambda plot: plot.key):
            images = []
            for plot in same:
                file = f"plots/{re.sub(r'[^A-Za-z0-9]+', '_', f'{plot.key} {plot.x}')}.png"
                png(comparison, plot, folder / file)
                images.append(f"![{escape_markdown(plot.title)}]({file})")
            text.append(" ".join(images))
    text += [*others, "## How this was computed", "\n".join(f"- {line}" for line in METHOD), _footer(comparison)]
    return "\n\n".join(text) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [
        [("**{}**" if i in row.strong else "{}").format(escape_markdown(cell)) for i, cell in enumerate(row.cells)]
        for row in table.rows
    ]
    text = markdown_table(rows, [escape_markdown(title) for title in table.columns])
    return f"## {table.title}\n\n{text}" + (f"\n\n{escape_markdown(table.caption)}" if table.caption else "")


def html(comparison: Comparison) -> str:
    """Return the report as one HTML page. The template escapes everything that comes from a file."""
    groups = []
    for i, group in enumerate(comparison.groups):
        line = "╌" if i >= len(LIGHT) else "━"
        settings = yaml.safe_dump(group.runs[0].settings, sort_keys=False, allow_unicode=True)
        key = line + [*MARKERS.values()][marker(i)] + line
        groups.append({"label": group.label, "key": key, "settings": settings})
    drawn = [(plot.section, plot.title, Markup(svg(comparison, plot))) for plot in plots(comparison)]
    return render(
        Path(__file__).with_name("page.html.jinja"),
        html=True,
        headline=headline(comparison),
        verdict=verdict(comparison),
        notes=comparison.notes,
        results=tables(comparison),
        folded=setup_tables(comparison),
        sections=[(section, list(same)) for section, same in groupby(drawn, key=lambda figure: figure[0])],
        groups=groups,
        rollouts=[(run.path.name, extremes(run.path)) for run in comparison.runs],
        method=METHOD,
        colors=list(zip(LIGHT, DARK, strict=True)),
        footer=_footer(comparison),
    )


def _footer(comparison: Comparison) -> str:
    used = {name: found for run in comparison.runs for name, found in run.info.get("versions", {}).items()}
    made = f"basis-rl {versions('basis-rl').get('basis-rl', '')}, {datetime.date.today().isoformat()}"
    return made + ("; the runs used " + ", ".join(map(" ".join, used.items())) if used else "")
