"""Datasets in, prompts with stable ids out."""

from basis_rl.data.prompts import GYM_COLUMN, DataArguments, load_prompts, prompt_id
from basis_rl.data.rows import problem_text

__all__ = ["GYM_COLUMN", "DataArguments", "load_prompts", "problem_text", "prompt_id"]
