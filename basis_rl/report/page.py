"""The written report of a comparison: ``report.md`` with its plots, and ``report.html``, a self-contained file."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import yaml

from basis_rl.report.compare import Comparison
from basis_rl.report.plots import DARK, LIGHT, TABLE, marker, plots, png, svg, table_parts
from basis_rl.report.tables import Table, runs_table, settings_table, tables
from basis_rl.report.verdict import verdict
from basis_rl.run.artefacts import versions
from basis_rl.text import escape_markdown, markdown_table, render

METHOD = [
    "All runs are compared at the same number of rollouts sampled for training, ReMax's greedy rollouts included. The "
    "rollouts of a value table are not part of this number; the tables and plots that include them say so.",
    "A logged value is the mean over the rollouts since the previous logged value. If only a part of these rollouts "
    "lies in a window or within the budget, the value is weighted by that part.",
    "Curves are means over bins of equal numbers of rollouts (at most 50 bins, and no other smoothing), drawn at the "
    "middle of the bin; on axes of tokens, seconds or steps, at the count that the run had reached there. Evaluations "
    "are drawn as they were measured. With several seeds, the line is the mean and the band goes from the lowest to "
    "the highest.",
    "Where the value table is included, the curve begins after the rollouts of the table: of the whole table or, "
    "dashed, of the run's share when several runs of this comparison use the same table.",
    "Time is the wall-clock time of the training, with its evaluations and checkpoints, on the machines of the runs.",
]
_TITLE = "# Comparison of runs"


def write_report(comparison: Comparison, folder: str | Path) -> Path:
    """Write ``report.html``, ``report.md`` and ``plots/*.png`` into `folder` and return the path of the HTML page."""
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
    """One line that says what is compared."""
    runs, groups = len(comparison.runs), len(comparison.groups)
    return (
        f"{runs} run{'s' if runs > 1 else ''}, {groups} setting{'s' if groups > 1 else ''}, "
        f"{comparison.budget:,.0f} rollouts each; differences are from '{comparison.reference.label}'"
    )


def markdown(comparison: Comparison, folder: Path) -> str:
    """Return the report as Markdown, and draw its plots into ``folder/plots``."""
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
        text.append(image if plot.key != before else f"{text.pop()} {image}")  # plots of one metric share a line
        before = plot.key
    text += [_markdown_table(table) for table in (*others, settings_table(comparison), runs_table(comparison)) if table]
    text.append("## How this was computed\n\n" + "\n".join(f"- {line}" for line in METHOD))
    text.append(_footer())
    return "\n\n".join(text) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [[escape_markdown(cell) for cell in row.cells] for row in table.rows]
    for cells, row in zip(rows, table.rows, strict=True):
        for i in row.strong:
            cells[i] = f"**{cells[i]}**"
    text = markdown_table(rows, [escape_markdown(title) for title in table.columns])
    return f"## {table.title}\n\n{text}" + (f"\n\n{escape_markdown(table.caption)}" if table.caption else "")


def html(comparison: Comparison) -> str:
    """Return the report as one HTML page. The template escapes everything that comes from a file."""
    from markupsafe import Markup

    sections: dict[str, list[dict[str, Any]]] = {}
    broken = len(table_parts(comparison)) > 1
    for plot in plots(comparison):
        figure = {"title": plot.title, "svg": Markup(svg(comparison, plot)), "wide": plot.x == TABLE and broken}
        sections.setdefault(plot.section, []).append(figure)
    first, *others = tables(comparison)
    groups = [
        {
            "label": group.label,
            "color": i % len(LIGHT),
            "marker": marker(i),
            "dashes": "4 2" if i >= len(LIGHT) else "",
            "settings": yaml.safe_dump(group.runs[0].settings, sort_keys=False, allow_unicode=True),
        }
        for i, group in enumerate(comparison.groups)
    ]
    used: dict[str, str] = {}
    for run in comparison.runs:
        used |= run.info.get("versions", {})
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
        groups=groups,
        method=METHOD,
        light=LIGHT,
        dark=DARK,
        footer=_footer(),
        versions=", ".join(f"{name} {found}" for name, found in used.items()),
    )


def _footer() -> str:
    return f"basis-rl {versions('basis-rl').get('basis-rl', '')}, {datetime.date.today().isoformat()}"
