"""Several ranks of a run: processes by `accelerate launch`, or threads with accelerate's collectives among them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CPU = "accelerate_configs/cpu.yaml"


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
