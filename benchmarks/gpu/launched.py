"""Run by the stages, under `accelerate launch` or alone: trains shortly, and writes this rank's record of it to a file.

The arguments are a folder with a model, a baseline, a device, and the settings as JSON; their names are those of
`benchmarks.gpu.runs.build_trainer`.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from trl.generation import vllm_generation

from basis_rl.__main__ import leave
from benchmarks.gpu.runs import Given, build_trainer
from tests.trainer.sharded import OnCpus


class Keep(OnCpus):
    """A trainer that records every global batch and this rank's advantages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kept: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs: Any, output: Any) -> Any:
        local = super()._advantages(inputs, output)
        batch = self._pending.newest
        self.kept.append({"batch": dict(vars(batch)), "advantages": local.detach().cpu().clone()})
        return local


class KeepGiven(Given, Keep):
    """The same with rollouts that are given, not sampled."""


def share_gpus() -> None:
    """If there are more ranks than GPUs, let every rank use the first GPU; accelerate would choose missing devices."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def main(folder: Path, side: str, device: str, settings: dict[str, Any]) -> None:
    """Train the model in ``folder/model``, and write ``rankN.pt``."""
    if device == "cuda":
        share_gpus()
    given = settings.pop("given", True)
    if settings.pop("eager_engine", False):
        eager = partial(vllm_generation.LLM, enforce_eager=True)
        patch.object(vllm_generation, "LLM", eager).start()
    out = folder / settings.pop("out")
    if device == "cpu" and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        # DeepSpeed would spend a minute on compiling an extension for shared memory between CPU ranks.
        patch("deepspeed.comm.torch.build_shm_op", return_value=None).start()
    trainer = build_trainer(
        side, folder / "model", out / "run", device, cls=KeepGiven if given else Keep,
        model_init_kwargs={"dtype": "float32"}, **settings,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(out / "saved"))
    parameter = next(trainer.model.parameters())
    found = {
        "kept": trainer.kept,
        "log": trainer.state.log_history,
        "type": str(trainer.accelerator.distributed_type),
        "device": str(trainer.accelerator.device),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "world": trainer.accelerator.num_processes,
        "sharded": hasattr(parameter, "ds_tensor") or hasattr(parameter, "full_tensor"),
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
    torch.save(found, out / f"rank{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    leave(0)
