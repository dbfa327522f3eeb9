"""What do advantages and energies cost, and how does the cost grow?

    python -m benchmarks.advantage_cost [--parts all basis] [--quick]

- ``all``: each registered baseline on batches of 512 to 65,536 rollouts of 64 tokens, eight per prompt, on one core.
  Sizes and baselines alternate; a figure is the median of five rounds. Energies for a vocabulary of 151,936: TRL's
  fused head, which our trainer uses, against a softmax of all logits, alternating. The system's allocator maps large
  arrays again at each call, which costs time for every page. Therefore the baselines are also measured in a process
  whose allocator keeps its memory, which shows how their own cost grows.
- ``basis``: BASIS with one rollout per prompt, for batches of 512, 4,096 and 65,536 rollouts, alternating, with enough
  rounds for a spread.

Bytes are the peak that torch had allocated, according to its profiler, beyond what was allocated before.

Results: ``benchmarks/results/advantage_cost.json`` (``all``) and ``basis_speed.json`` (``basis``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from basis_rl.baselines import BASELINES, Baseline, build_baseline
from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.types import RolloutBatch
from basis_rl.values import ValueTable
from benchmarks.common import one_thread, parser_of, peak_bytes, save
from benchmarks.trainers import random_model

SIZES, TOKENS, GROUP, ROUNDS = (512, 2_048, 8_192, 65_536), 64, 8, 5
VOCABULARY = 151_936
BASIS_ROUNDS = {512: 61, 4096: 21, 65_536: 7}  # by number of rollouts
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}  # bytes


def growth_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The best-fitting k of ``seconds = c sizes^k``: the slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def alternating(works: Mapping[str, Callable[[], Any]], rounds: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each of `works`, called in turn `rounds` times, by default after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(-warm_up, rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def batch(n: int, tokens: int, group: int = GROUP) -> RolloutBatch:
    """``n`` rollouts of 1 to `tokens` tokens, with all fields that any baseline may need."""
    generator = torch.Generator().manual_seed(n)
    groups = torch.arange(n) // group
    mask = torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (n, 1), generator=generator)
    rewards = torch.randint(0, 2, (n,), generator=generator).float()
    return RolloutBatch(
        rewards=rewards,
        reward_parts=rewards[:, None],
        reward_weights=torch.ones(1),
        group_ids=groups,
        prompt_ids=[str(i) for i in groups.tolist()],
        action_mask=mask,
        energies=torch.rand((n, tokens), generator=generator) * mask,
        entropies=torch.rand((n, tokens), generator=generator) * mask,
        hidden_states=torch.randn((n, 2, 64), generator=generator),
        rollout_weights=torch.ones((n, tokens)) * mask,
        greedy_rewards=torch.randint(0, 2, (n // group,), generator=generator).float()[groups],
        prompt_texts=[f"What is {i}?" for i in groups.tolist()],
    )


def baselines(prompts: int) -> dict[str, Baseline]:
    """Every registered baseline that needs no model of its own, with tables for `prompts` prompts."""
    names = [str(i) for i in range(prompts)]
    table = ValueTable.from_rewards({name: [1.0] * (i % 33) + [0.0] * (32 - i % 33) for i, name in enumerate(names)})
    given: dict[str, dict[str, Any]] = {
        "basis": {"values": table},
        "basis_history": {"values": table},
        "a_star_po": {"values": table},
        "bv_blend": {"clusters": {name: i % 32 for i, name in enumerate(names)}},
    }
    return {name: build_baseline(name, **given.get(name, {})) for name in BASELINES if name not in NEEDS_A_MODEL}


NEEDS_A_MODEL = {"ppo", "sao"}  # its critic is part of the step, not of the advantages


def measure_baselines(sizes: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    """For each baseline, by size: median of the seconds, and bytes; and the exponent of the growth."""
    found: dict[str, dict[str, Any]] = {}
    works: dict[str, Callable[[], Any]] = {}
    for n in sizes:
        rows = batch(n, TOKENS)
        for name, baseline in baselines(n // GROUP).items():
            works[f"{name} {n}"] = partial(baseline.advantages, rows)
    seconds = alternating(works, rounds)
    for key, work in works.items():
        name, size = key.split()
        entry = found.setdefault(name, {"median": {}, "peak_bytes": {}})
        entry["median"][size] = median(seconds[key])
        entry["peak_bytes"][size] = peak_bytes(work)
    for entry in found.values():
        entry["exponent"] = growth_exponent(sizes, list(entry["median"].values()))
        half = len(sizes) // 2
        entry["exponent_upper_half"] = growth_exponent(sizes[half:], list(entry["median"].values())[half:])
    return found


def keeping_memory(sizes: Sequence[int], rounds: int) -> dict[str, dict[str, Any]]:
    """`measure_baselines` in a process whose allocator (glibc) returns no memory to the system."""
    with patch.dict(os.environ, KEEPING), ProcessPoolExecutor(1, get_context("spawn"), one_thread) as process:
        return process.submit(measure_baselines, sizes, rounds).result()


def naive_energies(model: Qwen3ForCausalLM, hidden: Tensor, tokens: Tensor) -> Tensor:
    """``w = 1 - 2 pi(y) + sum_v pi(v)^2`` by a softmax of all logits."""
    probabilities = (hidden @ model.lm_head.weight.T).float().softmax(dim=-1)
    chosen = probabilities.gather(-1, tokens[..., None]).squeeze(-1)
    return 1 - 2 * chosen + (probabilities**2).sum(dim=-1)


def measure_energies(rows: int, length: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """Time and bytes of a scoring pass with energies from the fused head, and from a softmax of all logits."""
    model = random_model(vocabulary, 64, 1, 4, inner=2).eval()
    ids = torch.randint(0, vocabulary, (rows, length))
    targets = torch.randint(0, vocabulary, (rows, length))

    @torch.no_grad()
    def naive() -> Tensor:
        return naive_energies(model, model.model(ids).last_hidden_state, targets)

    expected = naive()
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy", "log_sum_sq_probs"))

    @torch.no_grad()
    def fused() -> Tensor:
        output: Any = model(input_ids=ids, shift_labels=targets, fused_lm_head=True)
        return logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp())

    works = {"fused": fused, "naive": naive}
    seconds = alternating(works, rounds)
    ratios = [a / b for a, b in zip(seconds["fused"], seconds["naive"], strict=True)]
    return {
        "tokens": rows * length,
        "vocabulary": vocabulary,
        "logits_bytes": 4 * rows * length * vocabulary,
        "largest_difference": float((fused() - expected).abs().max()),
        "seconds": seconds,
        "median": {name: median(times) for name, times in seconds.items()},
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        "peak_bytes": {name: peak_bytes(work) for name, work in works.items()},
    }


def measure_basis(rounds: dict[int, int]) -> dict[str, dict[str, Any]]:
    """Seconds of BASIS with one rollout per prompt, their median and 10 and 90 % quantiles, and bytes.

    `rounds` has the number of rounds for each number of rollouts.
    """
    works = {str(n): partial(baselines(n)["basis"].advantages, batch(n, 1, group=1)) for n in rounds}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(max(rounds.values())):
        due = {name: work for name, work in works.items() if round_ < rounds[int(name)]}
        for name, times in alternating(due, 1, warm_up=round_ == 0).items():
            seconds[name] += times
    found: dict[str, dict[str, Any]] = {}
    for name, times in seconds.items():
        ordered = sorted(times)
        spread = [ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]]
        found[name] = {"seconds": times, "median": median(times), "spread": spread}
        found[name]["peak_bytes"] = peak_bytes(works[name])
    return found


def every_baseline(quick: bool) -> dict[str, Any]:
    """Run and print the part ``all``."""
    sizes = (64, 128, 256) if quick else SIZES
    rounds = 1 if quick else ROUNDS
    found, keeping = measure_baselines(sizes, rounds), keeping_memory(sizes, rounds)
    for name, entry in found.items():
        times = "  ".join(f"{1e3 * t:9.2f} ms" for t in entry["median"].values())
        largest, kept = str(sizes[-1]), keeping[name]
        own = f"memory kept: {1e3 * kept['median'][largest]:.2f} ms, N^{kept['exponent_upper_half']:.2f}"
        peak, growth = entry["peak_bytes"][largest] / 1e6, entry["exponent_upper_half"]
        print(f"{name:22} {times}  {peak:8.1f} MB  N^{growth:.2f}  {own}")
    sides = measure_energies(2, 8, 1_000, 1) if quick else measure_energies(8, 256, VOCABULARY, ROUNDS)
    for side in ("fused", "naive"):
        print(f"energies, {side}: {sides['median'][side]:.3f} s, {sides['peak_bytes'][side] / 1e6:.1f} MB")
    print(f"fused / naive: {sides['ratio']['median']:.2f}; all logits: {sides['logits_bytes'] / 1e6:.0f} MB")
    results = {"sizes": list(sizes), "tokens": TOKENS, "group": GROUP, "baselines": found, "energies": sides}
    return {**results, "baselines, memory kept": keeping}


def basis(quick: bool) -> dict[str, Any]:
    """Run and print the part ``basis``."""
    found = measure_basis({64: 3, 128: 2} if quick else BASIS_ROUNDS)
    base = next(iter(found.values()))["median"]
    for n, entry in found.items():
        low, high = (1e3 * t for t in entry["spread"])
        print(
            f"{n:>6} rollouts x 230 betas: {1e3 * entry['median']:8.2f} ms (10 to 90 %: {low:.2f} to {high:.2f}), "
            f"{entry['median'] / base:6.1f} x the first, peak {entry['peak_bytes'] / int(n):.0f} bytes per rollout"
        )
    return {"results": found}


PARTS = {"all": ("advantage_cost", every_baseline), "basis": ("basis_speed", basis)}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the benchmark; returns its results by part."""
    parser = parser_of(__doc__, PARTS)
    options = parser.parse_args(argv)
    one_thread()
    results = {}
    for part in options.parts:
        name, measure = PARTS[part]
        results[part] = measure(options.quick)
        if not options.quick:
            save(name, results[part])
    return results


if __name__ == "__main__":
    main()
