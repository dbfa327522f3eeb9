"""Two ranks compared with one rank: on two GPUs over NCCL, on one by gloo, since NCCL refuses two ranks on one GPU."""

from __future__ import annotations

from typing import Any

import torch

from basis_rl.types import RolloutBatch
from benchmarks.gpu.launch import launch, saved_weights
from benchmarks.gpu.runs import flat, named_baseline, relative, save_model, shape_on
from benchmarks.gpu.stage import Findings

# Tolerance relative to the movement of the weights: gradients are summed in another order, and in bfloat16 on a GPU.
MOVED = {"cuda": 0.1, "cpu": 1e-3}
SETTINGS: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 2, "gradient_accumulation_steps": 1}


def run(found: Findings) -> None:
    """Train on the same 16 rollouts per batch with one rank and with two."""
    save_model(found.folder / "model", found.device, shape_on(found))
    (one,) = launch(found, "one", "otb", per_device_train_batch_size=16, **SETTINGS)
    kind = "ddp" if found.cuda else "cpu"
    backend = "nccl" if torch.cuda.device_count() > 1 and found.cuda else "gloo"
    two = launch(
        found, "two", "otb", kind=kind, ranks=2, per_device_train_batch_size=8, ddp_backend=backend, **SETTINGS
    )
    found.figure("backend", [rank["backend"] for rank in two])
    found.figure("devices", [rank["device"] for rank in two])
    found.check("two ranks", all(rank["world"] == 2 for rank in two))
    found.check("on the device", all(rank["device"].startswith(found.device) for rank in two))
    for step, kept in enumerate(zip(*(rank["kept"] for rank in two), strict=True)):
        left, right = (RolloutBatch(**each["batch"]) for each in kept)
        same = torch.equal(left.rewards, right.rewards) and left.prompt_ids == right.prompt_ids
        same = same and torch.equal(left.energies, right.energies)  # type: ignore[arg-type]
        found.check(f"batch {step}: the same on both ranks", same)
        expected = named_baseline("otb").advantages(left).values.float()
        found.check(
            f"batch {step}: advantages", torch.equal(torch.cat([each["advantages"] for each in kept]), expected)
        )
        found.check(f"batch {step}: some are not 0", bool((expected != 0).any()))
    alone, shared = one["kept"][0]["batch"], two[0]["kept"][0]["batch"]
    found.check("the rewards are one rank's", torch.equal(alone["rewards"], shared["rewards"]))
    off = float((alone["energies"] - shared["energies"]).abs().max())
    start, ends = weights(found, "model"), [weights(found, name) for name in ("two", "one")]
    moved = relative(ends[0] - start, ends[1] - start)
    found.figure("against one rank", {"energies off": off, "movement off, relative": moved})
    found.check("what was learned is one rank's", moved <= MOVED[found.device], f"{moved:.2e} off")


def weights(found: Findings, name: str) -> torch.Tensor:
    """All weights of a run, or of the model before it."""
    if name == "model":
        (found.folder / "start").mkdir(exist_ok=True)
        (found.folder / "start" / "saved").symlink_to(found.folder / "model")
        name = "start"
    found_weights = saved_weights(found, name)
    return flat(found_weights[key] for key in sorted(found_weights))
