"""``basis-rl train RECIPE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from basis_rl.cli.main import report
from basis_rl.recipe import Recipe, build_trainer, parse_recipe
from basis_rl.report import plot_training
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.progress import ProgressLines


def main(argv: Sequence[str]) -> int:
    """Train, save model, tokenizer, log, recipe and plot into ``output_dir``, push to the Hub if asked."""
    try:
        recipe = parse_recipe(argv)
        trainer = build_trainer(recipe)
    except ValueError as error:
        return report(error)
    run(recipe, trainer)
    return 0


def run(recipe: Recipe, trainer: BasisTrainer) -> None:
    """Train and save."""
    for bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(bar)
    trainer.add_callback(ProgressLines)
    resume = recipe.args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    output = Path(recipe.args.output_dir)
    trainer.save_model(str(output))
    trainer.save_state()
    if trainer.accelerator.is_main_process:
        (output / "recipe.yaml").write_text(yaml.safe_dump(recipe.resolved, sort_keys=False))
        plot_training(trainer.state.log_history, output / "training.png", title=output.name)
        print(f"Model, log and plot are in {output}.")
    if recipe.args.push_to_hub:
        trainer.push_to_hub(dataset_name=recipe.data.dataset_name)
    trainer.end()
