"""The section of `basis-rl check --measure`: seconds per step and in all, from one generation and two micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from basis_rl.cli.train import own_server
from basis_rl.recipe.build import build_trainer
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.run.progress import clock
from basis_rl.trainer import BasisConfig

# What happens once for a generation batch, and what happens for every micro-batch of it.
_MICRO = ("time/loss", "time/update")
_TITLES = {
    "time/generation": "generation",
    "time/scoring": "scoring without gradient",
    "rest": "rewards, baseline and the rest",
    "time/loss": "loss",
    "time/update": "backward pass and optimizer",
}


def measure(argv: Sequence[str], steps: int, *, baseline_missing: bool) -> str:
    """Train two micro-batches of a run in a folder that is removed again, and say what the whole run will take.

    Args:
        argv: of the recipe.
        steps: optimizer steps of the whole run.
        baseline_missing: its value table or codebook is not there yet; ``none``, which costs as little, replaces it.

    Raises:
        ValueError: there are several processes.
    """
    recipe = parse_recipe(argv)
    args = recipe.args
    if args.world_size > 1:
        raise ValueError("--measure takes the time of one process. Leave accelerate out.")
    if baseline_missing:
        recipe = replace(recipe, run=replace(recipe.run, baseline="none", baseline_kwargs=None))
    evaluates = args.eval_strategy != IntervalStrategy.NO
    micro_batches = args.gradient_accumulation_steps
    uses = args.steps_per_generation * args.num_iterations
    with tempfile.TemporaryDirectory(prefix="basis-rl-measure-") as folder:
        shorten(args, folder)
        phases = timed(recipe)
    once = micro_batches / uses
    costs = {name: seconds * (micro_batches if name in _MICRO else once) for name, seconds in phases.items()}
    step = sum(costs.values())
    parts = "; ".join(f"{_TITLES[name]} {cost:.2f} s" for name, cost in costs.items())
    left_out = ["the start", "checkpoints", *(["evaluations"] if evaluates else [])]
    return (
        f"One optimizer step takes about {step:.3g} s on this machine: {parts}. {steps} steps take "
        f"{clock(step * steps)} (hours, minutes, seconds), without {', '.join(left_out)}. Measured on one generation "
        "batch and two of its micro-batches before the model has learnt anything: longer rollouts take longer."
    )


def shorten(args: BasisConfig, folder: str) -> None:
    """Two optimizer steps of one micro-batch each, of a whole generation batch, that leave nothing."""
    args.output_dir = folder
    args.resume_from_checkpoint = None
    args.max_steps = 2
    args.gradient_accumulation_steps = 1
    args.save_strategy = SaveStrategy.NO
    args.eval_strategy = IntervalStrategy.NO
    args.load_best_model_at_end = False
    args.logging_strategy = IntervalStrategy.STEPS
    args.logging_steps = 1
    args.report_to = []
    args.push_to_hub = False
    args.keep_rollouts_mb = 0.0


def timed(recipe: Recipe) -> dict[str, float]:
    """Seconds of each phase: once per generation batch, or per micro-batch."""
    with own_server(recipe):
        trainer = build_trainer(recipe)
        trainer.train()
        log = [line for line in trainer.state.log_history if "time/step" in line]
        trainer.end()
    first, second = log
    generating = second if recipe.args.steps_per_generation * recipe.args.num_iterations == 1 else first
    known = {name: generating.get(name, 0.0) for name in ("time/generation", "time/scoring")}
    rest = generating["time/step"] - sum(known.values()) - sum(generating[name] for name in _MICRO)
    return {**known, "rest": rest, **{name: second[name] for name in _MICRO}}
