"""Run by `studies.clock.streams`: one training against a server, and afterwards what it has learnt."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from basis_rl.run.artefacts import write_whole
from benchmarks.trainers import quiet
from examples.tools.warm_start import encode
from studies.clock.run import build
from studies.clock.tasks import Task
from studies.clock.tooled import SlowCalculator, call, explained, tooled

# Sequences of a batch of the measurement.
BATCH = 24
LOGS = (
    "reward", "completions/mean_length", "completions/max_length", "tools/used", "time/step", "time/generation",
    "rollout/waited", "rollout/server_waited", "rollout/staleness", "rollout/staleness_max", "rollout/in_flight",
    "rollout/failed", "loss", "grad_norm",
)  # fmt: skip


class Weights(TrainerCallback):
    """Seconds since the training began at the end of each step, by the wall and of this process's processor, and the
    weights after every `every` steps.

    Nothing is measured in between: a stream would go on meanwhile, for nothing.
    """

    def __init__(self, model: Any, every: int) -> None:
        self.model, self.every = model, every
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, step: int) -> None:
        self.kept[step] = {name: each.detach().bfloat16() for name, each in self.model.named_parameters()}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.keep(0)
        self.began = time.perf_counter()
        self.cpu_began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wall.append(time.perf_counter() - self.began)
        self.cpu.append(time.process_time() - self.cpu_began)
        if self.every and state.global_step % self.every == 0:
            self.keep(state.global_step)


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, task: Task) -> dict[str, float]:
    """The probability that the model solves a held-out problem, of all and of each kind, without noise of sampling.

    It is that of the two ways which it has seen: to call the calculator and say what that said, if it is right, and to
    say the answer at once.
    """
    texts = []
    for number, row in enumerate(task.held_out):
        answer = {"role": "assistant", "content": row["solution"]}
        asked = call({**row, "prompt": row["prompt"][-1]["content"]})
        ways = [[answer], [*asked, answer]] if asked[-1]["content"] == row["solution"] else [[answer]]
        texts += [(number, *encode(tokenizer, [*row["prompt"], *way])) for way in ways]
    texts.sort(key=lambda text: len(text[1]))
    solved = [0.0] * len(task.held_out)
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        width = max(len(ids) for _, ids, _ in part)
        ids = torch.tensor([row + [0] * (width - len(row)) for _, row, _ in part])
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, _, row in part])
        at, places = torch.where(labels[:, 1:] != -100)
        # Only of what the model wrote: the vocabulary is most of the work.
        logits = model.lm_head(model.model(input_ids=ids).last_hidden_state[at, places]).float()
        losses = torch.zeros(len(part)).index_add(
            0, at, cross_entropy(logits, labels[at, places + 1], reduction="none")
        )
        for (number, _, _), loss in zip(part, losses.tolist(), strict=True):
            solved[number] += math.exp(-loss)
    by_kind = defaultdict(list)
    for row, share in zip(task.held_out, solved, strict=True):
        by_kind[row["kind"]].append(share)
    return {"all": fmean(solved)} | {kind: fmean(found) for kind, found in by_kind.items()}


def measured(model: Any, tokenizer: Any, task: Task, kept: dict[int, dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """`accuracy` with each of the weights, on all cores."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(os.cpu_count() or 1)
    model = model.bfloat16().eval()
    points = []
    for step, weights in kept.items():
        model.load_state_dict(weights, strict=False)
        points.append({"step": step, **accuracy(model, tokenizer, task)})
        print(points[-1], flush=True)
    return points


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="a JSON file with row, part, model, url, settings, every and median")
    file = parser.parse_args(argv).plan
    plan = json.loads(file.read_text())
    torch.set_num_threads(1)
    is_tools = plan["part"] == "tools"
    task = tooled(plan["held_out"]) if is_tools else explained()
    given = {"tools": [SlowCalculator(plan["median"])]} if is_tools else {}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": plan["url"], "save_strategy": "no"}
    settings = {**plan["settings"], **server}
    trainer = quiet(build(plan["row"], plan["model"], task, settings, file.parent / "trainer", **given))
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = Weights(model, plan["every"] if is_tools else 0)
    trainer.add_callback(weights)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    logs = {name: [entry[name] for entry in entries if name in entry] for name in LOGS}
    points = measured(model, trainer.processing_class, task, weights.kept) if is_tools else []
    found = {"wall": weights.wall, "cpu": weights.cpu, "points": points, "logs": logs}
    write_whole(file.with_name("found.json"), json.dumps(found))


if __name__ == "__main__":
    main()
