"""vLLM's engine in the process of the trainer, with and without sleep mode.

The difference between served and trained log-probabilities after each sync, in bfloat16, shows which
`vllm_sync_tolerance` is right.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.gpu.launch import launch
from benchmarks.gpu.runs import save_model
from benchmarks.gpu.stage import Findings, need

# vLLM's kernels need heads of size 32 or more.
SHAPES = {"cuda": (151_936, 512, 12, 8), "cpu": (320, 128, 2, 4)}
TOLERANCE = {"cuda": 0.25, "cpu": 1e-4}
CONTEXT = 512


def check(found: Findings, name: str, rank: dict[str, Any], steps: int = 4) -> None:
    """Check that every step synced the weights, and that the engine samples as the policy would."""
    row = {
        key: [entry[key] for entry in rank["log"] if key in entry]
        for key in ("rollout/sync_error", "rollout/kl", "grad_norm", "step_time")
    }
    found.figure(name, row | {"peak bytes of torch": rank["peak"]})
    errors = row["rollout/sync_error"]
    found.check(f"{name}: its numbers are finite", all(math.isfinite(value) for each in row.values() for value in each))
    found.check(f"{name}: every step synced", len(errors) == steps, f"{len(errors)} of {steps}")
    bound = TOLERANCE[found.device]
    found.check(
        f"{name}: log-probabilities agree", max(errors, default=9.0) <= bound, f"{max(errors, default=9.0):.2e}"
    )
    found.check(f"{name}: there is a gradient", max(row["grad_norm"], default=0.0) > 0)


def colocated(found: Findings, name: str, **settings: Any) -> None:
    """Run the engine in the trainer's process."""
    gpu: dict[str, Any] = {"vllm_gpu_memory_utilization": 0.2} if found.cuda else {}
    (rank,) = launch(
        found, name.replace(" ", "-"), "rloo", given=False, use_vllm=True, vllm_mode="colocate", max_steps=4,
        vllm_max_model_length=CONTEXT if found.cuda else 128, max_completion_length=64 if found.cuda else 12,
        **gpu, **settings,
    )  # fmt: skip
    check(found, name, rank)


def run(found: Findings) -> None:
    """Run the engine without compilation, which starts sooner, and on a GPU with it and with sleep mode."""
    need("vllm")
    save_model(found.folder / "model", found.device, SHAPES[found.device])
    found.attempt("engine", colocated, found, "engine", eager_engine=found.cuda)
    if found.cuda:
        name = "compiled engine that sleeps"
        found.attempt(name, colocated, found, name, vllm_enable_sleep_mode=True)
    else:
        found.figure("not run on a CPU", "sleep mode")
