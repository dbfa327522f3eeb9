"""Where does a step's time go on a GPU, and what do baselines and energies add?

    python -m benchmarks.gpu_step [--device cpu --quick]

A Qwen3 of 0.6B parameters with random weights, bfloat16, a vocabulary of 151,936, rollouts of 1,024 to 4,096 tokens;
one GPU. Sides alternate; a figure is the median of the rounds.

- ``parts``: generation of 32 tokens after 16 (transformers), the scoring pass without and with energies from the fused
  head, the energies by a softmax of all logits instead, loss forward and backward, optimizer; of each the seconds and
  the most bytes beyond what was there before.
- ``advantages``: what each registered baseline computes for a batch of that length, on the host, transfer included.
- ``steps``: whole steps of TRL's trainer and of ours with several baselines, generation included; peak bytes. There is
  one update a batch, for which TRL needs no scoring pass: `otb` has one for its energies, the others have none.
- ``precision``: energies in bfloat16, without and with an fp32 head, against float64.

Results: ``benchmarks/results/gpu_step.json``. ``--device cpu --quick`` runs all of it on a tiny model in seconds.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from basis_rl.functional.energy import logit_gradient_energy
from benchmarks.advantage_cost import baselines, batch, naive_energies
from benchmarks.common import parser_of, save
from benchmarks.energy_precision import exact
from benchmarks.trainers import TRL, StepClock, random_model, tokenizer, trainer_of

SIDES = (TRL, "grpo", "none", "batch_mean", "reinforce_pp", "otb")


@dataclass(frozen=True)
class Scale:
    """What is measured: the model's shape, lengths of a rollout, rows of a forward pass, rollouts of a batch."""

    vocabulary: int = 151_936
    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    rows: int = 4
    rollouts: int = 64
    step_length: int = 1024
    rounds: int = 5


QUICK = Scale(
    vocabulary=320, hidden=32, layers=1, heads=2, lengths=(8, 16), rows=2, rollouts=16, step_length=8, rounds=1
)


class Clock:
    """Seconds and peak bytes of calls on a device; on a CPU bytes are not counted (`benchmarks.advantage_cost` is)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"

    def __call__(self, work: Callable[[], Any]) -> tuple[float, int | None]:
        before = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        began = self.now()
        work()
        return self.now() - began, torch.cuda.max_memory_allocated(self.device) - before if self.cuda else None

    def now(self) -> float:
        """Seconds, when all that was asked of the device is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def alternating(self, works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, Any]]:
        """Each of `works` in turn, `rounds` times after one that is not counted; "out of memory" is a result too."""
        seconds: dict[str, list[float]] = {name: [] for name in works}
        peaks: dict[str, list[int]] = {name: [] for name in works}
        failed: set[str] = set()
        for round_ in range(rounds + 1):
            for name, work in works.items():
                if name in failed:
                    continue
                try:
                    elapsed, peak = self(work)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    failed.add(name)
                    continue
                if round_:
                    seconds[name].append(elapsed)
                    peaks[name] += [] if peak is None else [peak]
        return {name: told(seconds[name], peaks[name]) for name in works}


def told(seconds: Sequence[float], peaks: Sequence[int]) -> dict[str, Any]:
    """Median and all of the seconds, and the largest peak; without seconds it had run out of memory."""
    if not seconds:
        return {"out_of_memory": True}
    return {"median": median(seconds), "seconds": list(seconds), "peak_bytes": max(peaks) if peaks else None}


def build_model(scale: Scale, device: torch.device, **settings: Any) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights in bfloat16, always the same."""
    model: Any = random_model(scale.vocabulary, scale.hidden, scale.layers, scale.heads, **settings)
    return model.to(device, torch.bfloat16)


def scorer(model: Qwen3ForCausalLM, ids: Tensor, energies: bool) -> Callable[[], Tensor]:
    """A scoring pass over `ids` through the fused head, with energies or with TRL's own outputs only."""
    scored = copy.copy(model)
    outputs = ("log_probs", "entropy", *(("log_sum_sq_probs",) if energies else ()))
    add_fused_lm_head(scored, temperature=1.0, outputs=outputs)

    @torch.no_grad()
    def score() -> Tensor:
        output: Any = scored(input_ids=ids, shift_labels=ids, fused_lm_head=True)
        return logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()) if energies else output.log_probs

    return score


def parts(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Seconds and bytes of a step's parts, by length."""
    model: Any = build_model(scale, device)
    clock, found = Clock(device), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    trained = copy.copy(model)
    add_fused_lm_head(trained, temperature=1.0, outputs=("log_probs", "entropy"))
    for length in scale.lengths:
        ids = torch.randint(2, scale.vocabulary, (scale.rows, length), device=device)

        @torch.no_grad()
        def naive(ids: Tensor = ids) -> Tensor:
            return naive_energies(model, model.model(ids).last_hidden_state, ids)

        def update(ids: Tensor = ids) -> None:
            output: Any = trained(input_ids=ids, shift_labels=ids, fused_lm_head=True)
            (-output.log_probs.mean()).backward()

        def generate(ids: Tensor = ids) -> None:
            model.generate(
                input_ids=ids[:, :16], attention_mask=torch.ones_like(ids[:, :16]), max_new_tokens=32,
                min_new_tokens=32, do_sample=True, disable_compile=True,
            )  # fmt: skip

        works: dict[str, Callable[[], Any]] = {
            "score": scorer(model, ids, energies=False),
            "score with energies": scorer(model, ids, energies=True),
            "energies by a softmax": naive,
            "loss, forward and backward": update,
            "optimizer": optimizer.step,
            "generation of 32 tokens": generate,
        }
        found[str(length)] = clock.alternating(works, scale.rounds)
        optimizer.zero_grad()
    return found


def advantages(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Seconds of each baseline for a batch of rollouts of each length, tensors brought from and to the device."""
    clock, found = Clock(device), {}
    for length in scale.lengths:
        rows = batch(scale.rollouts, length)
        on_device = {name: getattr(rows, name).to(device) for name in ("action_mask", "energies")}

        def work(baseline: Any, rows: Any = rows, on_device: dict[str, Tensor] = on_device) -> Tensor:
            for tensor in on_device.values():
                tensor.cpu()
            return baseline.advantages(rows).values.to(device)

        works = {name: partial(work, made) for name, made in baselines(scale.rollouts // 8).items()}
        found[str(length)] = clock.alternating(works, scale.rounds)
    return found


def build_trainer(side: str, scale: Scale, device: torch.device, folder: str) -> GRPOTrainer:
    """A fresh trainer of `side` for four generation batches."""
    reads = tokenizer()
    return trainer_of(
        side, build_model(scale, device, tokenizer=reads), reads, folder, per_device_train_batch_size=scale.rows,
        gradient_accumulation_steps=scale.rollouts // scale.rows, max_completion_length=scale.step_length, max_steps=4,
        num_iterations=1, use_cpu=device.type == "cpu", bf16=device.type == "cuda",
    )  # fmt: skip


def steps(scale: Scale, device: torch.device) -> dict[str, Any]:
    """Whole steps of each side, the second and the third of a run; ratios of neighbouring rounds to TRL's. Bytes are
    those of the whole run, without the model."""
    clock = Clock(device)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, list[int]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(scale.rounds):
            for side in SIDES:
                trainer, began = build_trainer(side, scale, device, folder), StepClock(clock.now)
                trainer.add_callback(began)
                _, peak = clock(trainer.train)
                seconds[side].append((began.began[3] - began.began[1]) / 2)
                peaks[side] += [] if peak is None else [peak]
                del trainer  # else its memory would be there before the next one's run, and be freed in it
                gc.collect()
                if clock.cuda:
                    torch.cuda.empty_cache()
    found = {side: told(seconds[side], peaks[side]) for side in SIDES}
    for side in SIDES[1:]:
        ratios = [own / trl for own, trl in zip(seconds[side], seconds[TRL], strict=True)]
        found[side] |= {"ratio_to_trl": median(ratios), "ratios": ratios}
    return found


@torch.no_grad()
def precision(scale: Scale, device: torch.device) -> dict[str, dict[str, float]]:
    """Error of bfloat16 energies against float64 ones of the same hidden states and weights."""
    model = build_model(scale, device)
    model.lm_head.weight.data.normal_(std=4.0 / scale.hidden**0.5)  # a peaked policy
    ids = torch.randint(2, scale.vocabulary, (1, min(256, scale.lengths[0])), device=device)
    hidden = model.model(ids).last_hidden_state.flatten(0, 1)
    targets, expected, _ = exact(hidden.float().cpu(), model.lm_head.weight.float().cpu())
    found = {}
    for name, cast in (("bfloat16 head", False), ("fp32 head", True)):
        scored = copy.copy(model)
        outputs = ("log_probs", "entropy", "log_sum_sq_probs")
        add_fused_lm_head(scored, temperature=1.0, cast_lm_head_to_fp32=cast, outputs=outputs)
        output: Any = scored(input_ids=ids, shift_labels=targets.view(ids.shape).to(device), fused_lm_head=True)
        energies = logit_gradient_energy(output.log_probs, output.log_sum_sq_probs.exp()).flatten().double().cpu()
        error = (energies - expected).abs()
        found[name] = {"mean": float(error.mean()), "max": float(error.max()), "energy": float(expected.mean())}
    return found


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return "CPU"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here. `--device cpu --quick` shows that the script works.")
    scale = QUICK if options.quick else Scale()
    results: dict[str, Any] = {"device": describe(device), "scale": vars(scale)}
    for measure in (parts, advantages, steps, precision):
        found: dict[str, Any] = measure(scale, device)
        results[measure.__name__] = found
        print(f"\n{measure.__name__}, {results['device']}")
        for name, entry in found.items():
            for inner, values in entry.items() if measure in (parts, advantages) else [("", entry)]:
                shown = {k: v for k, v in values.items() if k not in ("seconds", "ratios")}
                print(f"  {name} {inner}: " + ", ".join(f"{k} {v:.4g}" for k, v in shown.items() if v is not None))
    if not options.quick:
        save("gpu_step", results)
    return results


if __name__ == "__main__":
    main()
