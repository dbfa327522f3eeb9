"""Generators of random numbers: what they are at, and leaving them there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import torch
from transformers import set_seed

from basis_rl.run.seams import attributes


@contextmanager
def random_numbers_kept(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """After it every generator of random numbers is where it was before. Within it they begin with `seed`, if given."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        if seed is not None:
            set_seed(seed)
        yield
    random.setstate(python)
    np.random.set_state(numpy)


class OwnNumbers:
    """The policy's random numbers, kept apart from those of rewards, tools and environments, which may set seeds.

    Foreign code draws from generators that are seeded anew each time, or it would draw the same numbers wherever the
    policy draws none (vLLM). It must run while the thread that has lent them waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: ExitStack | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it the generators are foreign code's."""
        with ExitStack() as lent, attributes(self, _lent=lent):
            lent.enter_context(self._new())
            yield

    @contextmanager
    def back(self) -> Iterator[None]:
        """Within `lent`, the policy's numbers go on for a while; anywhere else it changes nothing."""
        if self._lent is None:
            yield
            return
        self._lent.close()
        yield
        self._lent.enter_context(self._new())

    def _new(self) -> AbstractContextManager[None]:
        return random_numbers_kept(self._device, random.getrandbits(32))


def random_states(device: torch.device) -> list[object]:
    """What tells whether a number was drawn on the CPU, on `device` or by Python, between two calls."""
    found: list[object] = [torch.get_rng_state().tolist(), random.getstate()]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device).tolist())
    return found
