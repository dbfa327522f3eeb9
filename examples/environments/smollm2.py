"""SmolLM2-135M-Instruct learns to play "higher or lower" on a CPU, from the form of a call that its prompt shows.

    python -m examples.environments.smollm2 [--output_dir runs/environments/smollm2] [--KEY VALUE]

KEY is any key of the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from basis_rl.cli.main import main as basis_rl
from basis_rl.recipe.words import read_recipe
from examples.environments.warm_start import game
from examples.smollm2.model import prepare

RECIPE = str(Path(__file__).with_name("smollm2.yaml"))
# Games that the prompt shows, by seeds that no row has.
SHOWN = (10**6, 10**6 + 1)


def rows(count: int, size: int, guesses: int) -> list[dict[str, Any]]:
    """A game for each seed below `count`, after those that are shown; `reset` adds its text to the last turn."""
    before = [message for seed in SHOWN for message in game(seed, size, guesses, skilled=True)]
    # All messages have the same keys, as columns of records need.
    keys = {"tool_calls": None, "name": None}
    prompt = [{**keys, **message} for message in [*before, {"role": "user", "content": "Next game: "}]]
    return [{"prompt": prompt, "seed": seed} for seed in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/environments/smollm2"))
    options, overrides = parser.parse_known_args()
    output = options.output_dir
    print(prepare(output / "model"), flush=True)
    games = rows(200, **read_recipe(RECIPE)["environment_kwargs"])
    (output / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in games))
    words = ["--model_name_or_path", str(output / "model"), "--dataset_name", str(output / "games.jsonl")]
    words += ["--output_dir", str(output / "rloo"), "--overwrite_output_dir", "true", *overrides]
    raise SystemExit(basis_rl(["train", RECIPE, *words]))


if __name__ == "__main__":
    main()
