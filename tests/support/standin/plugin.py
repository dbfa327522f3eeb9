"""A plugin of pytest, ``-p tests.support.standin.plugin``: trainers of `tests.support.tiny` train on the stand-in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

RNG_FILE = "rng_state_standin.pth"


def pytest_configure() -> None:
    """Register the device, after ``conftest.py`` has set what torch and transformers read at their import."""
    from tests.support.standin import device

    # Read by `tests.support.tiny`, and by transformers and accelerate in place of looking for a GPU.
    os.environ["BASIS_TEST_DEVICE"] = device.NAME
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.NAME}:0"
    device.register()
    _teach_transformers()


def _teach_transformers() -> None:
    """What transformers does for the accelerators that it knows by name: random numbers are kept, bfloat16 is there."""
    import torch
    from transformers import Trainer, training_args

    save = Trainer._save_rng_state
    load = Trainer._load_rng_state
    random: Any = torch.get_device_module("standin")

    def save_with_device(trainer: Trainer, folder: str) -> None:
        save(trainer, folder)
        torch.save(random.get_rng_state(), Path(folder) / RNG_FILE)

    def load_with_device(trainer: Trainer, folder: str | None) -> None:
        load(trainer, folder)
        if folder is not None:
            random.set_rng_state(torch.load(Path(folder) / RNG_FILE))

    patch.object(Trainer, "_save_rng_state", save_with_device).start()
    patch.object(Trainer, "_load_rng_state", load_with_device).start()
    patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True).start()
