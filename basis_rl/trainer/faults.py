"""Stops a run on signals, skips steps whose gradients are not finite, and measures the variance of gradients."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from basis_rl.run.errors import NonFiniteGradients, StopAsked, WeightsLost
from basis_rl.run.terminal import handling_stop_signals

STOP_FILE = "STOP"
# Seconds within which a signal that comes again means the same request.
_SAME_SIGNAL = 5.0


class StopOnSignal(TrainerCallback):
    """SIGTERM, SIGUSR1, SIGHUP, Ctrl-C or a file ``STOP`` in ``output_dir``: all ranks finish the step, save it, stop.

    `stopped` says that it has happened, and `raised` is what then ends the program on every rank, as the signal itself
    would have: a script must not take the run for a finished one.

    The ranks agree at each step's end, so that none of them waits for another. A second signal, some seconds later,
    kills at once (launchers often send each one twice). The file is for launchers that kill their processes some
    seconds after a SIGTERM (torchrun and accelerate: 30), which a long step outlasts; it is removed when the run stops.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.asked: float | None = None
        self.number = 0
        self.stopped = False
        self._interrupts = False

    @property
    def raised(self) -> BaseException:
        """KeyboardInterrupt for Ctrl-C and the file, else SystemExit with the code that shells give for the signal."""
        return KeyboardInterrupt() if self.number == signal.SIGINT else SystemExit(128 + self.number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the signals are caught. Only the main thread can do that; in any other one nothing changes."""
        self.number = 0
        self.stopped = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handling_stop_signals(self._ask):
            try:
                yield
            finally:
                self.asked = None

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within it a signal raises `StopAsked` at once, and so does one that came before; in the main thread only.

        For waits on a server, which may take longer than a cluster's scheduler leaves after a signal.
        """
        if self._interrupts or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._interrupts = True
        try:
            if self.asked is not None:
                raise StopAsked(self.number)
            yield
        finally:
            self._interrupts = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked is not None and now - self.asked > _SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = self.asked or now
        self.number = self.number or int(number)
        if self._interrupts:
            raise StopAsked(self.number)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # This file asked an earlier run to stop, which had ended by then.
        if state.is_world_process_zero:
            (Path(str(args.output_dir)) / STOP_FILE).unlink(missing_ok=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        file = Path(str(args.output_dir)) / STOP_FILE
        by_file = self.accelerator.is_main_process and file.exists()
        asked = torch.tensor([self.number or by_file * int(signal.SIGINT)], device=self.accelerator.device)
        self.number = int(self.accelerator.gather(asked).max())
        if self.number:
            self.stopped = True
            if self.accelerator.is_main_process:
                file.unlink(missing_ok=True)
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True


class FiniteGradients:
    """Skips steps whose gradient is not finite: no weight, no moment of the optimizer is touched.

    DeepSpeed steps before it tells the norm, and leaves such a step out by itself (0.19, ZeRO-3); if it has applied
    one, `check_weights` ends the run. The norm is that of the gradient averaged over ranks, so all
    ranks decide alike.

    Args:
        most: how many steps in a row may be skipped before the run ends.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.skipped = 0
        self.in_a_row = 0

    def keeps(self, model: Any, grad_norm: Any, step: int) -> bool:
        """Whether optimizer step number `step` may use its gradients; if not, they are dropped.

        Raises:
            NonFiniteGradients: it is the `most`-th step in a row without finite ones.
        """
        # DeepSpeed's norm is -1 where it has none.
        finite = grad_norm is None or (math.isfinite(float(grad_norm)) and float(grad_norm) >= 0)
        if hasattr(model, "was_step_applied"):
            finite = bool(model.was_step_applied())
        if finite:
            self.in_a_row = 0
            return True
        # Optimizers pass over parameters without a gradient.
        for parameter in model.parameters():
            parameter.grad = None
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.most:
            raise NonFiniteGradients(
                f"{self.in_a_row} steps in a row (step {step} is the last) had gradients that are not finite. They "
                "were skipped; the weights are those before them, in the newest checkpoint. Look at the learning rate, "
                "the precision (bf16 rather than fp16) and the advantages' metrics."
            )
        return False

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped = int(state["skipped"])
        self.in_a_row = int(state["in_a_row"])


def check_weights(accelerator: Accelerator, model: nn.Module, step: int) -> None:
    """The trained weights after optimizer step number `step` can be computed with. Reads each weight once; collective.

    Raises:
        WeightsLost: on some rank they are not finite, or their root mean square is above 1e6.
    """
    weights = [_own_part(each) for each in model.parameters() if each.requires_grad]
    norm = get_total_norm(weights)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    size = float(norm) / max(1, sum(each.numel() for each in weights)) ** 0.5
    sizes = accelerator.gather(torch.tensor([size], device=accelerator.device))
    # Usual are 0.01 to 1.
    if not bool((sizes <= 1e6).all()):
        raise WeightsLost(
            f"After step {step} the weights have a root mean square of {float(sizes.max()):.3g}. Resume from the "
            "newest checkpoint, which has those before it, with a lower learning_rate or another schedule."
        )


def _own_part(weight: Any) -> Tensor:
    """Of a weight that ZeRO-3 has divided the part of this rank, without the padding after the last number, to which
    DeepSpeed never writes."""
    part: Tensor = getattr(weight, "ds_tensor", weight)
    if part is not weight:
        rank = torch.distributed.get_rank(weight.ds_process_group)
        part = part.flatten()[: max(0, weight.ds_numel - rank * part.numel())]
    return part


class GradientMonitor:
    """Total power, signal and variance of an optimizer step's gradient (Optimal Token Baseline, App. E, Eqs. 65-67).

    With the gradients ``g_1 .. g_n`` of the step's micro-batches (over all ranks), each scaled to be an estimate of the
    whole step's gradient ``g = mean_j g_j``::

        total_power = mean_j |g_j|^2      signal = |g|^2      variance = (total_power - signal) / (n - 1)

    `variance` is the variance of g; one micro-batch of one rollout is the paper's sample. The paper puts a proxy of the
    power in LOGIT space beside a signal in parameter space; here all three are in parameter space, before clipping.
    Gradients are caught on their way into ``.grad``, so nothing is copied. Steps of a single micro-batch log nothing.

    Raises:
        ValueError: gradients are sharded or scaled, so that a parameter's whole gradient is never seen.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, *, fp16: bool) -> None:
        kind = accelerator.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP) or fp16:
            found = "fp16" if fp16 else kind.value
            raise ValueError(
                f"log_gradient_variance does not work with {found}: whole, unscaled "
                "gradients are needed. Leave it out, or train with plain data parallelism in bf16 or fp32."
            )
        self.accelerator = accelerator
        self._power: Tensor | None = None
        self._micro_batches = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        power = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32) ** 2
        self._power = power if self._power is None else self._power + power

    def count(self) -> None:
        """Call after each micro-batch's backward pass."""
        self._micro_batches += 1

    def close(self, grad_norm: float) -> dict[str, float]:
        """Metrics of the step whose gradient, averaged over ranks and not clipped, has this norm."""
        ranks = self.accelerator.num_processes
        n = self._micro_batches * ranks
        power = self._power
        self._power = None
        self._micro_batches = 0
        if power is None or n < 2:
            return {}
        total = n / ranks**2 * float(self.accelerator.reduce(power, reduction="sum"))
        signal = float(grad_norm) ** 2
        return {
            "gradient/total_power": total,
            "gradient/signal": signal,
            "gradient/variance": (total - signal) / (n - 1),
        }
