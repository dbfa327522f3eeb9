"""The section of `basis-rl check --rollouts`: what the model writes before it has learnt anything."""

from __future__ import annotations

import threading

import torch

from basis_rl.engine import end_tokens, prompt_tokens
from basis_rl.estimate.report import Warn
from basis_rl.recipe.build import model_init_kwargs
from basis_rl.recipe.keys import Recipe
from basis_rl.rewards.call import call
from basis_rl.rewards.extract import completion_text
from basis_rl.trainer.first_rollouts import Rollout, explanation, reads_boxes
from basis_rl.trainer.plan import Plan, sampling_of, with_tools
from basis_rl.trainer.rewarding import total_rewards
from basis_rl.values.sources import ModelSource, load_model

_SHOWN = 300


def rollouts(recipe: Recipe, plan: Plan, count: int, warn: Warn) -> str:
    """One rollout of each of the first `count` prompts, its first turn, with what the reward functions give it."""
    args = plan.args
    tokenizer = plan.tokenizer
    name = str(recipe.model.model_name_or_path)
    rows = [plan.train_dataset[i] for i in range(min(count, len(plan.train_dataset)))]
    template = with_tools(args, plan.tools)
    tokens = [prompt_tokens(row["prompt"], tokenizer, template) for row in rows]
    settings = {"trust_remote_code": args.trust_remote_code, **model_init_kwargs(recipe)}
    model = load_model(name, use_cpu=args.use_cpu, **settings)
    seeds = {tuple(range(len(rows))): args.seed}
    drawn = dict(ModelSource(model, tokenizer).draw(tokens, seeds, sampling_of(args), 1, threading.Event()))
    said = [(drawn[index][0].text, drawn[index][0].token_ids) for index in range(len(rows))]
    found = [Rollout(row["prompt"], *each) for row, each in zip(rows, said, strict=True)]
    functions = [function for function in plan.reward_funcs if callable(function) and not hasattr(function, "forward")]
    weights = torch.tensor(args.reward_weights or [1.0] * len(functions))
    scores = torch.tensor([call(function, rows, said) for function in functions])
    totals = total_rewards(scores.T, weights).tolist() if functions else []
    ends = end_tokens(model.generation_config, tokenizer)
    limit = args.max_completion_length
    told = explanation(totals, found, ends, limit, boxes=reads_boxes(functions)) if totals else None
    if told is not None:
        warn(told)
    shown = []
    for rollout, total in zip(found, totals or [float("nan")] * len(found), strict=True):
        text = completion_text(rollout.completion)
        shown.append(f"--- reward {total:g}, {len(rollout.token_ids)} tokens\n{text[-_SHOWN:]}")
    return "\n".join([*shown, "---"])
