"""Does the quickstart learn with every seed?

    python -m studies.quickstart_seeds [--seeds 0 1 2] [--quick]

Runs the whole quickstart (`examples.quickstart.run`) once for each seed: BASIS with one rollout per prompt, as in its
paper, and `basis_history` with a prompt sampler and no value table. Measured is the greedy accuracy on held-out
problems before and after. The models stay in ``runs/quickstart-seedN``, where `studies.score_norms` reads them.

Results: ``studies/results/quickstart_seeds.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common import save
from studies.runs import placed, study_parser

QUICK = {"dataset_kwargs.size": 400, "max_steps": 4, "per_device_train_batch_size": 32, "values_num_rollouts": 2}


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = study_parser(__doc__, "quickstart_seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = placed(parser.parse_args(argv), parser.parse_args([]))
    results = []
    for seed in options.seeds:
        output = (options.output if options.quick else Path("runs")) / f"quickstart-seed{seed}"
        command = [sys.executable, "-m", "examples.quickstart.run", "--seed", str(seed)]
        command += ["--output_dir", str(output)]
        for key, value in QUICK.items() if options.quick else ():
            command += [f"--{key}", str(value)]
        subprocess.run(command, check=True)
        results.append(json.loads((output / "summary.json").read_text()))
    for row in results:
        gain = 100 * (row["accuracy_after"] - row["accuracy_before"])
        print(
            f"seed {row['seed']}: {row['accuracy_before']:.1%} -> {row['accuracy_after']:.1%} (+{gain:.1f} points), "
            f"without a table {row['accuracy_after_history']:.1%}, "
            f"{row['rollouts']} rollouts, {row['seconds']['total']:.0f} s"
        )
    save("quickstart_seeds", {"results": results}, options.results)


if __name__ == "__main__":
    main()
