"""A plugin of pytest, ``-p tests.support.standin.plugin``: trainers of `tests.support.tiny` train on the stand-in."""

from __future__ import annotations

import os

import torch
import transformers.training_args
from accelerate.state import PartialState

from tests.support.standin import device

# Read by `tests.support.tiny`, and by transformers and accelerate, before any of them looks for a GPU.
os.environ["BASIS_TEST_DEVICE"] = device.NAME
os.environ["ACCELERATE_TORCH_DEVICE"] = f"{device.NAME}:0"
device.register()

# Both know the names of the accelerators that exist.
PartialState.default_device = property(lambda self: torch.device(device.NAME, 0))
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
