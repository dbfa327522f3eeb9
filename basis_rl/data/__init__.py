"""Datasets in, prompts with stable ids out."""

from basis_rl.data.prompts import DataArguments, load_prompts, problem_text, prompt_id

__all__ = ["DataArguments", "load_prompts", "problem_text", "prompt_id"]
