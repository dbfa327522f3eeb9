"""Run by `test_sharding.py` under `accelerate launch`: trains on several ranks and keeps what each of them saw."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from basis_rl.__main__ import leave
from basis_rl.baselines import Ppo
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.shards import whole
from tests.support.ranks import no_shared_memory
from tests.support.served import trainer
from tests.support.tiny import Keeps, tiny_trainer

RUNS = {
    "basis": (1, {}),
    "otb": (4, {}),
    "rloo": (4, {"async_prefetch": True}),
    "grpo": (4, {"peft_config": LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")}),
}


class OnCpus(BasisTrainer):
    """accelerate shards by FSDP only where it finds GPUs, though PyTorch does it on CPUs as well."""

    def create_accelerator_and_postprocess(self):
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


class Keep(Keeps, OnCpus):
    """Keeps every global batch and this rank's advantages."""

    def noted(self, inputs, output, local):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        tokens = {name: output[name].clone() for name in names}
        return {"batch": vars(self._pending.newest), "advantages": local.clone(), **tokens}


def against_a_server(output: Path, model: Path, url: str, names: list[str]) -> None:
    results = {}
    for name in names:
        group, settings = RUNS[name]
        trained = trainer(output / name, model, url, name, Keep, num_generations=group, **settings)
        assert trained.accelerator.num_processes == 2
        trained.train()
        trained.save_model(str(output / name / "saved"))
        logs = trained.state.log_history
        parameter = next(trained.model.parameters())
        results[name] = {
            "kept": trained.kept,
            "sync_errors": [row["rollout/sync_error"] for row in logs if "rollout/sync_error" in row],
            "staleness": [row["rollout/staleness"] for row in logs if "rollout/staleness" in row],
            "sharded": hasattr(parameter, "ds_tensor") or hasattr(parameter, "full_tensor"),
            "type": str(trained.accelerator.distributed_type),
        }
        rank = trained.accelerator.process_index
    torch.save(results, output / f"rank{rank}.pt")


def resumed(output: Path, model: Path, kind: str) -> None:
    """Four steps, and the last two again from the checkpoint between them, in the middle of a generation batch."""
    critics = {"head": {}, "value_model": {"critic_model": str(model), "critic_learning_rate": 1e-3}}
    output.mkdir(exist_ok=True)
    for name, start in (("whole", None), ("again", output / "whole" / "checkpoint-3")):
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
        baseline = Ppo(**critics[kind]) if kind in critics else kind
        own = {"model": model, "model_init_kwargs": {"dtype": "float32"}}
        trained = tiny_trainer(output / name, baseline, OnCpus, **own, **saving)
        trained.train(resume_from_checkpoint=str(start) if start else None)
        trained.save_model(str(output / name / "saved"))
        norms = [(row["step"], row["grad_norm"]) for row in trained.state.log_history if "grad_norm" in row]
        critic = trained._critic
        module = whole(critic.module.state_dict()) if critic is not None else {}
        sharded = critic is not None and any(isinstance(p, DTensor) for p in critic.parameters)
        kind_of = str(trained.accelerator.distributed_type)
        kept = {"norms": norms, "type": kind_of, "module": module, "module_sharded": sharded}
        rank = trained.accelerator.process_index
        torch.save(kept, output / (f"{name}.pt" if rank == 0 else f"{name}-rank{rank}.pt"))


if __name__ == "__main__":
    no_shared_memory()
    what, folder, path, *rest = sys.argv[1:]
    if what == "server":
        against_a_server(Path(folder), Path(path), rest[0], rest[1:])
    else:
        for kind in rest:
            resumed(Path(folder) / kind, Path(path), kind)
    leave(0)
