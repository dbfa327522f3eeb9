"""Plots of one run, from its log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_log(run: str | Path) -> list[dict[str, Any]]:
    """The log of a run's folder: ``trainer_state.json`` of the folder itself or of its newest checkpoint.

    Raises:
        ValueError: the folder has no log.
    """
    folder = Path(run)
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for place in [folder, *reversed(checkpoints)]:
        if (place / "trainer_state.json").is_file():
            log: list[dict[str, Any]] = json.loads((place / "trainer_state.json").read_text())["log_history"]
            return log
    raise ValueError(
        f"'{run}' has no trainer_state.json. Name the output_dir of a run that has finished or saved a checkpoint."
    )


def plot_training(log: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Plot the reward, the baseline's error and its beta over optimizer steps into a PNG, one panel for each.

    A metric that the log does not have gets no panel. Nothing is written if the log has none of them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    panels = [
        ("reward", "mean reward", "tab:blue"),
        ("baseline/mse_to_reward", "mean of (r - b)²", "tab:green"),
        ("baseline/beta", "calibrated β", "tab:orange"),
    ]
    shown = [panel for panel in panels if any(row.get(panel[0]) is not None for row in log)]
    if not shown:  # fewer steps than logging_steps
        return
    figure, axes = plt.subplots(len(shown), 1, figsize=(7, 2.2 * len(shown)), sharex=True, squeeze=False)
    for axis, (key, label, color) in zip(axes[:, 0], shown, strict=True):
        points = [(row["step"], row[key]) for row in log if row.get(key) is not None]
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axis.plot(steps, smooth(values), color=color, linewidth=2)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if key == "baseline/beta":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes[-1, 0].set_xlabel("optimizer step")
    axes[0, 0].set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average ``m_t = w m_{t-1} + (1 - w) x_t``, divided by ``1 - w^t`` because ``m_0 = 0``."""
    result, mean, mass = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        result.append(mean / mass)
    return result
