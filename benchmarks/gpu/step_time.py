"""Where the time of a step goes, by length: passes, generation, advantages. Seconds are medians."""

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

from basis_rl.functional.energy import logit_gradient_energy
from benchmarks.advantage_cost import baselines, batch, naive_energies
from benchmarks.gpu.runs import LARGE, TINY, free, model_on, now
from benchmarks.gpu.stage import Findings
from benchmarks.trainers import tokenizer


@dataclass(frozen=True)
class Scale:
    """Size of the stage.

    Attributes:
        lengths: tokens of a rollout.
        rows: rows of a forward pass.
        rounds: repetitions.
        generated: for each generation its rows, and the tokens of its prompts and of its rollouts.
        rollouts: rollouts whose advantages are computed.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    rows: int = 4
    rounds: int = 3
    generated: tuple[tuple[int, int, int], ...] = ((4, 16, 64), (64, 16, 64), (64, 512, 1024))
    rollouts: int = 64


QUICK = Scale(lengths=(8, 16), rows=2, rounds=1, generated=((2, 4, 4), (8, 8, 8)), rollouts=32)
SLOWEST = "energies by a softmax"  # needs several times the memory of all logits; it may fail where the rest does not


def timed(found: Findings, work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Median seconds of `rounds` calls after a warm-up, and the peak of the bytes beyond what was allocated before.

    With 0 rounds it is the warm-up's seconds.
    """
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
        if round_ or not rounds:
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


def passes(found: Findings, scale: Scale, length: int) -> None:
    """Time the parts of a step with the larger model in bfloat16, with tokens per second."""
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
    ids = torch.randint(3, model.config.vocab_size, (scale.rows, length), device=found.device)
    works: dict[str, Callable[[], Any]] = {
        "score": scorer(model, ids, energies=False),
        "score with energies": scorer(model, ids, energies=True),
        "forward and backward": partial(update, ids, False),
        "forward and backward, checkpointed": partial(update, ids, True),
        "optimizer": optimizer.step,
        SLOWEST: partial(naive, ids),
    }
    rows = {name: timed(found, work, scale.rounds) for name, work in works.items()}
    for entry in rows.values():
        if "seconds" in entry:
            entry["tokens_per_second"] = ids.numel() / entry["seconds"]
    found.figure(f"parts, {length} tokens", rows)
    failed = [name for name, entry in rows.items() if "seconds" not in entry and name != SLOWEST]
    found.check(f"{length} tokens: every pass fits in memory", not failed, ", ".join(failed))
    if not failed:
        ratio = rows["score with energies"]["seconds"] / rows["score"]["seconds"]
        found.figure(f"energies add to a scoring pass, {length} tokens", f"{ratio - 1:+.1%}")


def generation(found: Findings, scale: Scale) -> None:
    """Measure tokens per second of transformers' generation; the longest one once, without a warm-up of its own."""
    model: Any = model_on(found.device, LARGE if found.cuda else TINY, tokenizer(), torch.bfloat16).eval()
    for rows, prompt, tokens in scale.generated:
        ids = torch.randint(3, model.config.vocab_size, (rows, prompt), device=found.device)
        settings = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": True}
        work = partial(
            model.generate, input_ids=ids, attention_mask=torch.ones_like(ids), disable_compile=True, **settings
        )
        entry = timed(found, work, 1 if tokens < 1024 else 0)
        if "seconds" in entry:
            entry["tokens_per_second"] = rows * tokens / entry["seconds"]
        found.figure(f"generation, {rows} rows of {prompt} + {tokens} tokens", entry)
        found.check(f"generation, {rows} rows of {prompt} + {tokens} tokens, was measured", "seconds" in entry)


def advantages(found: Findings, scale: Scale) -> None:
    """Time each baseline's advantages for a batch on the host, with the copies from and to the device."""
    for length in scale.lengths[:: max(1, len(scale.lengths) - 1)]:
        rows = batch(scale.rollouts, length)
        on_device = [getattr(rows, name).to(found.device) for name in ("action_mask", "energies")]

        def work(baseline: Any, rows: Any = rows, on_device: list[Tensor] = on_device) -> Tensor:
            for tensor in on_device:
                tensor.cpu()
            return baseline.advantages(rows).values.to(found.device)

        made = baselines(scale.rollouts // 4)
        seconds = {name: timed(found, partial(work, each), scale.rounds).get("seconds") for name, each in made.items()}
        found.figure(f"advantages, {scale.rollouts} rollouts of {length} tokens: seconds", seconds)


def run(found: Findings) -> None:
    """Run all parts; an error in one does not stop the others."""
    scale = Scale() if found.cuda else QUICK
    for length in scale.lengths:
        found.attempt(f"passes, {length} tokens", passes, found, scale, length)
        free()
    for part in (advantages, generation):
        found.attempt(part.__name__, part, found, scale)
        free()
