"""Does the quickstart learn with every seed?   python -m studies.quickstart_seeds [--seeds 0 1 2]"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common import save
from studies.runs import placed, places


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    places(parser, "quickstart_seeds", "results of other seeds than the default go here")
    options = placed(parser.parse_args(), parser.parse_args([]))
    results = []
    for seed in options.seeds:
        output = Path("runs") / f"quickstart-seed{seed}"
        command = [sys.executable, "-m", "examples.quickstart.run", "--seed", str(seed), "--output", str(output)]
        subprocess.run(command, check=True)
        results.append(json.loads((output / "summary.json").read_text()))
    for row in results:
        gain = 100 * (row["accuracy_after"] - row["accuracy_before"])
        print(
            f"seed {row['seed']}: {row['accuracy_before']:.1%} -> {row['accuracy_after']:.1%} (+{gain:.1f} points), "
            f"{row['rollouts']} rollouts, {row['seconds']['total']:.0f} s"
        )
    save("quickstart_seeds", {"results": results}, options.results)


if __name__ == "__main__":
    main()
