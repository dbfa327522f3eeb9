"""Where the time of a step goes, by length, and what baselines add to a step with `none`. Seconds are medians.

In whole steps, rollouts are given, not sampled, so that generation does not hide what the baselines add.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from basis_rl.baselines import BASELINES
from basis_rl.functional.energy import logit_gradient_energy
from benchmarks.advantage_cost import NEEDS_A_MODEL, baselines, batch, naive_energies
from benchmarks.gpu.runs import LARGE, SMALL, TINY, build_trainer, free, model_on, now, train
from benchmarks.gpu.stage import Findings
from benchmarks.trainers import TRL, StepClock, tokenizer


@dataclass(frozen=True)
class Scale:
    """Size of the stage.

    These are the lengths of a rollout, rows of a forward pass, generated tokens and repetitions; and, for whole steps,
    the tokens of a rollout and the number of rollouts.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    rows: int = 4
    generated: int = 64
    rounds: int = 3
    step_tokens: int = 1024
    rollouts: int = 16


ENOUGH = 60.0  # seconds after which no further step begins
QUICK = Scale(lengths=(8, 16), rows=2, generated=4, rounds=1, step_tokens=8, rollouts=8)


def timed(found: Findings, work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median seconds of `rounds` calls after a warm-up, and the peak of the bytes beyond what was allocated before."""
    seconds, peak = [], 0
    for round_ in range(rounds + 1):
        if found.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = now(found)
        try:
            work()
        except torch.OutOfMemoryError:
            free()
            return {"out_of_memory": True}
        if round_:
            seconds.append(now(found) - began)
        if found.cuda:
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


def parts(found: Findings, scale: Scale) -> None:
    """Time the parts of a step with the larger model in bfloat16, by length, with tokens per second."""
    model: Any = model_on(found.device, LARGE if found.cuda else TINY, tokenizer(), torch.bfloat16)
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
    for length in scale.lengths:
        ids = torch.randint(3, model.config.vocab_size, (scale.rows, length), device=found.device)
        works: dict[str, Callable[[], Any]] = {
            "score": scorer(model, ids, energies=False),
            "score with energies": scorer(model, ids, energies=True),
            "energies by a softmax": partial(naive, ids),
            "forward and backward": partial(update, ids, False),
            "forward and backward, checkpointed": partial(update, ids, True),
            "optimizer": optimizer.step,
        }
        rows = {name: timed(found, work, scale.rounds) for name, work in works.items()}
        for entry in rows.values():
            if "seconds" in entry:
                entry["tokens_per_second"] = ids.numel() / entry["seconds"]
        found.figure(f"parts, {length} tokens", rows)
        optimizer.zero_grad()
        ratio = rows["score with energies"].get("seconds", 0) / rows["score"].get("seconds", 1)
        found.figure(f"energies add to a scoring pass, {length} tokens", f"{ratio - 1:+.1%}")
    found.check("the longest passes fit in memory", "out_of_memory" not in str(found.figures))


def generation(found: Findings, scale: Scale) -> None:
    """Measure tokens per second of transformers' generation with several rows at a time."""
    model: Any = model_on(found.device, LARGE if found.cuda else TINY, tokenizer(), torch.bfloat16).eval()
    for rows in (scale.rows, 16 * scale.rows):
        ids = torch.randint(3, model.config.vocab_size, (rows, 16), device=found.device)
        settings = {"min_new_tokens": scale.generated, "max_new_tokens": scale.generated, "do_sample": True}
        work = partial(
            model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), disable_compile=True, **settings
        )
        entry = timed(found, work, 1)
        if "seconds" in entry:
            entry["tokens_per_second"] = rows * scale.generated / entry["seconds"]
        found.figure(f"generation, {rows} rows", entry)


def advantages(found: Findings, scale: Scale) -> None:
    """Time each baseline's advantages for a batch on the host, with the copies from and to the device."""
    for length in scale.lengths[:: max(1, len(scale.lengths) - 1)]:
        rows = batch(4 * scale.rollouts, length)
        on_device = [getattr(rows, name).to(found.device) for name in ("action_mask", "energies")]

        def work(baseline: Any, rows: Any = rows, on_device: list[Tensor] = on_device) -> Tensor:
            for tensor in on_device:
                tensor.cpu()
            return baseline.advantages(rows).values.to(found.device)

        made = baselines(scale.rollouts)
        seconds = {name: timed(found, partial(work, each), scale.rounds).get("seconds") for name, each in made.items()}
        found.figure(f"advantages, {4 * scale.rollouts} rollouts of {length} tokens: seconds", seconds)


def whole_step(found: Findings, scale: Scale, side: str) -> float:
    """Seconds of a step: the faster one of the second and the third of a run."""
    model = model_on(found.device, SMALL if found.cuda else TINY, tokenizer())
    steps, clock = 3, StepClock(lambda: now(found))
    trainer = build_trainer(
        side, model, found.folder / "steps", found.device, given=True, max_steps=steps + 1, num_generations=4,
        per_device_train_batch_size=scale.rollouts // 2, max_completion_length=scale.step_tokens,
    )  # fmt: skip
    trainer.add_callback(clock)
    train(found, trainer)
    del trainer, model
    free()
    return min(end - begin for begin, end in zip(clock.began[1:], clock.began[2:], strict=False))


def steps(found: Findings, scale: Scale) -> None:
    """Time whole steps of TRL's trainer and of ours with each baseline, in two rounds or until `ENOUGH` has passed."""
    sides = [TRL, "none", "grpo", "basis", "otb", "ppo"]
    if found.cuda:
        sides += [name for name in BASELINES if name not in {*sides, *NEEDS_A_MODEL}]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    began = now(found)
    for _ in range(2 if found.cuda else 1):
        for side in sides:
            if now(found) - began > ENOUGH:
                break
            seconds[side].append(whole_step(found, scale, side))
            least = {name: min(each) for name, each in seconds.items() if each}
            found.figure("steps: seconds", least)
    added = {side: f"{least[side] / least['none'] - 1:+.1%}" for side in least}
    found.figure("steps: added to `none`", added)
    per_step = scale.rollouts * scale.step_tokens
    found.figure("steps: tokens per second", {side: per_step / value for side, value in least.items()})


def run(found: Findings) -> None:
    """Run all parts; an error in one does not stop the others."""
    scale = Scale() if found.cuda else QUICK
    for part in (parts, steps, generation, advantages):
        with found.part(part.__name__):
            part(found, scale)
        free()
