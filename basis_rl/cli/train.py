"""``basis-rl train RECIPE``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from basis_rl.cli.main import FAILED, LOST, PEER, STOPPED, fail, notes
from basis_rl.cli.summary import summary
from basis_rl.data import GYM_COLUMN
from basis_rl.engine.server import Server, ServerError, kept_alive
from basis_rl.engine.template_day import use_day
from basis_rl.recipe.build import build_trainer, server_options
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.run.artefacts import write_whole
from basis_rl.run.checkpoint import newest, resolve
from basis_rl.run.disk import naming_a_full_disk
from basis_rl.run.errors import (
    DiskFull,
    NonFiniteGradients,
    PeerLost,
    RequestRefused,
    RewardFailed,
    ServerLost,
    SyncError,
)
from basis_rl.run.peers import naming_lost_peers
from basis_rl.run.progress import how_sampled
from basis_rl.run.ranks import on_main_process
from basis_rl.run.record import is_finished, save_run_info
from basis_rl.run.redact import redact_command
from basis_rl.run.run_lock import held
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.state import saved_settings


def main(argv: Sequence[str]) -> int:
    """Train, save model, tokenizer, log, recipe and plot into ``output_dir``, push to the Hub if asked."""
    recipe = parse_recipe(argv)
    notes(recipe.notes)
    try:
        place = recipe.args.output_dir
        with ExitStack() as stack:
            stack.enter_context(naming_a_full_disk(place, only_writes=False))
            stack.enter_context(naming_lost_peers())
            stack.enter_context(held(place))
            return train(recipe, stack.enter_context(own_server(recipe)))
    except ServerError as error:
        return fail(error, LOST)
    except DiskFull as error:
        return fail(error, FAILED)
    except PeerLost as error:
        return fail(error, PEER)


def own_server(recipe: Recipe) -> AbstractContextManager[Server | None]:
    """The vLLM server of a recipe with ``serve: true``, kept alive by the first rank; the recipe then names its URL.

    Raises:
        ValueError: the recipe does not use it.
    """
    run = recipe.run
    args = recipe.args
    if not run.serve:
        return nullcontext()
    if not args.use_vllm or args.vllm_mode != "server" or args.vllm_server_base_url:
        raise ValueError(
            "serve: true starts a vLLM server of its own and generates with it: leave out use_vllm: false, vllm_mode: "
            "colocate and vllm_server_base_url."
        )
    args.vllm_server_base_url = f"http://127.0.0.1:{args.vllm_server_port}"
    if args.process_index != 0:
        return nullcontext()
    options = server_options(recipe, args.vllm_server_port, Path(args.output_dir) / "vllm.log")
    print(f"Starting vLLM at {args.vllm_server_base_url}, log in {options.log} ...", flush=True)
    return kept_alive(options)


def train(recipe: Recipe, served: Server | None = None) -> int:
    """Check, build and run; returns the exit code."""
    args = recipe.args
    asked = args.resume_from_checkpoint
    overwrite = args.overwrite_output_dir
    checkpoint = on_main_process(lambda: resolve(asked, args.output_dir, overwrite))
    day = saved_settings(checkpoint).get("day")
    if day is not None:
        use_day(day)
    trainer = build_trainer(recipe)
    notes([f"{trainer.train_dataset.info.description}."])
    if served is not None:
        trainer.watch_server(lambda: served.given_up)
    started = SaveRecipe(trainer)
    trainer.add_callback(started)
    try:
        return run(recipe, trainer, checkpoint)
    except (NonFiniteGradients, RewardFailed) as error:
        return fail(error, FAILED)
    except (ServerLost, RequestRefused, SyncError) as error:
        return fail(error, LOST)
    except (ValueError, OSError) as error:
        if started.begun:
            raise RuntimeError("The training has failed after it began.") from error
        # Before the first step it is a mistake in the input, such as a checkpoint of another run.
        raise


def suggested_benchmarks(recipe: Recipe) -> list[str]:
    """The recipe's own; else MATH-500, unless problems are generated, which look different, or are no mathematics."""
    generated = recipe.data.dataset_name.startswith(f"{GYM_COLUMN}:")
    return recipe.run.eval_benchmarks or (
        [] if generated or "math_verify" not in recipe.run.reward_funcs else ["math500"]
    )


def run(recipe: Recipe, trainer: BasisTrainer, checkpoint: str | None) -> int:
    """Train and save; returns the exit code."""
    output = Path(recipe.args.output_dir)
    set_origin(recipe, trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.stop_on_signal.stopped:
        if trainer.accelerator.is_main_process:
            kept = newest(output)
            where = f"Checkpoint: {kept}. Resume with --resume_from_checkpoint auto." if kept else "Nothing is saved."
            print(f"Stopped by a signal after step {trainer.state.global_step} of {trainer.state.max_steps}. {where}")
        trainer.end()
        return STOPPED
    # A run that was finished may have been killed while it saved its model.
    whole = on_main_process(lambda: is_finished(output))
    if trainer.was_finished and trainer.accelerator.is_main_process:
        missing = "the model is there" if whole else "saving the model, which was cut off"
        print(f"{output} is finished: step {trainer.state.global_step} of {trainer.state.max_steps}; {missing}.")
    if not (trainer.was_finished and whole):
        trainer.save_model(str(output))
        trainer.save_state()
        if trainer.accelerator.is_main_process:
            save_run_info(trainer.run_info(), output)
    if recipe.args.push_to_hub:
        pushed = trainer.push_to_hub()
    else:
        trainer.create_model_card()
    if trainer.accelerator.is_main_process:
        log = trainer.state.log_history
        print(summary(log, output, how_sampled(recipe.args), suggested_benchmarks(recipe)))
        if recipe.args.push_to_hub:
            again = shlex.join(["basis-rl", "push", str(output), *filter(None, [trainer.hub_model_id])])
            again = f"NOT pushed. Once the Hub can be reached: {again}"
            print(f"Pushed: {pushed.commit_url}" if pushed is not None else again)
    trainer.end()
    return 0


class SaveRecipe(TrainerCallback):
    """Writes recipe and `run.json` before the first step; those of a finished run stay as they are."""

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer
        self.begun = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begun = True
        if state.is_world_process_zero and not self.trainer.was_finished:
            save_run_info(self.trainer.run_info(), str(args.output_dir))
            write_whole(Path(str(args.output_dir)) / "recipe.yaml", str(self.trainer.origin.recipe))


def set_origin(recipe: Recipe, trainer: BasisTrainer) -> None:
    """Tell the trainer what its model card says of the recipe."""
    processes = trainer.accelerator.num_processes
    launcher = ["basis-rl"]
    if processes > 1:
        launcher = ["accelerate", "launch", "--num_processes", str(processes), "-m", "basis_rl"]
    trainer.origin.command = shlex.join([*launcher, "train", *redact_command(recipe.argv)])
    trainer.origin.recipe = yaml.safe_dump(recipe.resolved, sort_keys=False)
    trainer.origin.dataset_name = recipe.data.dataset_name
