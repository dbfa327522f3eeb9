"""Run by `test_vllm.py` on a machine of its own: trains against a server on another one; writes what it has seen."""

import json
import sys
from pathlib import Path

from tests.support.served import logged, trainer


def main(output: Path, model: Path, url: str) -> None:
    found = {}
    try:
        trainer(output / "refused", model, url, "basis", num_generations=1)
    except ValueError as error:
        found["refused"] = str(error)
    shared = str(output / "sync" / "weights")
    trained = trainer(output / "run", model, url, "basis", num_generations=1, vllm_sync_folder=shared)
    trained.train()
    found["sync_error"] = logged(trained, "rollout/sync_error")
    found["kl"] = logged(trained, "rollout/kl")
    found["recoveries"] = trained.vllm_generation.recoveries
    (output / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
