"""What the benchmarks compute, against the equations."""

import itertools
import math
import time

import numpy as np
import pytest
import torch

from benchmarks import advantage_cost
from benchmarks.common import peak_bytes
from benchmarks.trainers import StepClock, random_model


def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_peak_bytes_counts_what_lives_at_one_time():
    def two_at_a_time():
        for _ in range(3):
            first = torch.ones(250_000)
            second = torch.ones(250_000)
            del first, second

    assert peak_bytes(two_at_a_time) == pytest.approx(2e6, rel=0.01)


def test_naive_energies_are_the_equation():
    model = random_model(11, 8, 1, 2, inner=1)
    hidden, tokens = 30 * torch.randn(2, 3, 8), torch.randint(11, (2, 3))
    found = advantage_cost.naive_energies(model, hidden, tokens)
    for b, t in itertools.product(range(2), range(3)):
        weights = [math.exp((hidden[b, t].double() @ row.double()).item()) for row in model.lm_head.weight]
        p = [w / sum(weights) for w in weights]
        assert float(found[b, t]) == pytest.approx(1 - 2 * p[tokens[b, t]] + sum(q * q for q in p), abs=1e-5)


def test_the_step_clock_has_whole_steps_with_what_follows_the_gradient():
    clock = StepClock(time.process_time)
    for _ in range(3):
        clock.on_step_begin(None, None, None)
        burn(0.1)  # forward and backward
        burn(0.1)  # the optimizer, callbacks
    assert np.diff(clock.began) == pytest.approx([0.2, 0.2], abs=0.05)
