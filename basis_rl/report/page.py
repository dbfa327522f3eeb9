"""The written report of a comparison: ``report.md`` with its plots, and ``report.html``, a self-contained file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from basis_rl.report.compare import Comparison
from basis_rl.report.plots import DARK, LIGHT, MARKERS, marker, plots, png, svg
from basis_rl.report.rollouts import extremes
from basis_rl.report.tables import setup_tables, tables
from basis_rl.report.verdict import verdict
from basis_rl.run.artefacts import versions
from basis_rl.text import escape_markdown, render


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
    figures = []
    for plot in plots(comparison):
        file = f"plots/{re.sub(r'[^A-Za-z0-9]+', '_', f'{plot.key} {plot.x}')}.png"
        png(comparison, plot, folder / file)
        figures.append((plot.section, plot.title, file))
    return _rendered("report.md.jinja", comparison, figures, escape=escape_markdown)


def html(comparison: Comparison) -> str:
    """Return the report as one HTML page. The template escapes everything that comes from a file."""
    groups = []
    for i, group in enumerate(comparison.groups):
        line = "╌" if i >= len(LIGHT) else "━"
        settings = yaml.safe_dump(group.runs[0].settings, sort_keys=False, allow_unicode=True)
        key = line + [*MARKERS.values()][marker(i)] + line
        groups.append({"label": group.label, "key": key, "settings": settings})
    figures = [(plot.section, plot.title, Markup(svg(comparison, plot))) for plot in plots(comparison)]
    rollouts = [(run.path.name, extremes(run.path)) for run in comparison.runs]
    colors = list(zip(LIGHT, DARK, strict=True))
    return _rendered("page.html.jinja", comparison, figures, html=True, groups=groups, rollouts=rollouts, colors=colors)


def _rendered(template: str, comparison: Comparison, figures: Sequence[tuple[str, str, str]], **more: Any) -> str:
    """A template filled with what both forms of a report have."""
    return render(
        Path(__file__).with_name(template),
        headline=headline(comparison),
        verdict=verdict(comparison),
        notes=comparison.notes,
        results=tables(comparison),
        setup=setup_tables(comparison),
        sections=[(section, list(same)) for section, same in groupby(figures, key=lambda figure: figure[0])],
        method=Path(__file__).with_name("method.txt").read_text(encoding="utf-8").splitlines(),
        footer=_footer(comparison),
        **more,
    )


def _footer(comparison: Comparison) -> str:
    used = {name: found for run in comparison.runs for name, found in run.info.get("versions", {}).items()}
    made = f"basis-rl {versions('basis-rl').get('basis-rl', '')}, {datetime.date.today().isoformat()}"
    return made + ("; the runs used " + ", ".join(map(" ".join, used.items())) if used else "")
