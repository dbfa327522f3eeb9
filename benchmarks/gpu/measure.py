"""Run by `python -m benchmarks.gpu`: measures one stage, and writes each figure to the file of results at once.

The arguments are the stage, the device, and the file. A part whose figure is in the file already is not measured again.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from basis_rl.baselines import BASELINES
from basis_rl.functional.energy import logit_gradient_energy
from benchmarks import selection_cost
from benchmarks.advantage_cost import baselines, batch, naive_energies
from benchmarks.common import write_json
from benchmarks.gpu.runs import LARGE, build_trainer, free, model_on, now
from benchmarks.trainers import TRL, StepClock


@dataclass(frozen=True)
class Scale:
    """Size of the measurements.

    Attributes:
        lengths: tokens of a rollout.
        rows: rows of a forward pass.
        rounds: repetitions.
        generated: for each generation its rows, and the tokens of its prompts and of its rollouts.
        rollouts: rollouts whose advantages are computed.
        steps: rollouts and tokens of whole steps of all baselines, and the same of some of them.
        step_rounds: repetitions of these.
        prompts: size of the dataset of which a batch of 512 prompts is drawn.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    rows: int = 4
    rounds: int = 3
    generated: tuple[tuple[int, int, int], ...] = ((4, 16, 64), (64, 16, 64), (64, 512, 1024))
    rollouts: int = 64
    steps: tuple[tuple[int, int], tuple[int, int]] = ((16, 1024), (8, 4096))
    step_rounds: int = 2
    prompts: int = 100_000


QUICK = Scale((8, 16), 2, 1, ((2, 4, 4), (8, 8, 8)), 32, ((8, 8), (8, 16)), 1, 1_000)
SOME = (TRL, "none", "grpo", "basis", "otb", "ppo")


class Figures:
    """The figures of one stage within the file of all results, which is written after each of them."""

    def __init__(self, stage: str, device: str, path: Path) -> None:
        self.device, self.path = device, path
        self.scale = QUICK if device == "cpu" else Scale()
        self.results = json.loads(path.read_text())
        self.found: dict[str, Any] = self.results["stages"][stage].setdefault("figures", {})

    def measure(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """The figure ``work(*args)``, or the one that the file has; an error becomes the figure, and is returned."""
        if name not in self.found or "error" in self.found[name]:
            try:
                self.put(name, work(*args))
            except Exception as error:  # the other parts are measured all the same
                traceback.print_exc()
                self.put(name, {"error": f"{type(error).__name__}: {error}"[-1000:]})
            free()
        return self.found[name]

    def put(self, name: str, figure: Any) -> None:
        """Record a figure: a dictionary of numbers or texts."""
        self.found[name] = figure
        print(f"{name}: {figure}", flush=True)
        write_json(self.path, self.results)


def timed(device: str, work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median seconds of `rounds` calls after a warm-up, and the peak of the bytes beyond what was allocated before.

    With 0 rounds these are the warm-up's.
    """
    seconds, peak = [], 0
    for round_ in range(rounds + 1):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = now(device)
        try:
            work()
        except torch.OutOfMemoryError:
            free()
            return {"out_of_memory": True}
        if round_ or not rounds:
            seconds.append(now(device) - began)
        if device == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return {"seconds": median(seconds), "peak_bytes": peak or None}


def scorer(model: Any, ids: Tensor, energies: bool) -> Callable[[], Tensor]:
    """A scoring pass over `ids` through the fused head, with energies or with TRL's own outputs only."""
    scored = copy.copy(model)
    outputs = ("log_probs", "entropy", *(("log_sum_sq_probs",) if energies else ()))
    add_fused_lm_head(scored, temperature=1.0, outputs=outputs)

    @torch.no_grad()
    def score() -> Tensor:
        output: Any = scored(input_ids=ids, shift_labels=ids, fused_lm_head=True)
        return logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()) if energies else output.log_probs

    return score


def passes(device: str, scale: Scale, length: int) -> dict[str, Any]:
    """The passes of a step with the larger model in bfloat16, with tokens per second.

    Energies by a softmax need several times the memory of all logits, and may not fit where the other passes do.

    Raises:
        RuntimeError: another pass does not fit in memory.
    """
    model = model_on(device, LARGE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    trained = copy.copy(model)
    add_fused_lm_head(trained, temperature=1.0, outputs=("log_probs", "entropy"))

    def update(ids: Tensor, checkpointing: bool) -> None:
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        output: Any = trained(input_ids=ids, shift_labels=ids, fused_lm_head=True, use_cache=False)
        (-output.log_probs.mean()).backward()

    @torch.no_grad()
    def naive(ids: Tensor) -> Tensor:
        return naive_energies(model, model.model(ids).last_hidden_state, ids)

    model.train()
    ids = torch.randint(3, model.config.vocab_size, (scale.rows, length), device=device)
    works: dict[str, Callable[[], Any]] = {
        "score": scorer(model, ids, energies=False),
        "score with energies": scorer(model, ids, energies=True),
        "forward and backward": partial(update, ids, False),
        "forward and backward, checkpointed": partial(update, ids, True),
        "optimizer": optimizer.step,
        "energies by a softmax": partial(naive, ids),
    }
    rows = {name: timed(device, work, scale.rounds) for name, work in works.items()}
    for entry in rows.values():
        if "seconds" in entry:
            entry["tokens_per_second"] = ids.numel() / entry["seconds"]
    if failed := [name for name, entry in rows.items() if "seconds" not in entry and name != "energies by a softmax"]:
        raise RuntimeError(f"out of memory: {', '.join(failed)}; {rows}")
    added = rows["score with energies"]["seconds"] / rows["score"]["seconds"] - 1
    return {**rows, "energies add to a scoring pass": f"{added:+.1%}"}


def generation(device: str, rows: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of transformers' generation; of 1,024 tokens and more once, without a warm-up.

    Raises:
        RuntimeError: it does not fit in memory.
    """
    model = model_on(device, LARGE, torch.bfloat16).eval()
    ids = torch.randint(3, model.config.vocab_size, (rows, prompt), device=device)
    settings = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": True, "disable_compile": True}
    work = partial(model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    entry = timed(device, work, 1 if tokens < 1024 else 0)
    if "seconds" not in entry:
        raise RuntimeError("out of memory")
    return {**entry, "tokens_per_second": rows * tokens / entry["seconds"]}


def advantages(device: str, scale: Scale, length: int) -> dict[str, Any]:
    """Seconds of each baseline's advantages for a batch on the host, with the copies from and to the device."""
    rows = batch(scale.rollouts, length)
    on_device = [getattr(rows, name).to(device) for name in ("action_mask", "energies")]

    def work(baseline: Any) -> Tensor:
        for tensor in on_device:
            tensor.cpu()
        return baseline.advantages(rows).values.to(device)

    made = baselines(scale.rollouts // 4)
    return {name: timed(device, partial(work, each), scale.rounds).get("seconds") for name, each in made.items()}


def whole_step(device: str, side: str, rollouts: int, tokens: int) -> dict[str, float]:
    """Seconds of a whole step on given rollouts: the faster one of the second and the third of a run."""
    clock = StepClock(lambda: now(device))
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(
            side, model_on(device), folder, device, given=True, max_steps=4,
            per_device_train_batch_size=rollouts // 2, max_completion_length=tokens,
        )  # fmt: skip
        trainer.add_callback(clock)
        trainer.train()
    return {"seconds": min(end - begin for begin, end in zip(clock.began[1:], clock.began[2:], strict=False))}


def time_of_a_step(figures: Figures) -> None:
    """Where the time of a step goes, by length."""
    scale, device = figures.scale, figures.device
    for length in scale.lengths:
        figures.measure(f"passes, {length} tokens", passes, device, scale, length)
    for length in (scale.lengths[0], scale.lengths[-1]):
        name = f"advantages, {scale.rollouts} rollouts of {length} tokens: seconds"
        figures.measure(name, advantages, device, scale, length)
    for rows, prompt, tokens in scale.generated:
        name = f"generation, {rows} rows of {prompt} + {tokens} tokens"
        figures.measure(name, generation, device, rows, prompt, tokens)


def selection(figures: Figures) -> None:
    """What the choice of a batch's prompts takes on the host of the GPU."""
    prompts = figures.scale.prompts
    name = f"a draw of 512 among {prompts:,} prompts: milliseconds"
    figures.measure(name, selection_cost.measure, prompts, (512, 1), 5)


def overhead(figures: Figures) -> None:
    """What each baseline adds to a whole step with `none`, and that to a step of TRL's trainer. Sides alternate."""
    every = [*SOME, *(name for name in BASELINES if name not in SOME)]
    for sides, (rollouts, tokens) in zip((every, SOME), figures.scale.steps, strict=True):
        seconds: dict[str, list[float]] = {}
        for round_ in range(figures.scale.step_rounds):
            for side in sides:
                name = f"step, {tokens} tokens, {side}, round {round_ + 1}"
                entry = figures.measure(name, whole_step, figures.device, side, rollouts, tokens)
                seconds.setdefault(side, []).extend([entry["seconds"]] if "seconds" in entry else [])
        least = {side: min(each) for side, each in seconds.items() if each}
        rate = {side: rollouts * tokens / value for side, value in least.items()}
        figures.put(f"steps, {tokens} tokens: tokens per second", rate)
        if none := least.get("none"):
            added = {side: f"{value / none - 1:+.1%}" for side, value in least.items()}
            figures.put(f"steps, {tokens} tokens: added to `none`", added)


MEASUREMENTS = {"time": time_of_a_step, "selection": selection, "overhead": overhead}


def main(stage: str, device: str, path: str) -> int:
    """Measure a stage; returns 1 if something could not be measured."""
    # With several GPUs, transformers would split each batch.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    figures = Figures(stage, device, Path(path))
    MEASUREMENTS[stage](figures)
    failed = [name for name, figure in figures.found.items() if "error" in figure]
    for name in failed:
        print(f"not measured: {name}: {figures.found[name]['error']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
