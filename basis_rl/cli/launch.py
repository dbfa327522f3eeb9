"""``basis-rl train RECIPE --accelerate_config zero3``: the same command, started by ``accelerate launch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import yaml

from basis_rl import resources
from basis_rl.names import require_extra
from basis_rl.recipe.words import peek

OPTION = "accelerate_config"
# Options that are handed to `accelerate launch`; no recipe has keys of these names.
_LAUNCHER = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def is_asked(argv: Sequence[str]) -> bool:
    """Whether the command line names a configuration of accelerate."""
    return OPTION in peek(argv, [OPTION])[0]


def launch(argv: Sequence[str]) -> None:
    """Replace this process by ``accelerate launch``; returns only with an error.

    Raises:
        ValueError: see `command`.
    """
    words = command(argv)
    os.execv(words[0], words)


def command(argv: Sequence[str]) -> list[str]:
    """The command line of ``accelerate launch`` that trains by `argv`, from which the launcher's own options are taken.

    Raises:
        ValueError: no such configuration, an option without its value, DeepSpeed is not installed, or this process was
            launched already.
    """
    if "LOCAL_RANK" in os.environ:
        raise ValueError(f"--{OPTION} starts `accelerate launch` itself: leave one of the two out.")
    given, rest = peek(argv, [OPTION, *_LAUNCHER])
    for name, value in given.items():
        if value is True:
            raise ValueError(f"--{name} needs a value.")
    file = resources.accelerate_config(given.pop(OPTION))
    settings = yaml.safe_load(file.read_text())
    if isinstance(settings, dict) and settings.get("distributed_type") == "DEEPSPEED":
        require_extra("deepspeed", f"--{OPTION} {file}")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    return [*launcher, *options, "-m", "basis_rl", "train", *rest]
