"""Run by `test_colocated.py`: trains with vLLM's engine in the process, and prints what its log says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peft import LoraConfig

from tests.support.served import trainer


def main(output: Path, model: Path) -> None:
    found = {}
    for baseline, group, lora in (("basis", 1, False), ("rloo", 4, True)):
        adapter = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False) if lora else None
        settings = {"vllm_mode": "colocate", "vllm_max_model_length": 128, "peft_config": adapter}
        trained = trainer(output, model, None, baseline, num_generations=group, **settings)
        trained.train()
        log = trained.state.log_history
        keys = ("rollout/sync_error", "rollout/kl", "grad_norm")
        found[baseline] = {key: [row[key] for row in log if key in row] for key in keys}
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
