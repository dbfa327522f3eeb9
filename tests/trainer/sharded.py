"""Run by `test_zero3.py` under `accelerate launch`: trains against a vLLM server and keeps what each rank saw."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import LoraConfig

from basis_rl.trainer import BasisTrainer
from tests.served import trainer


class Keep(BasisTrainer):
    """Keeps every global batch and this rank's advantages."""

    def __init__(self, *args, **kwargs):
        self.kept = []
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs, output):
        local = super()._advantages(inputs, output)
        tokens = {
            key: output[key].clone() for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        }
        self.kept.append({"batch": vars(self._unlearnt[-1][1]), "advantages": local.clone(), **tokens})
        return local


def main(output: Path, model: Path, url: str) -> None:
    results = {}
    for baseline, group, settings in (
        ("basis", 1, {}),
        ("otb", 4, {}),
        ("rloo", 4, {"async_prefetch": True}),
        ("grpo", 4, {"peft_config": LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")}),
    ):
        trained = trainer(output / baseline, model, url, baseline, Keep, num_generations=group, **settings)
        assert trained.accelerator.num_processes == 2
        trained.train()
        trained.save_model(str(output / baseline / "saved"))
        errors = [row["rollout/sync_error"] for row in trained.state.log_history if "rollout/sync_error" in row]
        results[baseline] = {"kept": trained.kept, "sync_errors": errors}
        found = [row["rollout/staleness"] for row in trained.state.log_history if "rollout/staleness" in row]
        results[baseline]["staleness"] = found
        sharded = getattr(next(trained.model.parameters()), "ds_tensor", None) is not None
        results[baseline]["sharded"] = sharded
        rank = trained.accelerator.process_index
    torch.save(results, output / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
