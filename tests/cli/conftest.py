"""Recipes of one small run, on a CPU; the files of this folder change a few keys."""

import pytest
import yaml

from basis_rl.recipe.words import with_sections

SETTINGS = {
    "dataset_name": "reasoning_gym:chain_sum",
    "dataset_kwargs": {"size": 64, "seed": 0, "max_terms": 2, "max_digits": 1},
    "prompt_template": "{prompt}",
    "max_completion_length": 6,
    "baseline": "rloo",
    "objective": "grpo",
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "steps_per_generation": 2,
    "max_steps": 2,
    "learning_rate": 1.0e-3,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "values_num_rollouts": 4,
}


@pytest.fixture
def recipe(request, tmp_path, tiny_path):
    """Writes a recipe with changes, after those of the test's file (`OWN`), and returns its path; None is left out."""
    own = {"model_name_or_path": str(tiny_path), "output_dir": str(tmp_path / "out")}
    own |= getattr(request.module, "OWN", {})

    def write(**changes):
        settings = {**SETTINGS, **own, **changes}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(with_sections({k: v for k, v in settings.items() if v is not None})))
        return str(path)

    return write
