"""Called by `test_sharding.py` on two ranks: trains, and returns what each of them saw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from basis_rl.baselines import Ppo, Sao
from basis_rl.baselines.optimal import TargetedBaseline
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.critic import whole_tensor
from tests.support.served import trainer
from tests.support.tiny import Keeps, tiny_trainer

LORA = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
# Three groups of 4, of which the middle one has two rows on each rank.
STREAM = {
    "rollouts": "stream",
    "max_staleness": 2,
    "batches_in_flight": 2,
    "per_device_train_batch_size": 6,
    "vllm_importance_sampling_mode": "token_truncate",
}
RUNS = {
    "otb": (4, {}),
    "rloo": (4, STREAM),
    "grpo": (4, {"peft_config": LORA}),
    "dr_grpo": (4, {"peft_config": LORA, "vllm_lora_sync": "adapter", "learning_rate": 1e-3}),
}


class OnCpus(BasisTrainer):
    """accelerate shards by FSDP only where it finds GPUs, though PyTorch does it on CPUs as well."""

    def create_accelerator_and_postprocess(self):
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


class Ragged(OnCpus):
    """Completions by global row, of very different lengths; in the second batch the last rank's are all cut off."""

    def _generate_single_turn(self, prompt_ids, images, multimodal, num_generations, **kwargs):
        rank, batch = self.accelerator.process_index, self._generation_batch
        end = [] if batch == 1 and rank == self.accelerator.num_processes - 1 else [self._tokenizer.eos_token_id]
        first = rank * len(prompt_ids) + 5 * batch
        rows = range(first, first + len(prompt_ids))
        return [[20 + (row * 7 + k * k) % 50 for k in range(1 + row * row % 23)] + end for row in rows], None


class Keep(Keeps, OnCpus):
    """Keeps every global batch and this rank's advantages."""

    def noted(self, inputs, output, local):
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        tokens = {name: output[name].clone() for name in names}
        return {"batch": vars(self._pending.newest), "advantages": local.clone(), **tokens}


def against_a_server(output: Path, model: Path, url: str, *names: str) -> dict[str, Any]:
    results = {}
    for name in names:
        group, settings = RUNS[name]
        trained = trainer(output / name, model, url, name, Keep, num_generations=group, **settings)
        assert trained.accelerator.num_processes == 2
        trained.train()
        trained.save_model(str(output / name / "saved"))
        rank = trained.accelerator.process_index
        logs = trained.state.log_history
        parameter = next(trained.model.parameters())
        results[name] = {
            "kept": trained.kept,
            "sync_errors": [row["rollout/sync_error"] for row in logs if "rollout/sync_error" in row],
            "staleness": [row["rollout/staleness_max"] for row in logs if "rollout/staleness_max" in row],
            "names": trained.vllm_generation.vllm_client.model if rank == 0 else None,
            "sharded": hasattr(parameter, "ds_tensor") or hasattr(parameter, "full_tensor"),
            "type": str(trained.accelerator.distributed_type),
        }
    return results


def resumed(output: Path, model: Path, kind: str) -> dict[str, Any]:
    """Four steps, and the last two again from the checkpoint between them, in the middle of a generation batch."""
    critics = {"head": Ppo(), "sao": Sao(critic_learning_rate=1e-3, critic_warmup_steps=1)}
    found = {}
    for name, start in (("whole", None), ("again", output / "whole" / "checkpoint-3")):
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
        baseline = critics.get(kind, kind)
        own = {"model": model, "model_init_kwargs": {"dtype": "float32"}}
        trained = tiny_trainer(output / name, baseline, OnCpus, **own, **saving)
        trained.train(resume_from_checkpoint=str(start) if start else None)
        trained.save_model(str(output / name / "saved"))
        norms = [(row["step"], row["grad_norm"]) for row in trained.state.log_history if "grad_norm" in row]
        critic = trained._critic
        states = critic.module.state_dict() if critic is not None else {}
        module = {name: whole_tensor(value).cpu() for name, value in states.items()}
        sharded = critic is not None and any(isinstance(p, DTensor) for p in critic.parameters)
        kind_of = str(trained.accelerator.distributed_type)
        kept = {"norms": norms, "type": kind_of, "module": module, "module_sharded": sharded}
        if isinstance(trained.baseline, TargetedBaseline):
            kept["moments"] = trained.baseline.optimal.moments
        found[name] = kept
    return found


# Runs with and without padding, by name: the baseline and its settings.
PACKING = {
    "packing-grpo": ("grpo", {"num_iterations": 2}),
    "packing-otb": ("otb", {}),
    "packing-checkpointed": ("grpo", {"gradient_checkpointing": True}),
}


def packed(output: Path, model: Path, name: str) -> dict[str, Any]:
    """Three steps on the same rollouts, twice: what is logged, and how many micro-batches had nothing to learn from."""
    baseline, settings = PACKING[name]
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 24}
    own = {"model": model, "model_init_kwargs": {"dtype": "float32"}, "mask_truncated_completions": True}
    found = {}
    for packing in ("auto", "none"):
        given = {"max_steps": 3, "packing": packing, "optim": "sgd", "learning_rate": 0.1, **shape, **own, **settings}
        trained = tiny_trainer(output / packing, baseline, Ragged, **given)
        empty = []
        loss = trained.compute_loss
        trained.compute_loss = lambda model, rows, loss=loss, empty=empty, **kwargs: (
            empty.append(not rows["completion_mask"].any()) or loss(model, rows, **kwargs)
        )
        trained.train()
        found[packing] = {"logs": trained.state.log_history, "empty": sum(empty), "method": str(trained.packing)}
    return found


def runs(folder: str, model: str, *names: str) -> dict[str, Any]:
    """By name what `resumed` and `packed` have found."""
    return {name: (packed if name in PACKING else resumed)(Path(folder) / name, Path(model), name) for name in names}
