"""The order of the prompts, which a resumed run must find again in any epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler


class EpochSampler(RepeatSampler):
    """TRL's sampler, which knows the epoch.

    TRL's draws one permutation an epoch from one generator, so that a run resumed in epoch e would walk through epoch 0
    again. Here the generator is reset in each epoch and skips e permutations, which gives the same order as TRL.

    Args:
        epoch: tells the epoch, when iteration starts.
        **kwargs: as in TRL.
    """

    def __init__(self, *, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()
