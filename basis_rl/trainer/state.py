"""The baseline's state in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from basis_rl.baselines import Baseline

FILE_NAME = "baseline_state.pt"


def save_baseline(folder: str | Path, baseline: Baseline, step: int) -> None:
    """Write the state and the index of the next generation batch into a checkpoint folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    content = {"baseline": type(baseline).__name__, "step": step, "state": baseline.state_dict()}
    torch.save(content, Path(folder) / FILE_NAME)


def load_baseline(folder: str | Path, baseline: Baseline) -> int:
    """Restore the state from a checkpoint folder and return the index of the next generation batch.

    Raises:
        ValueError: the checkpoint has no state for a baseline that has one, or the state of another baseline.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        if not baseline.state_dict():
            return 0
        raise ValueError(f"'{folder}' has no {FILE_NAME}: it was not saved with this baseline. Start a new run.")
    content = torch.load(path, weights_only=True)
    if content["baseline"] != type(baseline).__name__:
        raise ValueError(
            f"'{folder}' was saved with the baseline {content['baseline']}, this run has {type(baseline).__name__}. "
            "Resume with the same baseline, or start a new run from the checkpoint's model."
        )
    baseline.load_state_dict(content["state"])
    return int(content["step"])
