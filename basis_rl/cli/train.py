"""``basis-rl train RECIPE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from basis_rl.cli.main import report
from basis_rl.recipe import Recipe, build_trainer, parse_recipe
from basis_rl.report import plot_training
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.progress import ProgressLines
from basis_rl.trainer.state import load_baseline


def main(argv: Sequence[str]) -> int:
    """Train, save model, tokenizer, log, recipe and plot into ``output_dir``, push to the Hub if asked."""
    try:
        recipe = parse_recipe(argv)
        checkpoint = resume_from(recipe)
        trainer = build_trainer(recipe)
        if checkpoint is not None:
            load_baseline(checkpoint, trainer.baseline)
    except (ValueError, OSError) as error:
        return report(error)
    run(recipe, trainer, checkpoint)
    return 0


def resume_from(recipe: Recipe) -> str | None:
    """The checkpoint to resume from: the one that is named, or the newest of ``output_dir`` for ``true``.

    Raises:
        ValueError: there is none.
    """
    asked = recipe.args.resume_from_checkpoint
    if not asked or str(asked).lower() == "false":
        return None
    output = recipe.args.output_dir
    found: str | None = str(asked)
    if str(asked).lower() == "true":
        found = get_last_checkpoint(output) if Path(output).is_dir() else None
    if found is None or not (Path(found) / "trainer_state.json").is_file():
        raise ValueError(f"resume_from_checkpoint: {asked}, but there is no checkpoint in '{found or output}'.")
    return found


def run(recipe: Recipe, trainer: BasisTrainer, checkpoint: str | None) -> None:
    """Train and save."""
    output = Path(recipe.args.output_dir)
    if trainer.accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.yaml").write_text(yaml.safe_dump(recipe.resolved, sort_keys=False))
    for bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(bar)
    trainer.add_callback(ProgressLines)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(output))
    trainer.save_state()
    if trainer.accelerator.is_main_process:
        plot_training(trainer.state.log_history, output / "training.png", title=output.name)
        print(f"Model, log and plot are in {output}.")
    if recipe.args.push_to_hub:
        trainer.push_to_hub(dataset_name=recipe.data.dataset_name)
    trainer.end()
