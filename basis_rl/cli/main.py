"""``basis-rl COMMAND``: one thin module a command, imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from basis_rl import __version__
from basis_rl.names import did_you_mean

COMMANDS = {
    "train": "train a model by a recipe",
    "serve": "start a vLLM server as training needs it",
    "values": "build the value table that BASIS needs, from rollouts of the reference model",
    "compare": "compare runs at the same number of rollouts: curves, final table, one HTML file",
    "sweep": "train a recipe with several baselines and seeds, and compare them",
    "clusters": "build the prompt codebook that BV-Blend needs, from a sentence encoder and K-means",
    "eval": "measure a model on benchmarks: avg@k, pass@k, maj@k, every rollout kept",
    "push": "push a run's folder to the Hub: after an evaluation, or where the push at its end has failed",
    "check": "check a recipe before anything is spent, or module:name, a baseline or an objective of your own",
}
_OWN_HELP = ("serve", "compare", "sweep", "eval", "push", "check")
# Exit codes beside 0 and 2 (a message about what was asked for); the numbers are those of sysexits.h.
LOST, FAILED, STOPPED = 69, 70, 75
USAGE = """usage: basis-rl COMMAND RECIPE.yaml [--key value ...]

commands:
{commands}

A recipe is YAML; every key can be overridden, `--learning_rate 1e-6`, `--baseline_kwargs.weighting vop`.
Several processes: accelerate launch --config_file accelerate_configs/ddp.yaml -m basis_rl train RECIPE.yaml
SIGTERM, SIGUSR1 or a file STOP in output_dir end training at the next step with a checkpoint (exit code 75); resume
with --resume_from_checkpoint auto.
`basis-rl train --help` lists all keys. BASIS_RL_DEBUG=1 shows tracebacks of errors in a recipe."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 for a message about what was asked for."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # TRL still says `gradient_checkpointing`, and transformers warns of it: nothing that a user could fix.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())))
        return 0 if arguments else 2
    command, *rest = arguments
    if command in ("--version", "version"):
        print(f"basis-rl {__version__}")
        return 0
    if command not in COMMANDS:
        return fail(f"unknown command '{command}'.{did_you_mean(command, COMMANDS)} Commands: {', '.join(COMMANDS)}.")
    if rest and rest[0] in ("-h", "--help") and command not in _OWN_HELP:
        from basis_rl.recipe.file import parser

        parser().print_help()
        return 0
    code: int = importlib.import_module(f"basis_rl.cli.{command}").main(rest)
    return code


def fail(message: object, code: int = 2) -> int:
    """Print one message, once a machine, and return the exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"basis-rl: error: {message}", file=sys.stderr)
    return code


def report(error: Exception) -> int:
    """Answer an error in what was asked for: the message alone, or with BASIS_RL_DEBUG=1 the traceback."""
    if os.environ.get("BASIS_RL_DEBUG"):
        raise error
    return fail(error)
