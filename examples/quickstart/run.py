"""The workflow on a laptop: warm start, value table, BASIS with one rollout per prompt, accuracy before and after.

Then the same without a value table: a belief that learns during training is the baseline and also chooses the prompts.

    python -m examples.quickstart.run [--seed 0] [--output_dir runs/quickstart] [--max_warm_start_steps N] [--KEY VALUE]

For a larger model you run `basis-rl values` and `basis-rl train` yourself; this script only runs them in order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Nothing is downloaded here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils.logging import disable_progress_bar

from basis_rl.cli.main import main as basis_rl
from basis_rl.data import load_prompts
from basis_rl.evaluation import accuracy
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.rewards import MathVerifyReward
from examples.quickstart.warm_start import build_model, build_tokenizer, save, warm_start

RECIPE = str(Path(__file__).with_name("basis.yaml"))
WITHOUT_TABLE = str(Path(__file__).with_name("history.yaml"))
# vLLM supports only some head sizes (its CPU build 32, 64, 80, 96, ...), not a quarter of this model's hidden size.
HEAD_DIM = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--max_warm_start_steps", type=int, default=3000, help="use fewer to try all phases (3000)")
    options, overrides = parser.parse_known_args()
    print(json.dumps(run(options.seed, options.output_dir, overrides, options.max_warm_start_steps), indent=2))


def run(seed: int, output: Path, overrides: list[str], max_warm_start_steps: int) -> dict[str, Any]:
    """Run all phases; returns the summary that is also written to ``summary.json``.

    `overrides` are arguments for the recipes.
    """
    disable_progress_bar()  # of loading and saving a small model
    seconds: dict[str, float] = {}
    common = ["--seed", str(seed), "--model_name_or_path", str(output / "warm_start")]
    values = ["--baseline_kwargs.values", str(output / "values")]
    argv = [RECIPE, "--output_dir", str(output / "basis"), *values, *common, *overrides]
    of_both = [word for pair in pairs(overrides) if not pair[0].startswith("--baseline") for word in pair]
    without_table = [WITHOUT_TABLE, "--output_dir", str(output / "history"), *common, *of_both]
    recipe = parse_recipe(argv)

    with Phase(1, "warm start: a small Qwen3 sees sums and their answers", seconds, "warm_start"):
        set_seed(seed)
        train = load_prompts(recipe.data, conversational=True)
        texts = [row[0]["content"] for row in train["prompt"][:2000]]
        tokenizer = build_tokenizer([*texts, *["\\boxed{7}", "assistant\n", "user\n"] * len(texts)])
        model = build_model(tokenizer, head_dim=HEAD_DIM)
        steps, right = warm_start(model, tokenizer, train, max_steps=max_warm_start_steps)
        print(f"{right:.0%} of the answers right after {steps} steps")
        save(model, tokenizer, output / "warm_start")
    with Phase(2, "accuracy before, on problems that no phase trains on", seconds, "evaluation"):
        before = held_out_accuracy(recipe, output / "warm_start")
        print(f"held-out accuracy, greedy: {before:.1%}")
    with Phase(3, "value table: this model's mean reward on each problem (basis-rl values)", seconds, "value_table"):
        command("values", argv)
    with Phase(4, "BASIS, one rollout per prompt (basis-rl train)", seconds, "training"):
        command("train", argv)
    with Phase(5, "accuracy after", seconds, "evaluation"):
        after = held_out_accuracy(recipe, output / "basis")
        print(f"held-out accuracy, greedy: {before:.1%} -> {after:.1%}")
    with Phase(6, "without a table: basis_history, prompts chosen by its belief (basis-rl train)", seconds, "history"):
        command("train", without_table)
    with Phase(7, "accuracy after training without a table", seconds, "evaluation"):
        history = held_out_accuracy(recipe, output / "history")
        print(f"held-out accuracy, greedy: {before:.1%} -> {history:.1%}, with the value table {after:.1%}")
    table = len(train) * recipe.run.values_num_rollouts
    summary = {**summarize(recipe, seed, before, after, seconds, table), "accuracy_after_history": history}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plots = " and ".join(str(output / name / "training.png") for name in ("basis", "history"))
    print(f"\nSummary: {output / 'summary.json'}; plots: {plots}")
    return summary


def pairs(words: list[str]) -> list[list[str]]:
    """Split arguments into options with their values: ``--key value ...`` or ``--key=value``."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


class Phase:
    """Prints what is being done, and adds up how long it takes."""

    def __init__(self, number: int, what: str, seconds: dict[str, float], key: str) -> None:
        self.text, self.seconds, self.key = f"\n[{number}/7] {what}", seconds, key

    def __enter__(self) -> None:
        print(self.text, flush=True)
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.key] = round(self.seconds.get(self.key, 0.0) + time.perf_counter() - self.began, 1)


def command(name: str, argv: list[str]) -> None:
    code = basis_rl([name, *argv])
    if code:
        raise SystemExit(code)


def held_out_accuracy(recipe: Recipe, folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    test = load_prompts(recipe.data, conversational=True, held_out=True)
    length = recipe.args.max_completion_length
    return accuracy(model, tokenizer, test, MathVerifyReward(), max_completion_length=length)


def summarize(
    recipe: Recipe, seed: int, before: float, after: float, seconds: dict[str, float], table_rollouts: int
) -> dict[str, Any]:
    args = recipe.args
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "rollouts": args.max_steps // updates * args.generation_batch_size,
        "rollouts_value_table": table_rollouts,
        "rollouts_per_prompt": args.num_generations,
        "optimizer_steps": args.max_steps,
        "rollouts_an_update": batch,
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        "seed": seed,
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "python": platform.python_version()},
        "versions": {
            name: version(name) for name in ("basis-rl", "torch", "trl", "transformers", "math-verify", "reasoning-gym")
        },
    }


if __name__ == "__main__":
    main()
