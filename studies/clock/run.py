"""Run by `studies.clock.study`: one training in a process of its own, which can be stopped and called again."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.baselines import build_baseline
from basis_rl.engine.generation import checked_generation
from basis_rl.engine.local import Sampling, prompt_tokens, sample
from basis_rl.engine.weights import SyncSettings
from basis_rl.run.artefacts import write_whole
from basis_rl.samplers import build_sampler
from basis_rl.trainer.head import compact_head
from basis_rl.trainer.random_numbers import random_numbers_kept
from basis_rl.values.build import TablePlan, build_table
from basis_rl.values.sources import ModelSource
from benchmarks.trainers import quiet
from examples.smollm2.run import greedy_answers
from studies.clock.tasks import TASKS, Task

GROUPS = {"num_generations": 8}
FRONTIER = {"prompt_sampler": "frontier", "prompt_sampler_kwargs": {"hard": 2, "easy": 1}}
# What was the default when these rows were measured.
VALUE = {"target": "value"}
LCB = {"baseline_kwargs": {"lcb": 1, **VALUE}}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
# A row of the comparison: `GRPOTrainer` where there is no baseline, else ours with it.
ROWS: dict[str, dict[str, Any]] = {
    "TRL": {**GROUPS},
    "TRL, head fixed": {**GROUPS},
    "grpo": {"baseline": "grpo", **GROUPS},
    "grpo, frontier": {"baseline": "grpo", **GROUPS, **FRONTIER},
    "none": {"baseline": "none"},
    "basis": {"baseline": "basis"},
    "basis_history": {"baseline": "basis_history", **LCB},
    "basis_history, frontier": {"baseline": "basis_history", **LCB, **FRONTIER},
    "basis_history with text, frontier": {
        "baseline": "basis_history",
        "baseline_kwargs": {"lcb": 1, "prior": "text", **VALUE},
        "prompt_sampler": "frontier",
        "prompt_sampler_kwargs": {"hard": 2, "easy": 1, "floor": 0.005},
    },
    "basis_history without lcb, frontier": {"baseline": "basis_history", "baseline_kwargs": VALUE, **FRONTIER},
    "spo, frontier": {"baseline": "spo", **FRONTIER},
    "TRL, vLLM": {**GROUPS, **VLLM},
    "basis_history, frontier, vLLM": {"baseline": "basis_history", **LCB, **FRONTIER, **VLLM},
    "grpo, groups of 2": {"baseline": "grpo", "num_generations": 2},
    "grpo, groups of 4": {"baseline": "grpo", "num_generations": 4},
    "none, groups of 8": {"baseline": "none", **GROUPS},
    "batch_mean": {"baseline": "batch_mean"},
    "least variance": {"baseline": "basis_history"},
    # What README recommends.
    "least variance, frontier": {
        "baseline": "basis_history",
        "baseline_kwargs": {"prior": "text"},
        "prompt_sampler": "frontier",
    },
}
ROLLOUTS = 64
MEASURED_AT_A_TIME = 200
SAMPLES = 8
# Of each problem, by the model before training, in the value table of the row `basis`.
TABLE_ROLLOUTS = 8


class Clock(TrainerCallback):
    """Measures accuracy before training and every `every` steps from step `start` on, with the time that training has
    taken until then.

    The clock stands still during measurements and saves. Points go to `file` at once. A resumed training goes on from
    the last point that its checkpoint has.
    """

    def __init__(self, score: Callable[[], dict[str, float]], every: int, file: Path, start: int = 0) -> None:
        self.score, self.every, self.file, self.start = score, every, file, start
        self.points: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
        self.spent = (0.0, 0.0)
        self.began = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _stop(self) -> None:
        wall, cpu = self._now()
        self.spent = (self.spent[0] + wall - self.began[0], self.spent[1] + cpu - self.began[1])

    def _measure(self, step: int) -> None:
        self.points.append({"step": step, "wall": self.spent[0], "cpu": self.spent[1], "accuracy": self.score()})
        write_whole(self.file, json.dumps(self.points))
        print(f"step {step}, {self.spent[0] / 60:.1f} minutes: {self.points[-1]['accuracy']}", flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.points = [point for point in self.points if point["step"] <= state.global_step]
        if self.points:
            self.spent = (self.points[-1]["wall"], self.points[-1]["cpu"])
        else:
            self._measure(0)
        self.began = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step >= self.start:
            self._stop()
            self._measure(state.global_step)
            self.began = self._now()
        # A checkpoint is written between this event and that of the save.
        if control.should_save:
            self._stop()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.began = self._now()


@contextlib.contextmanager
def side(row: str, bf16: bool) -> Iterator[None]:
    """TRL's trainer with our head, or with our weight transfer: its own leaves a stale head in vLLM's CPU build."""
    tolerance = 1.0 if bf16 else 1e-3
    if row == "TRL, head fixed":
        with compact_head(torch.device("cpu")):
            yield
    elif row == "TRL, vLLM":
        with checked_generation(SyncSettings("folder", None, tolerance, 600.0, 60.0, False)):
            yield
    else:
        yield


def value_table(model: str, task: Task, bf16: bool, folder: Path) -> Path:
    """The value table of the row ``basis``, with its cost in ``table_cost.json``, which the clock does not count."""
    cost = folder / "table_cost.json"
    if not cost.is_file():
        wall = time.perf_counter()
        cpu = time.process_time()
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if bf16 else torch.float32)
        source = ModelSource(reference, AutoTokenizer.from_pretrained(model))
        sampling = Sampling(task.tokens)
        plan = TablePlan(dataset=task.train, reward_funcs=[task.reward], sampling=sampling, num_rollouts=TABLE_ROLLOUTS)
        table = build_table(source, plan, folder / "table_parts")
        assert table is not None, "one process makes all of it"
        table.save(folder / "table")
        write_whole(cost, json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}))
    return folder / "table"


def build(
    row: dict[str, Any], model: str, task: Task, settings: dict[str, Any], folder: Path, **given: Any
) -> GRPOTrainer:
    """The trainer of a row of `ROWS`: the same settings for all, and its own. `given` are arguments of the trainer."""
    own = dict(row)
    baseline = own.pop("baseline", None)
    objective = own.pop("objective", "dapo")
    sampler = {name: own.pop(name) for name in ("prompt_sampler", "prompt_sampler_kwargs") if name in own}
    parameters = own.pop("baseline_kwargs", {})
    if baseline == "basis":
        parameters = {"values": value_table(model, task, settings["bf16"], folder.parent)}
    common: dict[str, Any] = {
        "output_dir": str(folder), "temperature": 1.0, "max_completion_length": task.tokens, "num_generations": 1,
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5, "use_cpu": True, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False, "save_strategy": "steps",
        "save_total_limit": 1, "model_init_kwargs": {"dtype": "float32"}, **settings, **own,
    }  # fmt: skip
    given |= {"model": model, "reward_funcs": task.reward, "train_dataset": task.train}
    if baseline is None:
        return GRPOTrainer(args=GRPOConfig(loss_type="dapo", **common), **given)
    if sampler:
        given["prompt_sampler"] = build_sampler(sampler["prompt_sampler"], **sampler.get("prompt_sampler_kwargs", {}))
    given["baseline"] = build_baseline(baseline, **parameters)
    return BasisTrainer(args=BasisConfig(**common), objective=objective, **given)


def score(
    trainer: GRPOTrainer, task: Task, number_type: torch.dtype = torch.float32, sampled: int = 0
) -> dict[str, float]:
    """Greedy accuracy on the held-out rows, of all and of each kind, by the weights rounded to `number_type`.

    With `sampled`, also ``avg@8`` and ``pass@8``: eight rollouts at temperature 1 for each of so many rows.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if number_type != model.dtype:
        model = copy.deepcopy(model).to(number_type)
    prompts = [row["prompt"] for row in task.held_out]
    answers = greedy_answers(model, trainer.processing_class, prompts, task.tokens, MEASURED_AT_A_TIME)
    rewards = task.reward(answers, [row["solution"] for row in task.held_out])
    found = sampled_scores(model, trainer.processing_class, task, task.held_out[:sampled]) if sampled else {}
    model.train()
    by_kind = defaultdict(list)
    for row, reward in zip(task.held_out, rewards, strict=True):
        by_kind[row["kind"]].append(reward)
    greedy = {kind: sum(given) / len(given) for kind, given in {"all": rewards, **by_kind}.items()}
    return {name: round(value, 4) for name, value in {**greedy, **found}.items()}


def sampled_scores(model: Any, tokenizer: Any, task: Task, rows: list[dict[str, Any]]) -> dict[str, float]:
    """``avg@8`` and ``pass@8`` of `rows`. Training goes on with the random numbers that it would have without it."""
    prompts = [prompt_tokens(row["prompt"], tokenizer, {}) for row in rows]
    rewards = []
    with random_numbers_kept(torch.device("cpu"), seed=0):
        drawn = sample(
            model, tokenizer, prompts, Sampling(task.tokens), num_samples=SAMPLES, batch_size=MEASURED_AT_A_TIME
        )
        for index, answers in drawn:
            rewards.append(task.reward([each.text for each in answers], [rows[index]["solution"]] * SAMPLES))
    return {f"avg@{SAMPLES}": fmean(map(fmean, rewards)), f"pass@{SAMPLES}": fmean(map(max, rewards))}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, help="a JSON file with row, model, task, sizes and settings")
    plan = json.loads(parser.parse_args(argv).plan.read_text())
    torch.set_num_threads(plan["threads"])
    folder = Path(plan["folder"])
    task = TASKS[plan["task"]](plan["problems"], plan["held_out"], Path(plan["data"]))
    with side(plan["row"], plan["settings"]["bf16"]):
        trainer = build(ROWS[plan["row"]], plan["model"], task, plan["settings"], folder / "trainer")
        measured_in = torch.bfloat16 if plan.get("rounded") else torch.float32
        scored = partial(score, trainer, task, measured_in, plan.get("sampled", 0))
        clock = Clock(scored, plan["every"], folder / "points.json", plan.get("measured_from", 0))
        quiet(trainer).add_callback(clock)
        saved = any((folder / "trainer").glob("checkpoint-*"))
        trainer.train(resume_from_checkpoint=True if saved else None)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    means = {"rewards": [entry["reward"] for entry in logs]}
    means |= {"lengths": [entry["completions/mean_length"] for entry in logs]}
    means |= {"entropies": [entry["entropy"] for entry in logs]}
    done = trainer.state.global_step == plan["settings"]["max_steps"]
    if done:
        write_whole(folder / "logs.json", json.dumps(means))
    raise SystemExit(0 if done else 75)


if __name__ == "__main__":
    main()
