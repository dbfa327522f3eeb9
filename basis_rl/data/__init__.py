"""Datasets in, prompts with stable ids out."""

from basis_rl.data.prompts import GYM_COLUMN, DataArguments, load_prompts
from basis_rl.data.rows import problem_text
from basis_rl.identity import prompt_id

__all__ = ["GYM_COLUMN", "DataArguments", "load_prompts", "problem_text", "prompt_id"]
