"""A model learns to play in an environment: warm start, training, games won before and after.

python -m examples.environments.run [--seed 0] [--output_dir runs/environments] [--skilled_share 0.3] [--KEY VALUE]

KEY is any key of the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Nothing is downloaded here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers import set_seed

from basis_rl.cli.main import main as basis_rl
from basis_rl.recipe.build import build_trainer
from basis_rl.recipe.file import parse_recipe
from examples.environments.warm_start import game_tokenizer, games
from examples.quickstart.warm_start import build_model, save
from examples.tools.warm_start import encode, fit

RECIPE = str(Path(__file__).with_name("higher_lower.yaml"))
# One evaluation on the held-out games, with four rollouts of each.
EVALUATE = ["--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "128"]
EVALUATE += ["--num_generations_eval", "4"]
WARM_GAMES = 4000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/environments"))
    parser.add_argument(
        "--skilled_share", type=float, default=0.3, help="share of the warm start's games that are played well (0.3)"
    )
    parser.add_argument("--warm_steps", type=int, default=400, help="steps of the warm start (400)")
    options, overrides = parser.parse_known_args(argv)
    given = {"skilled_share": options.skilled_share, "warm_steps": options.warm_steps}
    print(json.dumps(run(options.seed, options.output_dir, overrides, **given), indent=2))


def run(
    seed: int, output: Path, overrides: list[str], *, skilled_share: float = 0.3, warm_steps: int = 400
) -> dict[str, Any]:
    """Run all phases; returns the summary that is also written to ``summary.json``."""
    began = time.perf_counter()
    argv = [RECIPE, "--seed", str(seed), "--output_dir", str(output / "rloo")]
    argv += ["--model_name_or_path", str(output / "warm_start"), "--overwrite_output_dir", "true", *overrides]
    recipe = parse_recipe(argv)

    print(f"[1/4] warm start: {skilled_share:.0%} of the games are played well", flush=True)
    set_seed(seed)
    size = recipe.run.environment_kwargs or {}
    tokenizer = game_tokenizer(**size)
    model = build_model(tokenizer)
    played = games(WARM_GAMES, **size, skilled_share=skilled_share, seed=seed)
    fit(model, tokenizer, [encode(tokenizer, messages) for messages in played], steps=warm_steps)
    save(model, tokenizer, output / "warm_start")
    warmed = time.perf_counter()

    print("[2/4] before, in games that no phase trains on", flush=True)
    before = measure(argv, output / "warm_start", output)
    print(f"{before}\n[3/4] training (basis-rl train)", flush=True)
    started = time.perf_counter()
    code = basis_rl(["train", *argv])
    if code:
        raise SystemExit(code)
    trained = time.perf_counter()
    print("[4/4] after", flush=True)
    after = measure(argv, output / "rloo", output)
    summary = {
        "before": before,
        "after": after,
        "rollouts": recipe.args.max_steps * recipe.args.per_device_train_batch_size,
        "seed": seed,
        "seconds": {
            "warm_start": round(warmed - began, 1),
            "training": round(trained - started, 1),
            "total": round(time.perf_counter() - began, 1),
        },
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def measure(argv: list[str], model: Path, output: Path) -> dict[str, float]:
    """Play each held-out game four times; returns the share of games that are won, and the calls of a game."""
    options = ["--model_name_or_path", str(model), "--output_dir", str(output / "measure")]
    trainer = build_trainer(parse_recipe([*argv, *options, *EVALUATE]))
    found = trainer.evaluate()
    return {"won": round(found["eval_reward"], 4), "calls": round(found["eval_tools/call_frequency"], 4)}


if __name__ == "__main__":
    main()
