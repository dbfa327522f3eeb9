"""A model learns to use a tool: warm start, training with a calculator, accuracy and calls before and after.

basis-rl quickstart tools [--seed 0] [--output_dir runs/tools] [--tool_share 0.3] [--KEY VALUE]

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
from basis_rl.data import load_prompts
from basis_rl.recipe.build import build_trainer
from basis_rl.recipe.file import parse_recipe
from examples.quickstart.warm_start import build_model, save
from examples.tools.warm_start import tool_tokenizer, warm_start

RECIPE = str(Path(__file__).with_name("calculator.yaml"))
# One evaluation on the held-out problems, with one sampled rollout per problem.
EVALUATE = ["--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "128"]
EVALUATE += ["--num_generations_eval", "1"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/tools"))
    parser.add_argument(
        "--tool_share", type=float, default=0.3, help="share of the warm start's solutions that use the tool (0.3)"
    )
    options, overrides = parser.parse_known_args(argv)
    print(json.dumps(run(options.seed, options.output_dir, overrides, tool_share=options.tool_share), indent=2))


def run(seed: int, output: Path, overrides: list[str], *, tool_share: float = 0.3) -> dict[str, Any]:
    """Run all phases; returns the summary that is also written to ``summary.json``."""
    began = time.perf_counter()
    argv = [RECIPE, "--seed", str(seed), "--output_dir", str(output / "rloo")]
    argv += ["--model_name_or_path", str(output / "warm_start"), "--overwrite_output_dir", "true", *overrides]
    recipe = parse_recipe(argv)

    print(f"[1/4] warm start: {tool_share:.0%} of the solutions call the calculator", flush=True)
    set_seed(seed)
    train = load_prompts(recipe.data, conversational=True)
    tokenizer = tool_tokenizer([row[0]["content"] for row in train["prompt"][:2000]])
    model = build_model(tokenizer)
    warm_start(model, tokenizer, train, tool_share=tool_share, seed=seed)
    save(model, tokenizer, output / "warm_start")
    warmed = time.perf_counter()

    print("[2/4] before, on problems that no phase trains on", flush=True)
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
    """Sample one rollout per held-out problem; returns accuracy, and the share of rollouts that call the calculator."""
    options = ["--model_name_or_path", str(model), "--output_dir", str(output / "measure")]
    trainer = build_trainer(parse_recipe([*argv, *options, *EVALUATE]))
    found = trainer.evaluate()
    return {"accuracy": round(found["eval_reward"], 4), "used": round(found["eval_tools/used"], 4)}


if __name__ == "__main__":
    main()
