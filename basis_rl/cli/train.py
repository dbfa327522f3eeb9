"""``basis-rl train RECIPE``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerState, TrainingArguments

from basis_rl.cli.main import FAILED, LOST, PEER, STOPPED, fail, notes
from basis_rl.engine.server import Server, ServerError, kept_alive
from basis_rl.engine.template_day import use_day
from basis_rl.recipe.build import build_trainer, server_options
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.keys import Recipe
from basis_rl.run import errors
from basis_rl.run.artefacts import write_whole
from basis_rl.run.checkpoint import resolve
from basis_rl.run.disk import naming_a_full_disk
from basis_rl.run.peers import naming_lost_peers
from basis_rl.run.progress import EVALUATED, clock, how_sampled
from basis_rl.run.ranks import on_main_process
from basis_rl.run.record import is_finished, save_run_info
from basis_rl.run.redact import redact_command
from basis_rl.run.run_lock import held
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.state import saved_settings

# The reward before and after is the mean over the first and the last tenth of the log.
_TENTH = 10
# Files that a run's folder may hold besides the model, in the order of the summary.
_FILES = ("README.md", "recipe.yaml", "metrics.jsonl", "training.png", "vllm.log")


def main(argv: Sequence[str]) -> int:
    """Train, save model, tokenizer, log, recipe and plot into ``output_dir``, push to the Hub if asked."""
    recipe = parse_recipe(argv)
    notes(recipe.notes)
    try:
        place = recipe.args.output_dir
        with naming_a_full_disk(place, only_writes=False), naming_lost_peers(), held(place), own_server(recipe) as own:
            return train(recipe, own)
    except ServerError as error:
        return fail(error, LOST)
    except errors.DiskFull as error:
        return fail(error, FAILED)
    except errors.PeerLost as error:
        return fail(error, PEER)


def own_server(recipe: Recipe) -> AbstractContextManager[Server | None]:
    """The vLLM server of a recipe with ``serve: true``, kept alive by the first rank; the recipe then names its URL.

    Raises:
        ValueError: the recipe does not use it.
    """
    args = recipe.args
    if not recipe.run.serve:
        return nullcontext()
    if not args.use_vllm or args.vllm_mode != "server" or args.vllm_server_base_url:
        with_it = "use_vllm: false, vllm_mode: colocate and vllm_server_base_url"
        raise ValueError(f"serve: true starts its own vLLM server and generates with it: leave out {with_it}.")
    args.vllm_server_base_url = f"http://127.0.0.1:{args.vllm_server_port}"
    if args.process_index != 0:
        return nullcontext()
    options = server_options(recipe, args.vllm_server_port, Path(args.output_dir) / "vllm.log")
    print(f"Starting vLLM at {args.vllm_server_base_url}, log in {options.log} ...", flush=True)
    return kept_alive(options)


def train(recipe: Recipe, served: Server | None = None) -> int:
    """Check, build and run; returns the exit code."""
    args = recipe.args
    asked = (args.resume_from_checkpoint, args.output_dir, args.overwrite_output_dir)
    checkpoint = on_main_process(lambda: resolve(*asked))
    # A chat template that writes today's date must write that of the run's first day.
    if day := saved_settings(checkpoint).get("day"):
        use_day(day)
    trainer = build_trainer(recipe)
    notes([f"{line}." for line in trainer.train_dataset.info.description.split("\n")])
    if served is not None:
        trainer.watch_server(lambda: served.given_up)
    started = SaveRecipe(trainer)
    trainer.add_callback(started)
    try:
        return run(recipe, trainer, checkpoint)
    except (errors.NonFiniteGradients, errors.RewardFailed) as error:
        return fail(error, FAILED)
    except (errors.ServerLost, errors.RequestRefused, errors.SyncError) as error:
        return fail(error, LOST)
    except (ValueError, OSError) as error:
        if started.begun:
            raise RuntimeError("The training has failed after it began.") from error
        # Before the first step it is a mistake in the input, such as a checkpoint of another run.
        raise


def run(recipe: Recipe, trainer: BasisTrainer, checkpoint: str | None) -> int:
    """Train and save; returns the exit code."""
    output = Path(recipe.args.output_dir)
    set_origin(recipe, trainer)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except (KeyboardInterrupt, SystemExit):
        if not trainer.stop_on_signal.stopped:
            raise
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
        run = recipe.run
        # `eval` draws single turns.
        measured = None if run.tools or run.environment else run.eval_benchmarks or []
        print(summary(trainer.state.log_history, output, how_sampled(recipe.args), measured))
        if recipe.args.push_to_hub:
            again = shlex.join(["basis-rl", "push", str(output), *filter(None, [trainer.hub_model_id])])
            print(f"Pushed: {pushed.commit_url}" if pushed else f"NOT pushed. Once the Hub can be reached: {again}")
    trainer.end()
    return 0


class SaveRecipe(TrainerCallback):
    """Writes recipe and `run.json` before the first step; those of a finished run stay as they are."""

    def __init__(self, trainer: BasisTrainer) -> None:
        self.trainer = trainer
        self.begun = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
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


def summary(log: Sequence[Mapping[str, Any]], output: Path, how: str, benchmarks: Sequence[str] | None = ()) -> str:
    """The text that a run prints at its end.

    Args:
        log: what was logged, in order (`TrainerState.log_history`).
        output: folder of the run, with everything written.
        how: how the rollouts of evaluations were drawn.
        benchmarks: of the recipe, for an evaluation of the model; without any it is one on the recipe's own problems,
            and with None there is none.
    """
    place = shlex.quote(str(output))
    rows = before_and_after(log, how)
    width = max((len(row[0]) for row in rows), default=0)
    lines = ["", "== Summary", _cost(log)]
    if rows:
        lines += [f"{'':{width}}  {'before':>7}  {'after':>7}"]
        lines += [f"{name:{width}}  {first:7.3g}  {last:7.3g}  {note}" for name, first, last, note in rows]
    there = [name for name in _FILES if (output / name).is_file()]
    lines.append(f"In {output}: {', '.join(['the model and its tokenizer', *there])}.")
    measured = f" --benchmarks {shlex.quote(','.join(benchmarks))}" if benchmarks else ""
    lines += [
        "Next:",
        *([] if benchmarks is None else [f"  basis-rl eval {place}{measured}"]),
        f"  basis-rl compare {place} OTHER_RUN",
        f"  basis-rl push {place} OWNER/NAME",
    ]
    return "\n".join(lines)


def before_and_after(log: Sequence[Mapping[str, Any]], how: str) -> list[tuple[str, float, float, str]]:
    """Name, value at the start, value at the end, and what they are; without what was logged once.

    The reward's values are the means of the first and the last tenth of the log; of an evaluation its first and last.
    """
    rows = []
    rewards = [row for row in log if row.get("reward") is not None]
    if len(rewards) > 1:
        size = max(1, len(rewards) // _TENTH)
        first = rewards[:size]
        last = rewards[-size:]
        steps = [f"{part[0]['step']}" + (f"-{part[-1]['step']}" if size > 1 else "") for part in (first, last)]
        before, after = (fmean(row["reward"] for row in part) for part in (first, last))
        rows.append(("reward", before, after, f"of the training rollouts, steps {' and '.join(steps)}"))
    evaluated = filter(EVALUATED.fullmatch, dict.fromkeys(key for row in log for key in row))
    for name in (key for key in evaluated if "avg@" in key):
        found = [row for row in log if row.get(name) is not None]
        if len(found) > 1:
            note = f"{how}, steps {found[0]['step']} and {found[-1]['step']}"
            rows.append((name.replace("eval_", "eval ", 1), found[0][name], found[-1][name], note))
    return rows


def _cost(log: Sequence[Mapping[str, Any]]) -> str:
    last: dict[str, Any] = {key: value for row in log for key, value in row.items()}
    if "num_rollouts" not in last:
        return f"Trained to step {last.get('step', 0)}."
    return (
        f"Trained to step {last['step']} in {clock(last['seconds'])}: {last['num_rollouts']:,} rollouts with "
        f"{last['num_rollout_tokens']:,} tokens."
    )
