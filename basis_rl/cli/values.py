"""``basis-rl values RECIPE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed

from basis_rl.cli.main import report
from basis_rl.recipe import (
    build_rewards,
    load_config_and_tokenizer,
    load_training_data,
    model_init_kwargs,
    parse_recipe,
)
from basis_rl.trainer.preflight import check_dataset, check_golds, sampling_of
from basis_rl.values.build import build_table, describe
from basis_rl.values.table import check_destination


def main(argv: Sequence[str]) -> int:
    """Sample the recipe's model on its prompts, score, and write the table where the baseline will look for it."""
    try:
        recipe = parse_recipe(argv)
        args = recipe.args
        if args.world_size > 1:
            raise ValueError("basis-rl values runs in one process: start it without accelerate launch.")
        output = recipe.run.values_output or (recipe.run.baseline_kwargs or {}).get("values")
        if not output:
            raise ValueError("Where should the table go? Set `values` in baseline_kwargs, or --values_output FOLDER.")
        check_destination(Path(output))
        rewards = build_rewards(recipe.run)
        _, tokenizer = load_config_and_tokenizer(recipe.model, args)
        dataset = load_training_data(recipe, tokenizer)
        check_dataset(dataset, args, rewards)
        dataset = check_golds(dataset, args, rewards)
        model: Any = AutoModelForCausalLM.from_pretrained(
            recipe.model.model_name_or_path, trust_remote_code=args.trust_remote_code, **model_init_kwargs(recipe)
        )
    except (ValueError, OSError) as error:
        return report(error)
    set_seed(args.seed)
    table = build_table(
        model.to("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu"),
        tokenizer,
        dataset,
        rewards,
        sampling_of(args),
        num_rollouts=recipe.run.values_num_rollouts,
        reward_weights=args.reward_weights,
        batch_size=recipe.run.values_batch_size,
        chat_template_kwargs=args.chat_template_kwargs or {},
    )
    print(f"Value table: {table.save(output)}")
    print(describe(table))
    return 0
