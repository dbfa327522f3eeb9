"""Several ranks of a run as threads of one process, with accelerate's collectives among them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch


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
