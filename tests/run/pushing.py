"""Runs that push to the Hub of `HF_ENDPOINT`, in a process of their own: ``python -m tests.run.pushing ...``.

Each job is one JSON argument, ``{"name": repository, "out": folder, ...}``; the last line of stdout is a JSON object,
name to what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from basis_rl.__main__ import leave
from basis_rl.trainer import BasisTrainer
from tests.support.tiny import config, named_baseline, parity_reward, sums

torch.set_num_threads(1)


def run(job: dict[str, Any], model: str) -> dict[str, Any]:
    settings = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": True, "hub_retry_wait": 0.05}
    data = sums()
    trainer = BasisTrainer(
        model=model,
        reward_funcs=parity_reward,
        args=config(job["out"], **{**settings, "hub_model_id": job["name"], **job.get("args", {})}),
        train_dataset=data,
        baseline=named_baseline(job.get("baseline", "rloo"), data),
    )
    trainer.train(resume_from_checkpoint=job.get("resume"))
    pushed = trainer.push_to_hub() if job.get("push", True) else None
    if int(os.environ.get("RANK", "0")) == 0:
        trainer.model.save_pretrained(Path(job["out"]) / "_as_trained")
    weights = {key: value.double().sum().item() for key, value in trainer.model.state_dict().items()}
    return {"pushed": str(pushed.oid) if pushed else None, "step": trainer.state.global_step, "weights": weights}


def main() -> None:
    model, *jobs = sys.argv[1:]
    outcome: dict[str, Any] = {}
    for job in map(json.loads, jobs):
        try:
            outcome[job["name"]] = run(job, model)
        except ValueError as error:
            outcome[job["name"]] = {"error": str(error)}
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if int(os.environ.get("RANK", "0")) == 0:
        print("\n" + json.dumps(outcome))


if __name__ == "__main__":
    main()
    leave(0)
