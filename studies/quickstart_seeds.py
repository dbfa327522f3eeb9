"""Does the quickstart learn with every seed?

    python -m studies.quickstart_seeds [--seeds 0 1 2] [--rates 3e-5 ...] [--quick]

Runs the whole quickstart (`examples.quickstart.run`) once for each seed, and then what it suggests as the next step:
BASIS with one rollout per prompt and a value table, as in its paper. Measured is the accuracy of sampled rollouts on
held-out problems. The models stay in ``runs/quickstart-seedN``.

With ``--rates``, only the quickstart's own two runs, at each of these learning rates: how those in its recipes were
chosen, by seeds that it does not show (``--seeds 1 2 --rates 3e-5 1e-4 3e-4 1e-3``).

Results: ``studies/results/quickstart_seeds.json``, with ``--rates`` ``quickstart_rates.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import save
from examples.quickstart.run import evaluations
from studies.runs import placed, save_table, study_parser
from studies.training import RECIPE

QUICK = {"dataset_kwargs.size": 400, "max_steps": 4, "per_device_train_batch_size": 32, "values_num_rollouts": 2}


def run_seed(seed: int, output: Path, overrides: list[str]) -> dict[str, Any]:
    """The quickstart's summary, with the accuracies of BASIS beside those of its own runs."""
    quickstart = [sys.executable, "-m", "examples.quickstart.run", "--seed", str(seed), "--output_dir", str(output)]
    subprocess.run([*quickstart, *overrides], check=True)
    basis = [RECIPE, "--seed", str(seed), "--output_dir", str(output / "basis"), *overrides]
    basis += ["--overwrite_output_dir", "true"]
    basis += ["--model_name_or_path", str(output / "warm_start"), "--baseline_kwargs.values", str(output / "values")]
    for command in ("values", "train"):
        subprocess.run([sys.executable, "-m", "basis_rl", command, *basis], check=True)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    summary["accuracy"]["basis"] = evaluations(output / "basis")
    return summary


def run_rate(seed: int, rate: float, output: Path, overrides: list[str]) -> dict[str, Any]:
    """The accuracies of the quickstart's two runs at the end, both at this learning rate."""
    asked = ["--seed", str(seed), "--output_dir", str(output), "--learning_rate", str(rate), *overrides]
    subprocess.run([sys.executable, "-m", "examples.quickstart.run", *asked], check=True)
    accuracy = json.loads((output / "summary.json").read_text())["accuracy"]
    return {"seed": seed, "rate": rate, **{name: list(points.values())[-1] for name, points in accuracy.items()}}


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = study_parser(__doc__, "quickstart_seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+")
    options = placed(parser.parse_args(argv), parser.parse_args([]))
    results = []
    quick = [word for key, value in QUICK.items() if options.quick for word in (f"--{key}", str(value))]
    if options.rates:
        chosen = [(seed, rate) for seed in options.seeds for rate in options.rates]
        results = [run_rate(seed, rate, options.output / "rate", quick) for seed, rate in chosen]
        for row in results:
            print(row)
        save_table("quickstart_rates", {}, results, options.results)
        return
    for seed in options.seeds:
        output = (options.output if options.quick else Path("runs")) / f"quickstart-seed{seed}"
        results.append(run_seed(seed, output, quick))
    for row in results:
        found = [f"{name} {100 * list(points.values())[-1]:.1f}" for name, points in row["accuracy"].items()]
        before = 100 * row["accuracy"]["grpo"]["0"]
        print(f"seed {row['seed']}: from {before:.1f} % to {', '.join(found)}; {row['seconds']['total']:.0f} s")
    save("quickstart_seeds", {"results": results}, options.results)


if __name__ == "__main__":
    main()
