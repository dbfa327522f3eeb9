"""The look of the studies' plots: colours, markers and grid of `basis_rl.report.plots`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from basis_rl.report.plots import LIGHT as LIGHT
from basis_rl.report.plots import marker

MARKERS, LINES = ("o", "s", "^", "D", "v", "P", "X"), ("-", "--", "-.", ":")


@contextmanager
def panels(path: Path, rows: int, columns: int, *, width: float = 4.6, height: float = 3.3) -> Iterator[list[Any]]:
    """Axes, row by row; they are written to `path` when the context ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with matplotlib.rc_context({"font.size": 10, "font.family": "sans-serif"}):
        figure, grid = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
        axes = [axis for row in grid for axis in row]
        yield axes
        for axis in axes:
            axis.grid(color="#d0d0d0", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the figure with few colours, which is a third of the size, and close it."""
    from matplotlib import pyplot as plt
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.08)
    plt.close(figure)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)
    print(f"plot: {path}")


def style(index: int) -> dict[str, Any]:
    """Colour, line and marker of the index-th curve."""
    return {
        "color": LIGHT[index % len(LIGHT)],
        "linestyle": LINES[index // len(LIGHT) % len(LINES)],
        "marker": MARKERS[marker(index)],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def title(axis: Any, text: str, x: str, y: str) -> None:
    """Set the title of a panel and the labels of its axes."""
    axis.set_title(text, fontsize=11, loc="left")
    axis.set_xlabel(x)
    axis.set_ylabel(y)


def thousands(axis: Any) -> None:
    """Show the counts on the x axis as 5k, 10k, so that the labels do not overlap."""
    from matplotlib import ticker

    axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))


def percent(axis: Any) -> None:
    """Show shares on the y axis as whole percentages, or with one decimal if the axis spans at most 5 points."""
    from matplotlib import ticker

    axis.yaxis.set_major_locator(ticker.MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    low, high = axis.get_ylim()
    axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0 if high - low > 0.05 else 1))


def beside(axis: Any, of: Any | None = None) -> None:
    """Draw the legend of `of` (by default of `axis` itself) to the right of `axis`, where it covers no curve."""
    handles, labels = (of or axis).get_legend_handles_labels()
    axis.legend(handles, labels, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def curves(axis: Any, pairs: Sequence[tuple[Sequence[float], Sequence[float]]], index: int, label: str) -> None:
    """`band` of pairs of x and y, cut to the shortest; x is the mean over seeds. Does nothing without pairs."""
    import numpy as np

    if pairs:
        count = min(len(y) for _, y in pairs)
        band(axis, np.mean([x[:count] for x, _ in pairs], axis=0), [y[:count] for _, y in pairs], index, label)


def band(axis: Any, x: ArrayLike, curves: ArrayLike, index: int, label: str) -> None:
    """Draw the mean over seeds and a band from smallest to largest; `x` is ``(N,)``, `curves` ``(seeds, N)``."""
    import numpy as np

    table, look = np.array(curves, dtype=float), style(index)
    every = max(1, table.shape[1] // 7)
    axis.plot(x, np.nanmean(table, axis=0), label=label, markevery=(index % every, every), **look)
    if len(table) > 1:
        axis.fill_between(x, np.nanmin(table, 0), np.nanmax(table, 0), color=look["color"], alpha=0.13, linewidth=0)
