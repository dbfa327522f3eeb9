"""Generators of random numbers: what they are at, and leaving them there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """After it every generator of random numbers is where it was before."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def random_states(device: torch.device) -> list[object]:
    """What tells whether a number was drawn on the CPU, on `device` or by Python, between two calls."""
    found: list[object] = [torch.get_rng_state().tolist(), random.getstate()]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(device).tolist())
    return found
