"""Stands in for `basis-rl train`: ``python stand_in.py RECIPE --key value ...`` writes a run's folder.

Batches of 16 rollouts, each for two steps. A run whose baseline's name is in the file ``broken`` of the sweep's folder
fails half-way.
"""

import json
import sys
from pathlib import Path

import yaml

from tests.report.folders import write_rows


def main(recipe, *overrides):
    settings = yaml.safe_load(Path(recipe).read_text())
    settings.update({k.removeprefix("--"): yaml.safe_load(v) for k, v in zip(*[iter(overrides)] * 2, strict=True)})
    folder, baseline, steps = Path(settings["output_dir"]), settings["baseline"], settings["max_steps"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "calls").open("a") as file:
        file.write(f"{settings['resume_from_checkpoint']}\n")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    broken = folder.parent / "broken"
    fails = broken.is_file() and baseline in broken.read_text()
    every = 16 + (16 // settings["num_generations"] if baseline == "remax" else 0)
    rows = []
    for step in range(1, steps + 1):
        rows.append({"step": step, "reward": 0.1 * step, "num_rollouts": every * -(-step // 2), "seconds": 1.0 * step})
        print(f"step {step}/{steps}  reward {0.1 * step}", flush=True)
        if fails and step == steps // 2:
            break
    write_rows(folder, rows)
    record = {"compared": {"num_generations": settings["num_generations"]}, "finished": not fails}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "model.safetensors").touch()
    if fails:
        sys.exit("RuntimeError: out of luck")


main(*sys.argv[1:])
