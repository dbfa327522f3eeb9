"""ZeRO-2, ZeRO-3 and FSDP2 on one rank, with our accelerate configurations, compared with the same run without them.

With one rank nothing is sharded over others, but the run uses everything else of the engine: its copies of the weights,
its optimizer, its gathering and its saving.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.launch import launch, saved_weights
from benchmarks.gpu.runs import flat, relative, save_model, shape_on
from benchmarks.gpu.stage import Findings, need

# Tolerances of energies (absolute) and of the movement of the weights (relative): engines round to bfloat16 in other
# places; on a CPU everything is float32.
TOLERANCES = {"cuda": (0.05, 0.2), "cpu": (1e-5, 0.02)}
ENGINES = {"zero3": "DEEPSPEED", "fsdp2": "FSDP", "zero2": "DEEPSPEED"}
# For SGD, since Adam hides the gradient's size. They are so large that saving in bfloat16 (ZeRO-3) keeps the movement.
RATES = {"cuda": 10.0, "cpu": 1.0}


def settings(found: Findings) -> dict[str, Any]:
    """Settings for one step along the gradient itself."""
    return {"optim": "sgd", "learning_rate": RATES[found.device], "max_steps": 1}


def compare(found: Findings, kind: str, plain: dict[str, Any]) -> None:
    """Compare a run with an engine with the `plain` one."""
    if ENGINES[kind] == "DEEPSPEED":
        need("deepspeed", "hjson", "pydantic", "einops", "msgpack", "ninja", "cpuinfo")
    (rank,) = launch(found, kind, "otb", kind=kind, **settings(found))
    energies, moved = TOLERANCES[found.device]
    found.check(f"{kind}: is used", rank["type"].endswith(ENGINES[kind]), rank["type"])
    found.check(f"{kind}: parameters are in its hands", rank["sharded"] == (kind != "zero2"))
    found.check(f"{kind}: on the device", rank["device"].startswith(found.device), rank["device"])
    ours, theirs = (each["kept"][0]["batch"]["energies"] for each in (rank, plain))
    off = float((ours - theirs).abs().max())
    start, ends = flat_of(found, "start"), [flat_of(found, name) for name in (kind, "plain")]
    weights = relative(ends[0] - start, ends[1] - start)
    found.figure(
        kind,
        {
            "energies off": off,
            "movement off, relative": weights,
            "peak bytes": rank["peak"],
            "backend": rank["backend"],
        },
    )
    found.check(f"{kind}: energies", off <= energies, f"{off:.2e} off")
    found.check(f"{kind}: what was learned, as saved", weights <= moved, f"{weights:.2e} off")


def flat_of(found: Findings, name: str) -> torch.Tensor:
    """All weights of a saved run; ``start`` is the model before it."""
    weights = saved_weights(found, name)
    return flat(weights[key] for key in sorted(weights))


def run(found: Findings) -> None:
    """Run the engines one after another."""
    save_model(found.folder / "model", found.device, shape_on(found))
    (found.folder / "start").mkdir()
    (found.folder / "start" / "saved").symlink_to(found.folder / "model")
    (plain,) = launch(found, "plain", "otb", **settings(found))
    for kind in ENGINES:
        found.attempt(kind, compare, found, kind, plain)
