"""The sections of `basis-rl check` that are about the model's answers before any training: drawn (--draw), or those of
a value table."""

from __future__ import annotations

import torch

from basis_rl.engine import prompt_tokens, sample
from basis_rl.engine.local import load_model
from basis_rl.estimate.report import Warn
from basis_rl.estimate.waste import waste
from basis_rl.recipe.build import model_init_kwargs
from basis_rl.recipe.keys import Recipe
from basis_rl.rewards.call import call
from basis_rl.rewards.extract import completion_text
from basis_rl.trainer.first_rollouts import Rollout, explanation
from basis_rl.trainer.plan import Plan, sampling_of, with_tools
from basis_rl.trainer.rewarding import total_rewards
from basis_rl.values import ValueTable

# Of how many rollouts how many characters are shown, from their end: that is where the answer is.
_MOST_SHOWN = 16
_SHOWN = 300
# From this many rollouts on each prompt gets several, which show how likely it is that all their rewards are equal.
_MANY = 64
_OF_EACH = 4


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
    model = load_model(name, use_cpu=args.use_cpu, **settings)
    torch.manual_seed(args.seed)
    drawn = dict(sample(model, tokenizer, tokens, sampling_of(args), num_samples=of_each))
    repeated = [row for row in rows for _ in range(of_each)]
    said = [each for index in range(len(rows)) for each in drawn[index]]
    found = [Rollout(row["prompt"], *each) for row, each in zip(repeated, said, strict=True)]
    weighted = zip(plan.reward_funcs, args.reward_weights or [1.0] * len(plan.reward_funcs), strict=True)
    # Reward models are not asked.
    asked = [(each, weight) for each, weight in weighted if callable(each) and not hasattr(each, "forward")]
    functions = [each for each, _ in asked]
    weights = torch.tensor([weight for _, weight in asked])
    scores = torch.tensor([call(function, repeated, said) for function in functions])
    totals = total_rewards(scores.T, weights).tolist() if functions else []
    if totals and (message := explanation(totals, found, args.max_completion_length, functions)):
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
    known = [name for name in plan.prompt_ids or [] if name in table]
    return waste([table.rewards(name) for name in known], share_of_a_batch(plan), plan.sampler)
