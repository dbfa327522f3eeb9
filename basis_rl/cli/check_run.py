"""The sections of `basis-rl check` that follow from recipe and data alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from datasets import Dataset

from basis_rl.data import problem_text
from basis_rl.estimate.memory import Launch
from basis_rl.estimate.report import Warn
from basis_rl.recipe.keys import Recipe
from basis_rl.rewards.base import GoldChecker, read_columns
from basis_rl.samplers import sampler_name
from basis_rl.trainer import BasisConfig
from basis_rl.trainer.gather import prompt_ids_of
from basis_rl.trainer.model_check import rounding_note
from basis_rl.trainer.plan import Plan
from basis_rl.trainer.selection import tried_belief

# Settings that decide a run and are often left to their defaults, so they are shown even then.
_SHOWN = (
    "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "loss_type", "importance_sampling_level",
    "epsilon", "epsilon_high", "beta", "temperature", "top_p", "max_completion_length", "mask_truncated_completions",
    "bf16", "gradient_checkpointing", "optim", "seed",
)  # fmt: skip
# Above this, the ratio of a sequence is hardly ever clipped (GSPO, Zheng et al. 2025, Sec. 5.1: 3e-4 and 4e-4).
_LARGE_SEQUENCE_EPSILON = 0.01


def configuration(recipe: Recipe, args: BasisConfig, launch: Launch, warn: Warn) -> str:
    """The recipe after overrides, and the defaults that decide most beside it."""
    correction = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode") if args.use_vllm else ()
    settings = {name: getattr(args, name) for name in (*_SHOWN, *correction)}
    # transformers keeps some settings as enumerations.
    defaults = {"dtype": recipe.model.dtype, **{k: getattr(v, "value", v) for k, v in settings.items()}}
    left = {name: value for name, value in defaults.items() if name not in recipe.resolved}
    given = yaml.safe_dump(recipe.resolved, sort_keys=False).rstrip().replace("\n", "\n  ")
    shown = ", ".join(f"{name} {value}" for name, value in left.items())
    if args.importance_sampling_level == "sequence" and args.epsilon > _LARGE_SEQUENCE_EPSILON:
        warn(
            f"epsilon is {args.epsilon:g}, which hardly ever clips the ratio of a whole sequence: GSPO's paper has "
            "epsilon 3e-4 and epsilon_high 4e-4."
        )
    low = recipe.model.dtype in ("bfloat16", "float16")
    if low and launch.engine == "plain" and not recipe.model.use_peft:
        warn(rounding_note(recipe.model.dtype, args.learning_rate))
    return f"  {given}\nNot given, and so: {shown}.\nLaunched as: {launch}."


def sampling(plan: Plan) -> str:
    """What a prompt sampler does to the objective.

    Raises:
        ValueError: it cannot draw a first batch, by the belief of the baseline or by a separate one.
    """
    sampler = plan.sampler
    dataset = plan.train_dataset
    texts = (problem_text(prompt) for prompt in dataset["prompt"])
    tried_belief(sampler, plan.baseline, prompt_ids_of(dataset, plan.reads) or [], texts, plan.args)
    parameters = ", ".join(f"{key} {value}" for key, value in sampler.parameters.items())
    drawn = f"Prompts are drawn by `{sampler_name(sampler)}`" + (f" ({parameters})" if parameters else "")
    if sampler.max_refills:
        return f"{drawn}: groups whose rewards are all equal are drawn again, {sampler.max_refills} times at most."
    if sampler.correct:
        low, high = sampler.clip
        return f"{drawn}; advantages are weighed by the ratio to a uniform draw, clipped to {low:g} to {high:g}."
    undo = ", which `prompt_sampler_kwargs: {correct: true}` undoes" if sampler.known_chances else ""
    return f"{drawn}: training maximises the mean reward over the prompts that it draws, not over all alike{undo}."


def columns(dataset: Dataset, args: BasisConfig, rewards: Sequence[Any]) -> str:
    """Which columns there are, where they come from, and who reads them."""
    readers = {"prompt": ["the model"], "prompt_id": ["baseline and logs"]}
    for reward in rewards:
        for name in sorted(read_columns([reward])):
            readers.setdefault(name, []).append(getattr(reward, "__name__", type(reward).__name__))
    if args.difficulty_column is not None:
        readers.setdefault(args.difficulty_column, []).append("the log (difficulty_column)")
    lines = [f"{dataset.info.description}."] if dataset.info.description else []
    lines.append(f"{len(dataset)} problems after duplicates and what is held out.")
    for name in dataset.column_names:
        read = f"read by {', '.join(readers[name])}" if name in readers else "no reward function names it"
        lines.append(f"  {name}: {read}")
    return "\n".join(lines)


def tools(found: Sequence[Any], args: BasisConfig) -> str:
    """What the model may call, how often, and how programs are held."""
    rounds = args.max_tool_calling_iterations
    lines = [
        f"{', '.join(tool.__name__ for tool in found)}; calls of a rollout are answered "
        f"{'without a limit' if rounds is None else f'{rounds} times at most'}. max_completion_length "
        f"({args.max_completion_length}) holds all turns together, and what the tools say."
    ]
    lines += [f"{tool.__name__}: {tool.isolation}." for tool in found if hasattr(tool, "isolation")]
    return "\n".join(lines)


def prompts(texts: Sequence[str], lengths: Sequence[int], given: Any) -> str:
    """Three prompts, and how long all of them are; `given` is the first one before it is rendered."""
    chat = not isinstance(given, str)
    ordered = sorted(lengths)
    lines = [
        f"Prompts are {'conversations in the chat template' if chat else 'plain text, without a chat template'}, "
        f"{ordered[0]} to {ordered[-1]} tokens, median {ordered[len(ordered) // 2]}."
    ]
    lines += [f"--- prompt {number}\n{text}" for number, text in enumerate(texts[:3], 1)]
    return "\n".join([*lines, "---"])


def answers(rewards: Sequence[Any]) -> str:
    """Where reward functions that say so look for the answer."""
    return "\n".join(f"{reward.__name__} {reward.reading}." for reward in rewards if hasattr(reward, "reading"))


def golds(dropped: int, problems: int, rewards: Sequence[Any], warn: Warn) -> str:
    """What the gold self-check found."""
    if not any(isinstance(reward, GoldChecker) for reward in rewards):
        return "No reward function here can check the golds (0 problems dropped)."
    if dropped:
        warn(f"{dropped} of {problems} problems are dropped: their golds do not verify against themselves.")
    return f"All golds verify against themselves ({dropped} problems dropped)."
