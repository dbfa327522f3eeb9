"""``basis-rl COMMAND``: one thin module per command, imported when it is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from basis_rl import __version__, resources
from basis_rl.names import did_you_mean, require_extra
from basis_rl.recipe.words import peek, read_mapping
from basis_rl.run.terminal import guarded_output, stop_signals

COMMANDS = {
    "quickstart": "train a small model on this CPU, from nothing, in a few minutes",
    "init": "write a commented recipe to start from, with your own model and data",
    "train": "train a model from a recipe",
    "serve": "start a vLLM server that training can generate with",
    "values": "build the value table that BASIS needs, by sampling the reference model",
    "compare": "compare runs at the same number of rollouts: curves, final table, one HTML file",
    "rollouts": "show rollouts of a run: prompt, answer, reward and advantage, as text or as a page",
    "sweep": "train a recipe with several baselines and seeds, and compare them",
    "clusters": "build the prompt codebook that BV-Blend needs, with a sentence encoder and K-means",
    "eval": "evaluate a model on benchmarks or your own data: avg@k, pass@k, maj@k, every rollout kept",
    "push": "push a run's folder to the Hub, for example after an evaluation or a failed push",
    "check": "check a recipe before you spend anything on it, or a part of your own (module:name)",
}
# Commands that several ranks would each run whole, and what to do for several GPUs.
_ONE_PROCESS = {
    "clusters": "",
    "eval": " For several GPUs: --backend vllm --vllm_args='--data-parallel-size N'.",
    "values": " For several GPUs start one for each, with --values_shard 0/8, 1/8, ...; or sample from vLLM servers.",
}
# Exit codes other than 0 and 2 (a message about a mistake in the input); the numbers are those of sysexits.h.
PEER = 68
LOST = 69
FAILED = 70
STOPPED = 75
USAGE = """usage: basis-rl COMMAND RECIPE.yaml [--key value ...]

commands:
{commands}

A recipe is YAML, and the command line overrides its keys: `--learning_rate 1e-6`,
`--baseline_kwargs.weighting vop`. A recipe of `trl grpo` runs as it is.

For several processes:
  basis-rl train RECIPE.yaml --accelerate_config ddp --num_processes 4
is short for
  accelerate launch --config_file FILE --num_processes 4 -m basis_rl train RECIPE.yaml
and `basis-rl init --help` lists the configurations that come with the package.

SIGTERM, SIGUSR1, SIGHUP or a file STOP in output_dir end the training after the
current step with a checkpoint (exit code 75); --resume_from_checkpoint auto resumes.

`basis-rl COMMAND --help` explains a command and its keys, and --help-all adds
all keys of TRL and transformers. BASIS_RL_DEBUG=1 shows the traceback of an
error in a recipe."""


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 for a message about what was asked for."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    # Commands that save their state on Ctrl-C have caught it already.
    except KeyboardInterrupt:
        return fail(f"{arguments[0]} was interrupted (Ctrl-C).", STOPPED)
    # These are mistakes in the input, or a package that is missing: once a run has begun, it raises other errors.
    except (ValueError, OSError, ImportError) as error:
        return report(error)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())))
        return 0 if arguments else 2
    command, *rest = arguments
    if command in ("--version", "version"):
        print(f"basis-rl {__version__}")
        return 0
    if command not in COMMANDS:
        return fail(f"unknown command '{command}'.{did_you_mean(command, COMMANDS)} Commands: {', '.join(COMMANDS)}.")
    from basis_rl.cli.options import check_names, help_of

    if {"-h", "--help", "--help-all", "--help_all"}.intersection(rest):
        print(help_of(command, everything="--help-all" in rest or "--help_all" in rest))
        return 0
    if command in _ONE_PROCESS and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return fail(f"{command} runs in one process: start it without accelerate launch.{_ONE_PROCESS[command]}")
    if command == "train" and "accelerate_config" in peek(rest, ["accelerate_config"])[0]:
        launch_training(rest)
    check_names(command, rest)
    resources.offer_examples(also_over_others=command == "quickstart")
    code: int = importlib.import_module(f"basis_rl.cli.{command}").main(rest)
    return code


def fail(message: object, code: int = 2) -> int:
    """Print one message, once per machine, and return the exit code. For a lost rank, every rank that is left prints
    it."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or code == PEER:
        print(f"basis-rl: error: {message}", file=sys.stderr)
    return code


def report(error: Exception) -> int:
    """Print only the message of an error that the input caused; with BASIS_RL_DEBUG=1 raise it, for the traceback."""
    if os.environ.get("BASIS_RL_DEBUG"):
        raise error
    return fail(error)


def notes(sentences: Sequence[str]) -> None:
    """Print what was translated in a recipe, once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for sentence in sentences:
            print(f"basis-rl: note: {sentence}", file=sys.stderr)


def launch_training(argv: Sequence[str]) -> None:
    """Replace this process by ``accelerate launch``; returns only with an error.

    Raises:
        ValueError: see `launch_command`.
    """
    words = launch_command(argv)
    if signal.SIGHUP not in stop_signals():
        # torchrun would handle it all the same, and end the ranks: this is its --signals-to-handle.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    os.execv(words[0], words)


def launch_command(argv: Sequence[str]) -> list[str]:
    """The command line of ``accelerate launch`` that trains by `argv`, from which the launcher's own options are taken.

    Raises:
        ValueError: no such configuration, an option without its value, DeepSpeed is not installed, or this process was
            launched already.
    """
    from basis_rl.cli.options import LAUNCHER

    if "LOCAL_RANK" in os.environ:
        raise ValueError("--accelerate_config starts `accelerate launch` itself: leave one of the two out.")
    given, rest = peek(argv, ["accelerate_config", *LAUNCHER])
    for name, value in given.items():
        if value is True:
            raise ValueError(f"--{name} needs a value.")
    file = resources.accelerate_config(given.pop("accelerate_config"))
    if read_mapping(file, str(file)).get("distributed_type") == "DEEPSPEED":
        require_extra("deepspeed", f"--accelerate_config {file}")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    return [*launcher, *options, "-m", "basis_rl", "train", *rest]
