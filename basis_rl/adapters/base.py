"""What the adapters share: a baseline that another trainer asks for the advantages of its batches."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from basis_rl.baselines import Baseline, baseline_name, build_baseline
from basis_rl.types import RolloutBatch


class Estimator:
    """A baseline in another trainer: asked once for each batch, from which it then learns.

    It learns at once, before the policy's update, so it never sees what comes from that update
    (`Baseline.learns_from`): ``target: optimal`` stays at the value itself.

    Args:
        baseline: the object, or the name of a registered one with its default parameters.
        trainer: the other trainer's name, for messages.
        given: the optional signals of `RolloutBatch` that the adapter hands over.
        state_file: where the state is written after each batch, and read from now if the file exists. None keeps it
            in memory.

    Raises:
        ValueError: the baseline reads a signal that is not given, or `state_file` is of another baseline, or damaged.
    """

    def __init__(
        self, baseline: Baseline | str, trainer: str, given: Collection[str] = (), state_file: str | Path | None = None
    ) -> None:
        self.baseline = build_baseline(baseline) if isinstance(baseline, str) else baseline
        self.name = baseline_name(self.baseline)
        self.trainer = trainer
        missing = ", ".join(sorted(self.baseline.requires - set(given)))
        if missing:
            told = ", ".join(["rewards", "prompts", "masks", *given])
            way_out = f"Take one that does without {missing}, or train with `BasisTrainer`, which provides it"
            raise ValueError(f"'{self.name}' reads {missing}, and {trainer} hands over only {told}. {way_out}.")
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.state_file = None if state_file is None else Path(state_file)
        if self.state_file is not None:
            self.state_file.parent.mkdir(parents=True, exist_ok=True)
            if self.state_file.exists():
                self.load(self.state_file)

    def estimate(
        self, rewards: Tensor, mask: Tensor, groups: Sequence[Hashable], prompt_ids: Sequence[str], **signals: Any
    ) -> Tensor:
        """Advantages of one batch, ``(N, T)`` on the device and in the type of `rewards`; then the baseline learns.

        Args:
            rewards: ``(N,)``; NaN = could not be scored.
            mask: ``(N, T)``, tokens that the policy sampled. A row without any is not scored either: padding.
            groups: of each row; rollouts of one prompt that were drawn together have the same.
            prompt_ids: of each row, the same whenever the prompt comes again.
            signals: the optional fields of `RolloutBatch` that were promised.

        Raises:
            ValueError: all groups are smaller than the baseline needs, or it returned what is not finite, as of a
                reward that is infinite; nothing is learnt then.
        """
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        group_ids = torch.tensor([numbers[group] for group in groups])
        largest = int(torch.bincount(group_ids).max())
        if largest < self.baseline.min_group_size:
            needs = f"needs at least {self.baseline.min_group_size} rollouts of a prompt in a batch"
            raise ValueError(f"'{self.name}' {needs}, and {self.trainer} has drawn {largest}. Draw more of each.")
        actions = mask.bool().cpu()
        scores = rewards.detach().float().cpu().masked_fill(~actions.any(dim=1), torch.nan)
        batch = RolloutBatch(
            rewards=scores,
            group_ids=group_ids,
            prompt_ids=list(map(str, prompt_ids)),
            action_mask=actions,
            step=self.step,
            **signals,
        )
        result = self.baseline.advantages(batch)
        finite = result.values.isfinite().all() and result.baseline.isfinite().all()
        if scores.isinf().any() or not finite:
            what = f"the advantages or baselines of batch {self.step} are not finite"
            raise ValueError(f"'{self.name}': a reward is infinite, or {what}.")
        self.baseline.update(batch)
        self.step += 1
        self.metrics = result.metrics
        if self.state_file is not None:
            # Whole or not there, should the run be stopped meanwhile.
            torch.save(self.state_dict(), partial := f"{self.state_file}.tmp")
            os.replace(partial, self.state_file)
        values = result.values if result.values.ndim == 2 else result.values[:, None]
        return (values * actions).to(rewards)

    def load(self, path: Path) -> None:
        """Restore the `state_dict` that a file has.

        Raises:
            ValueError: there is no such file, it is damaged, or it is of another baseline.
        """
        try:
            state = torch.load(path, weights_only=True)
            state = {key: state[key] for key in ("step", "baseline")}
        # What a damaged file raises depends on where it is damaged.
        except Exception as error:
            way_out = "Restore it, or begin without: take another state_file, or start a new run from the model"
            raise ValueError(f"'{path}' has no baseline's state ({type(error).__name__}). {way_out}.") from error
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The baseline's state and the number of batches."""
        return {"step": self.step, "baseline": self.baseline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result.

        Raises:
            ValueError: it is of another baseline.
        """
        self.baseline.load_state_dict(state["baseline"])
        self.step = state["step"]
