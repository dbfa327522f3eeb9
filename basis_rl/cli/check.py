"""``basis-rl check RECIPE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from basis_rl.baselines import BaselineError, check_baseline
from basis_rl.cli.main import report
from basis_rl.recipe import (
    Recipe,
    build_recipe_baseline,
    build_rewards,
    import_object,
    load_config_and_tokenizer,
    load_eval_data,
    load_training_data,
    parse_recipe,
)
from basis_rl.trainer.config import with_objective
from basis_rl.trainer.preflight import check_baseline_fits, check_dataset, check_eval_data, check_golds, run_context
from basis_rl.values.provenance import rendered_prompt


def main(argv: Sequence[str]) -> int:
    """All that training checks before its first step, without the model's weights; then what would happen.

    ``basis-rl check module:Class`` runs the conformance matrix on somebody's own baseline instead.
    """
    try:
        if argv and ":" in argv[0] and not Path(argv[0]).exists():
            print(conform(argv[0]))
        else:
            print(check(parse_recipe(argv)))
    except (ValueError, OSError, BaselineError) as error:
        return report(error)
    return 0


def conform(name: str) -> str:
    """Run `check_baseline` on ``module:Class``, a class that is built without arguments, or a function that builds one.

    Raises:
        BaselineError: the first promise of the contract that it breaks.
    """
    make = import_object(name, "baseline")
    passed = check_baseline(make)
    return f"{name} keeps the contract: {', '.join(passed)}."


def check(recipe: Recipe) -> str:
    """Check the recipe and describe the run.

    Raises:
        ValueError: what training would refuse.
    """
    baseline = build_recipe_baseline(recipe.run)
    rewards = build_rewards(recipe.run)
    args = with_objective(recipe.args, recipe.run.objective)
    check_baseline_fits(baseline, args)
    config, tokenizer = load_config_and_tokenizer(recipe.model, args)
    dataset = load_training_data(recipe, tokenizer)
    check_dataset(dataset, args, rewards)
    scored = check_golds(dataset, args, rewards)
    check_dataset(scored, args, rewards)
    check_eval_data(load_eval_data(recipe, tokenizer), args, rewards)
    baseline.validate(run_context(config, tokenizer, scored, rewards, args))
    template = args.chat_template_kwargs or {}
    prompts = [rendered_prompt(row["prompt"], tokenizer, template) for row in scored.select(range(min(3, len(scored))))]
    resolved = yaml.safe_dump(recipe.resolved, sort_keys=False).rstrip().replace("\n", "\n  ")
    shown = "\n".join(f"--- prompt {i + 1}\n{prompt}" for i, prompt in enumerate(prompts))
    verified = any(hasattr(reward, "check_golds") for reward in rewards)
    golds = "All golds verify against themselves" if verified else "No reward function here can check the golds"
    golds += f" ({len(dataset) - len(scored)} problems dropped)."
    chat = tokenizer.chat_template is not None
    golds += (
        f"\nPrompts are {'conversations in the chat template' if chat else 'plain text: there is no chat template'}."
    )
    return (
        f"Recipe:\n  {resolved}\n\n{arithmetic(recipe, len(scored))}\n{golds}\n\n{shown}\n---\nThe recipe is in order."
    )


def arithmetic(recipe: Recipe, problems: int) -> str:
    """The batch arithmetic in words."""
    args = recipe.args
    prompts = args.generation_batch_size // args.num_generations
    backward = args.steps_per_generation * args.num_iterations
    updates = backward / args.gradient_accumulation_steps
    batches = problems // prompts
    total = args.max_steps if args.max_steps > 0 else int(batches * updates * args.num_train_epochs)
    return (
        f"One generation batch: {prompts} prompts x {args.num_generations} rollouts = {args.generation_batch_size} "
        f"rollouts on {args.world_size} process(es), used for {updates:g} optimizer step(s) of "
        f"{args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps} rollouts each.\n"
        f"One epoch: {problems} problems = {batches} generation batches. The run: {total} optimizer steps, "
        f"{int(total / updates * args.generation_batch_size)} rollouts."
    )
