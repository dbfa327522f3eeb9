"""A vLLM server beside the trainer, with weights through shared memory and over NCCL.

On one GPU NCCL refuses the second process, which is recorded, and no fault; on two the server has the second one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from basis_rl.engine.server import Server, ServerOptions, free_port
from benchmarks.gpu.launch import launch
from benchmarks.gpu.runs import save_model
from benchmarks.gpu.stage import Findings, need
from benchmarks.gpu.vllm_engine import CONTEXT, SHAPES, check

STEPS = 4
FOLDER, NCCL = "weights through a folder", "weights over NCCL"
START, ANSWER = 90.0, 60.0  # seconds until the server must answer, and until a run over NCCL must be done


def options_for(found: Findings, model: Path, several: bool) -> ServerOptions:
    """A server that starts soon, on the second GPU where there are several."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    extra = ("--gpu-memory-utilization", "0.2", "--enforce-eager") if found.cuda else ()
    return ServerOptions(
        str(model), port=0, dtype="bfloat16" if found.cuda else "float32", max_model_len=CONTEXT,
        log=found.folder / "server.log", devices=visible[1] if several else None, extra=extra,
    )  # fmt: skip


def trained(found: Findings, server: Server, transfer: str, **settings: Any) -> None:
    """Train with rollouts of the server, to which the weights go by ``transfer``."""
    (rank,) = launch(
        found, transfer, "rloo", given=False, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url,
        vllm_weight_sync=transfer, max_steps=STEPS, max_completion_length=64 if found.cuda else 12, **settings,
    )  # fmt: skip
    check(found, f"server, {transfer}", rank, STEPS)


def over_nccl(found: Findings, server: Server, several: bool) -> None:
    """The same over NCCL. On one GPU, how it fails is a finding."""
    try:
        trained(found, server, "nccl", vllm_group_port=free_port(), timeout=ANSWER)
    except RuntimeError as error:
        if several:
            raise
        found.figure(f"{NCCL}, one GPU", f"failed, as NCCL does on one GPU: {error}")


def run(found: Findings) -> None:
    """Start the server once, and train with it by one way after the other."""
    need("vllm")
    if not found.cuda:
        found.figure("not run on a CPU", NCCL)
    found.figure("CUDA IPC", "not exercised: basis_rl sends weights to a server over NCCL or through a folder")
    several = found.cuda and torch.cuda.device_count() > 1
    model = save_model(found.folder / "model", found.device, SHAPES[found.device])
    began = time.monotonic()
    with Server(options_for(found, model, several), START if found.cuda else 3 * START) as server:
        found.figure("seconds until the server answers", round(time.monotonic() - began, 1))
        found.attempt(FOLDER, trained, found, server, "folder")
        if found.cuda:
            found.attempt(NCCL, over_nccl, found, server, several)
