"""Several ranks of a run: processes by `accelerate launch`, or threads with accelerate's collectives among them.

``python -m tests.support.ranks MODULE:FUNCTION RESULT ARGUMENT ...`` is one rank of a launcher: see `rank`.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser

from basis_rl.__main__ import leave
from basis_rl.engine.server import free_port
from tests.support.machines import enter

# In the environment of `forked`: on which machine it runs (`tests.support.machines`), and which folders it has alone.
MACHINE, OWN_FOLDERS = "BASIS_RL_TEST_MACHINE", "BASIS_RL_TEST_OWN_FOLDERS"
ROOT = Path(__file__).resolve().parents[2]
CPU = "accelerate_configs/cpu.yaml"
# Forks of a process that has done the imports, which take longer than most of what is tested with them.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["basis_rl.trainer", "basis_rl.recipe.build", "basis_rl.cli.train", "peft"])


def launch(module: str, *arguments: Any, ranks: int = 2, config: str = CPU) -> subprocess.Popen[str]:
    """Start a module on so many ranks of this machine's CPU, with its output in one pipe."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config]
    launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
    return subprocess.Popen(
        [sys.executable, *(launcher if ranks > 1 else []), "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "CI": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output_of(process: subprocess.Popen[str], *, fails: bool = False) -> str:
    """What the ranks of `launch` printed to their end."""
    output, _ = process.communicate(timeout=900)
    assert (process.returncode != 0) == fails, output[-5000:]
    return output


def no_shared_memory() -> None:
    """Spare DeepSpeed a minute: it would compile an extension for shared memory between CPU ranks."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        patch("deepspeed.comm.torch.build_shm_op", return_value=None).start()


def rank(name: str, result: str, *arguments: Any) -> None:
    """Call ``module:function`` and save what it returns to `result`, with the number of this rank in place of {}."""
    # As in tests/conftest.py: the garbage collection and the plot take most of a short run's time.
    gc.freeze()
    patch("basis_rl.trainer.trainer.plot_training", lambda *args, **kwargs: None).start()
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)(*arguments)
    torch.save(found, result.format(os.environ.get("RANK", "0")))
    leave(0)


def _process(name: str, arguments: list[Any], environment: dict[str, str], log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if machine := os.environ.get(MACHINE):
        enter(machine, os.environ.get(OWN_FOLDERS, "").split())
    no_shared_memory()
    if ":" in name:
        rank(name, *arguments)
    sys.argv = [name, *map(str, arguments)]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def forked(log: Path, module: str, *arguments: Any, **more: str) -> multiprocessing.Process:
    """Start ``python -m module`` without its imports; its output is added to `log`, `more` to its environment."""
    process = _FORKS.Process(target=_process, args=(module, list(arguments), {**os.environ, **more}, log))
    process.start()
    return process


def environment(config: Path | str, ranks: int) -> dict[str, str]:
    """What `accelerate launch` gives each of its ranks, by its own code."""
    port, found = str(free_port()), {}
    words = ["--config_file", str(config), "--num_processes", str(ranks), "--main_process_port", port, "script.py"]
    with patch("torch.distributed.run.run", lambda args: found.update(os.environ)):
        launch_command(launch_command_parser().parse_args(words))
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}


def cpu_config(folder: Path, kind: str, ranks: int = 2) -> Path:
    """The accelerate config `kind` that we ship, for so many ranks of this CPU."""
    settings = yaml.safe_load((ROOT / "accelerate_configs" / f"{kind}.yaml").read_text())
    settings |= {"num_processes": ranks, "mixed_precision": "no"} | ({"use_cpu": True} if kind == "ddp" else {})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


class Launched:
    """A module on so many ranks, as `launch` does, but forked: `wait` is for the end, and that it is a good one."""

    def __init__(self, log: Path, module: str, *arguments: Any, ranks: int = 2, config: Path | str = CPU) -> None:
        shared = environment(ROOT / config, ranks) if ranks > 1 else {}
        self.log, self.processes = log, []
        for rank in map(str, range(ranks)):
            own = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            self.processes.append(forked(log, module, *arguments, **shared, **own))

    def wait(self, seconds: float = 900.0, *, fails: bool = False) -> None:
        running = {process.sentinel for process in self.processes}
        while running and not any(process.exitcode for process in self.processes):
            ended = multiprocessing.connection.wait(running, seconds)
            running -= set(ended)
            if not ended:
                break
        for process in self.processes:
            process.kill()
            process.join()
        assert any(process.exitcode for process in self.processes) == fails, self.output()

    def output(self) -> str:
        return self.log.read_text()[-5000:]


class Called(Launched):
    """A function of a module, ``module:function``, on so many ranks; `found` is what it has returned on each."""

    def __init__(self, folder: Path, name: str, *arguments: Any, ranks: int = 2, kind: str = "cpu") -> None:
        folder.mkdir(exist_ok=True)
        self.result = str(folder / "rank{}.pt")
        config = cpu_config(folder, kind, ranks)
        super().__init__(folder / "log", name, self.result, *arguments, ranks=ranks, config=config)

    def found(self, seconds: float = 900.0) -> list[Any]:
        self.wait(seconds)
        return [torch.load(self.result.format(rank), weights_only=False) for rank in range(len(self.processes))]


class Ranks:
    """`run(work)` calls ``work(rank)`` on each; `accelerator(rank)` is what `work` may hand to the code under test."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.barrier = threading.Barrier(number, timeout=30)
        self.slots: list[Any] = [None] * number
        self.here = threading.local()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank returned or raised, in order."""

        def on(rank: int) -> Any:
            self.here.rank = rank
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.number) as threads:
            return list(threads.map(on, range(self.number)))

    def exchange(self, value: Any) -> list[Any]:
        self.slots[self.here.rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def gather_object(self, rows: list[Any]) -> list[Any]:
        return [row for each in self.exchange(rows) for row in each]

    def broadcast_object_list(self, holder: list[Any], from_process: int = 0) -> None:
        holder[:] = self.exchange(list(holder))[from_process]

    def accelerator(self, rank: int) -> Any:
        return SimpleNamespace(
            process_index=rank,
            num_processes=self.number,
            is_main_process=rank == 0,
            device=torch.device("cpu"),
            gather=lambda tensor: torch.cat(self.exchange(tensor)),
            reduce=lambda tensor, reduction: torch.stack(self.exchange(tensor)).sum(0),
        )


if __name__ == "__main__":
    no_shared_memory()
    rank(*sys.argv[1:])
