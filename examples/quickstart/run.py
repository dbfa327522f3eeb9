"""One rollout per prompt beside groups of eight, on a laptop: warm start, two trainings, their accuracy in a table.

    basis-rl quickstart [--seed 0] [--output_dir runs/quickstart] [--max_warm_start_steps N] [--KEY VALUE]

For a larger model you run `basis-rl train` yourself; this script only makes a model and runs the commands in order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Nothing is downloaded here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import set_seed
from transformers.utils.logging import disable_progress_bar

from basis_rl.cli.main import main as basis_rl
from basis_rl.data import load_prompts
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from examples.quickstart.warm_start import build_model, build_tokenizer, save, warm_start

HERE = Path(__file__).parent
OUTPUT = Path("runs/quickstart")
# Each is trained with the recipe of its name.
ARMS = {"history": "basis_history + frontier, 1 rollout per prompt", "grpo": "grpo, 8 rollouts per prompt"}
# Keys in which the two differ; overrides of them are for the first one.
OF_THE_FIRST = ("--baseline", "--prompt_sampler", "--num_generations")
# vLLM supports only some head sizes (its CPU build 32, 64, 80, 96, ...), not a quarter of this model's hidden size.
HEAD_DIM = 32


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=OUTPUT)
    parser.add_argument("--max_warm_start_steps", type=int, default=3000, help="use fewer to try all phases (3000)")
    options, overrides = parser.parse_known_args(argv)
    summary = run(options.seed, options.output_dir, overrides, options.max_warm_start_steps)
    print("\n".join(["", *table(summary), "", *next_steps(options.output_dir)]))


def run(seed: int, output: Path, overrides: list[str], max_warm_start_steps: int) -> dict[str, Any]:
    """Run all phases; returns the summary that is also written to ``summary.json``.

    `overrides` are arguments for the recipes.
    """
    disable_progress_bar()  # of loading and saving a small model
    seconds: dict[str, float] = {}
    common = ["--seed", str(seed), "--model_name_or_path", str(output / "warm_start")]
    # Called again, all is made anew, and what was there is moved aside.
    common += ["--overwrite_output_dir", "true"]
    of_both = [word for pair in pairs(overrides) if not pair[0].startswith(OF_THE_FIRST) for word in pair]
    argv = {
        name: [str(HERE / f"{name}.yaml"), "--output_dir", str(output / name), *common, *words]
        for name, words in {"history": overrides, "grpo": of_both}.items()
    }
    recipe = parse_recipe(argv["history"])

    with Phase(1, "warm start: a small Qwen3 sees sums and their answers", seconds, "warm_start"):
        set_seed(seed)
        train = load_prompts(recipe.data, conversational=True)
        texts = [row[0]["content"] for row in train["prompt"][:2000]]
        tokenizer = build_tokenizer([*texts, *["\\boxed{7}", "assistant\n", "user\n"] * len(texts)])
        model = build_model(tokenizer, head_dim=HEAD_DIM)
        steps, _ = warm_start(model, tokenizer, train, max_steps=max_warm_start_steps)
        print(f"Trained for {steps} steps. The accuracy of this model is that of step 0 below.")
        save(model, tokenizer, output / "warm_start")
    for number, (name, what) in enumerate(ARMS.items(), start=2):
        with Phase(number, f"{what} (basis-rl train {name}.yaml)", seconds, name):
            train_as_command(argv[name])
    summary = summarize(recipe, seed, output, seconds)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def table(summary: dict[str, Any]) -> list[str]:
    """The result for the screen: what is measured, and a line for each training with its accuracy after some steps."""
    width = max(map(len, ARMS.values()))
    steps = list(summary["accuracy"]["grpo"])
    head = "".join(f"{f'step {step}':>10}" for step in steps)
    lines = [f"Accuracy: {summary['measure']}.", f"{'':{width}}{head}  rollouts  seconds"]
    for name, what in ARMS.items():
        cells = "".join(f"{summary['accuracy'][name][step]:10.1%}" for step in steps)
        lines.append(f"{what:{width}}{cells}{summary['rollouts']:10,}{summary['seconds'][name]:9.0f}")
    return lines


def next_steps(output: Path) -> list[str]:
    """Commands that go on from here, as they are typed in the working directory."""
    command = str(Path(sys.executable).with_name("basis-rl"))
    command = command.removeprefix(f"{Path.cwd()}/")
    basis = "quickstart/basis"
    if output != OUTPUT:
        model, values, trained = (shlex.quote(str(output / name)) for name in ("warm_start", "values", "basis"))
        basis += f" --model_name_or_path {model} --baseline_kwargs.values {values} --output_dir {trained}"
    history, grpo, report = (shlex.quote(str(output / name)) for name in (*ARMS, "report"))
    return [
        "Next:",
        f"  {command} compare {history} {grpo} --output_dir {report}   # learning curves in one HTML file",
        f"  {command} values {basis}   # the value table that BASIS starts from",
        f"  {command} train {basis}",
        "docs/tutorial.md leads from here to your own model and data.",
    ]


def pairs(words: list[str]) -> list[list[str]]:
    """Split arguments into options with their values: ``--key value ...`` or ``--key=value``."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


class Phase:
    """Prints what is being done, and measures how long it takes."""

    def __init__(self, number: int, what: str, seconds: dict[str, float], key: str) -> None:
        self.text = f"\n[{number}/{1 + len(ARMS)}] {what}"
        self.seconds = seconds
        self.key = key

    def __enter__(self) -> None:
        print(self.text, flush=True)
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.key] = round(time.perf_counter() - self.began, 1)


def train_as_command(argv: list[str]) -> None:
    code = basis_rl(["train", *argv])
    if code:
        raise SystemExit(code)


def evaluations(folder: Path) -> dict[str, float]:
    """The accuracies that a run has logged: the step as text, and the mean over rollouts and held-out problems."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return {str(row["step"]): row[key] for row in rows for key in row if key.startswith("eval_avg@")}


def summarize(recipe: Recipe, seed: int, output: Path, seconds: dict[str, float]) -> dict[str, Any]:
    args = recipe.args
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
    problems = len(load_prompts(recipe.data, conversational=True, held_out=True))
    return {
        "measure": f"mean of {args.num_generations_eval} sampled rollouts (temperature {args.temperature:g}) "
        f"of each of {problems} held-out problems",
        "accuracy": {name: evaluations(output / name) for name in ARMS},
        "rollouts": args.max_steps // updates * args.generation_batch_size,
        "optimizer_steps": args.max_steps,
        "rollouts_an_update": batch,
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        "processor_seconds": round(sum(os.times()[:4]), 1),
        "seed": seed,
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "python": platform.python_version()},
        "versions": {
            name: version(name) for name in ("basis-rl", "torch", "trl", "transformers", "math-verify", "reasoning-gym")
        },
    }


if __name__ == "__main__":
    main()
