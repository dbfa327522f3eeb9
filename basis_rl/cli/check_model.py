"""The sections of `basis-rl check` that load the model: what it writes before any training (--draw), and how long a
run takes (--measure)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from basis_rl.cli.train import own_server
from basis_rl.engine import end_tokens, prompt_tokens
from basis_rl.estimate.report import Warn
from basis_rl.estimate.waste import waste
from basis_rl.recipe.build import build_trainer, model_init_kwargs
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.rewards.call import call
from basis_rl.rewards.extract import completion_text
from basis_rl.run.progress import clock
from basis_rl.trainer import BasisConfig
from basis_rl.trainer.first_rollouts import Rollout, explanation, reads_boxes
from basis_rl.trainer.gather import prompt_ids_of
from basis_rl.trainer.plan import Plan, sampling_of, with_tools
from basis_rl.trainer.rewarding import total_rewards
from basis_rl.values import ValueTable
from basis_rl.values.sources import ModelSource, load_model

# Of how many rollouts how many characters are shown, from their end: that is where the answer is.
_MOST_SHOWN = 16
_SHOWN = 300
# From this many rollouts on each prompt gets several, which show how likely it is that all their rewards are equal.
_MANY = 64
_OF_EACH = 4
# Metrics of one micro-batch; the other phases happen once for a generation batch.
_MICRO = ("time/loss", "time/update")
_TITLES = {
    "time/generation": "generation",
    "time/scoring": "scoring without gradient",
    "rest": "rewards, baseline and the rest",
    "time/loss": "loss",
    "time/update": "backward pass and optimizer",
}


def rollouts(recipe: Recipe, plan: Plan, count: int, warn: Warn) -> str:
    """Draw `count` rollouts of prompts spread over the data set, only their first turn, and show them with rewards.

    From 64 rollouts on there are four per prompt, and the share of groups without variance is estimated.
    """
    if plan.episodes:
        raise ValueError("--draw shows answers to the prompts of a dataset, and an environment makes its own.")
    args = plan.args
    tokenizer = plan.tokenizer
    name = str(recipe.model.model_name_or_path)
    of_each = _OF_EACH if count >= _MANY else 1
    problems = len(plan.train_dataset)
    number = min(-(-count // of_each), problems)
    rows = [plan.train_dataset[i * problems // number] for i in range(number)]
    template = with_tools(args, plan.tools)
    tokens = [prompt_tokens(row["prompt"], tokenizer, template) for row in rows]
    settings = {"trust_remote_code": args.trust_remote_code, **model_init_kwargs(recipe)}
    source = ModelSource(load_model(name, use_cpu=args.use_cpu, **settings), tokenizer)
    seeds = {tuple(chunk): args.seed + i for i, chunk in enumerate(source.chunks(tokens, of_each))}
    drawn = dict(source.draw(tokens, seeds, sampling_of(args), of_each))
    repeated = [row for row in rows for _ in range(of_each)]
    said = [each for index in range(len(rows)) for each in drawn[index]]
    found = [Rollout(row["prompt"], each.text, each.token_ids) for row, each in zip(repeated, said, strict=True)]
    functions = [function for function in plan.reward_funcs if callable(function) and not hasattr(function, "forward")]
    weights = torch.tensor(args.reward_weights or [1.0] * len(functions))
    scores = torch.tensor([call(function, repeated, said) for function in functions])
    totals = total_rewards(scores.T, weights).tolist() if functions else []
    ends = end_tokens(source.model.generation_config, tokenizer)
    limit = args.max_completion_length
    if totals and (message := explanation(totals, found, ends, limit, boxes=reads_boxes(functions))):
        warn(message)
    every = -(-len(found) // _MOST_SHOWN)
    pairs = list(zip(found, totals or [float("nan")] * len(found), strict=True))[::every]
    shown = [
        f"--- reward {total:g}, {len(rollout.token_ids)} tokens\n{completion_text(rollout.completion)[-_SHOWN:]}"
        for rollout, total in pairs
    ]
    shown.append("---")
    if every > 1:
        shown.append(f"{len(pairs)} of {len(found)} rollouts are shown.")
    if totals and of_each > 1:
        groups = [totals[start : start + of_each] for start in range(0, len(totals), of_each)]
        shown.append(waste(groups, share_of_a_batch(plan), plan.sampler))
    return "\n".join(shown)


def share_of_a_batch(plan: Plan) -> float:
    """The share of all problems that one generation batch draws."""
    prompts = plan.args.generation_batch_size // plan.args.num_generations
    return min(1.0, prompts / len(plan.train_dataset))


def of_table(plan: Plan, table: ValueTable) -> str:
    """What `waste` says of the groups without variance, from the rewards in a value table."""
    ids = prompt_ids_of(plan.train_dataset, plan.reads) or []
    return waste([table.rewards(name) for name in ids if name in table], share_of_a_batch(plan), plan.sampler)


def measure(argv: Sequence[str], steps: int, *, baseline_missing: bool) -> str:
    """Train two micro-batches of a run in a temporary folder, and say how long the whole run will take.

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
    left_out = ["the start", "checkpoints", *(["evaluations"] if args.eval_strategy != IntervalStrategy.NO else [])]
    micro_batches = args.gradient_accumulation_steps
    uses = args.steps_per_generation * args.num_iterations
    with tempfile.TemporaryDirectory(prefix="basis-rl-measure-") as folder:
        shorten(args, folder)
        phases = timed(recipe)
    once = micro_batches / uses
    costs = {name: seconds * (micro_batches if name in _MICRO else once) for name, seconds in phases.items()}
    step = sum(costs.values())
    parts = "; ".join(f"{_TITLES[name]} {cost:.2f} s" for name, cost in costs.items())
    return (
        f"One optimizer step takes about {step:.3g} s on this machine: {parts}. {steps} steps take "
        f"{clock(step * steps)} (hours, minutes, seconds), without {', '.join(left_out)}. Measured on one generation "
        "batch and two of its micro-batches before any training: longer rollouts take longer."
    )


def shorten(args: BasisConfig, folder: str) -> None:
    """Make it a run of two optimizer steps, of one micro-batch each of a whole generation batch, that saves nothing."""
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
    """Seconds of each phase: those of `_MICRO` per micro-batch, the others per generation batch."""
    with own_server(recipe):
        trainer = build_trainer(recipe)
        trainer.train()
        log = [line for line in trainer.state.log_history if "time/step" in line]
        trainer.end()
    first, second = log
    # The first step has warmed everything up; it is measured only where the second one does not generate.
    generating = second if recipe.args.steps_per_generation * recipe.args.num_iterations == 1 else first
    known = {name: generating.get(name, 0.0) for name in ("time/generation", "time/scoring")}
    rest = generating["time/step"] - sum(known.values()) - sum(generating[name] for name in _MICRO)
    return {**known, "rest": rest, **{name: second[name] for name in _MICRO}}
