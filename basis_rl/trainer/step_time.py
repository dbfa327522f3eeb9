"""Where the time of an optimizer step goes, and how many tokens it trains on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.utils import compute_flops_per_token, compute_mfu, get_peak_flops


class StepTimer:
    """Seconds of this process by what it does, and tokens, from one optimizer step to the next.

    ``time/generation`` with tools and the weight transfer, ``time/scoring`` of forward passes without gradient,
    ``time/loss`` of those with one, ``time/update`` of backward passes and the optimizer. The rest of ``time/step`` is
    rewards, the baseline, the prompt sampler and logging. A GPU computes asynchronously, so its time is counted in the
    phase in which the process waits for it.

    Args:
        accelerator: sums tokens over ranks.
        config: the model's configuration.
        dtype: the name of the type in which matrices are multiplied.
    """

    def __init__(self, accelerator: Accelerator, config: Any, dtype: str) -> None:
        self.accelerator = accelerator
        self.config = config
        self.dtype = dtype
        self._spent: dict[str, float] = {}
        self._inside: list[float] = []
        self.begin()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time within it for `name`, except for what is measured under another name within it."""
        began = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._spent[name] = self._spent.get(name, 0.0) + spent - self._inside.pop()
            # An outer phase leaves this one out: a second counts once.
            if self._inside:
                self._inside[-1] += spent

    def begin(self) -> None:
        """A step begins now; an evaluation or a checkpoint before it belongs to no step."""
        self._spent.clear()
        # Tokens and rows, tokens that went through the model, and those that its head scored.
        self._counts = [0, 0, 0, 0]
        self._computed: float | None = None
        self._began = time.perf_counter()

    def loss_ended(self, mask: Tensor) -> None:
        """The loss of a micro-batch with this mask, ``(B, L)``, has been computed; its backward pass comes next."""
        self._counts[0] += int(mask.sum())
        self._counts[1] += len(mask)
        self._computed = time.perf_counter()

    def went_through(self, tokens: int, scored: int) -> None:
        """The loss's pass of a micro-batch had so many tokens, of which so many were scored."""
        self._counts[2] += tokens
        self._counts[3] += scored

    def backward_ended(self) -> None:
        """Count the time since the loss as that of the update."""
        if self._computed is not None:
            self._spent["update"] = self._spent.get("update", 0.0) + time.perf_counter() - self._computed
            self._computed = time.perf_counter()

    def take(self) -> dict[str, float]:
        """Metrics of the step that ends now. Collective."""
        self.backward_ended()
        step = time.perf_counter() - self._began
        device = self.accelerator.device
        mine = torch.tensor(self._counts, dtype=torch.float64, device=device)
        tokens, rows, computed, scored = self.accelerator.reduce(mine, reduction="sum").tolist()
        found = {f"time/{name}": spent for name, spent in self._spent.items()} | {"time/step": step}
        found |= {"tokens_per_second": tokens / step, "tokens/computed": computed}
        utilization = self._mfu(computed / step, scored / max(1.0, computed), round(tokens / max(1.0, rows)))
        return found if utilization is None else {**found, "mfu": utilization}

    def _mfu(self, tokens_per_second: float, scored: float, length: int) -> float | None:
        """Model FLOPs utilization in percent, of the whole step; None where TRL knows no peak or no count of FLOPs.

        Args:
            tokens_per_second: that went through the model.
            scored: share of them that its head has projected.
            length: of a row, tokens.
        """
        if self.accelerator.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.accelerator.device)
        # TRL has a table of GPUs by their names.
        peak = get_peak_flops(name, self.dtype.removeprefix("torch."))
        config = self.config.get_text_config()
        try:
            flops = compute_flops_per_token(config, length)
        except AttributeError:
            return None
        # TRL counts the head for every token, in the forward and twice in the backward pass.
        flops -= (1.0 - scored) * 3 * 2 * config.vocab_size * config.hidden_size
        return None if peak is None else compute_mfu(flops, tokens_per_second, self.accelerator.num_processes, peak)


def padding_metrics(output: dict[str, Any], accelerator: Accelerator) -> dict[str, float]:
    """``padding/share`` of all ranks' tokens in a generation batch as TRL pads it; with several ranks also
    ``padding/imbalance``, tokens of the rank that has most, divided by the mean over ranks."""
    masks = [output["prompt_mask"], output["completion_mask"]]
    counts = [sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)]
    mine = torch.tensor([counts], dtype=torch.float64, device=accelerator.device)
    tokens, columns = accelerator.gather(mine).unbind(dim=1)
    found = {"padding/share": float(1.0 - tokens.sum() / columns.sum())}
    if len(tokens) > 1:
        found["padding/imbalance"] = float(tokens.max() / tokens.mean())
    return found
