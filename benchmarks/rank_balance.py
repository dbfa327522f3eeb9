"""How long does the faster of two ranks wait for the slower one: fixed rows, and micro-batches by tokens?

    python -m benchmarks.rank_balance [--quick]

Two processes on this CPU, one thread each, train a Qwen3 of 4 layers with random weights on canned rollouts whose
lengths are like those of GSM8K: log-normal, prompts of 56 tokens on average (sd/mean 0.4), rollouts of 150 (0.6), at
most 512. An optimizer step has 64 rollouts of 8 prompts, 32 per rank. Without a budget they are 4 micro-batches of 8
rows per rank, which are balanced within the rank (`packing: auto`). The budget, 4,096 tokens, is less than 8 rows of
the largest length have, so `basis-rl check` estimates less memory for it.

The cost of a micro-batch is the processor time of its forward and backward pass in its process, so that it does not
matter what else the machine does. Ranks meet in each micro-batch (TRL gathers metrics), so a step takes the sum over
micro-batches of the slower rank's time, and the rest of a rank's time is waiting. The sides alternate, with new
rollouts in every step and the same ones on both sides.

Results: ``benchmarks/results/rank_balance.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM

from basis_rl import BasisConfig
from benchmarks.common import one_thread, parser_of, save, spread
from benchmarks.step_cost import CannedBasis, lognormal
from benchmarks.trainers import parity, quiet, qwen3_config, tokenizer

RANKS = 2
MEAN, SPREAD, CAP = 150, 0.6, 512
SIDES = {"fixed rows": None, "by tokens": 4096}
# The model's vocabulary, hidden size, layers and heads; optimizer steps of a round, and rounds.
SCALE = ((8_192, 256, 4, 8), 4, 3)
QUICK = ((512, 32, 1, 2), 1, 1)


class Timed(CannedBasis):
    """Keeps by optimizer step the processor time of each pass forward and backward; each rank has its own rollouts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.passes: list[list[float]] = [[]]
        self.began = 0.0
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        generator = torch.Generator().manual_seed(RANKS * self._generation_batch + self.accelerator.process_index)
        sizes = lognormal(generator, MEAN, SPREAD, len(prompt_ids)).round().clamp(1, CAP).long().tolist()
        return [torch.randint(5, self.tokens, (size,), generator=generator).tolist() for size in sizes], None

    def compute_loss(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        self.began = time.process_time()
        return super().compute_loss(model, inputs, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        original = self.accelerator.backward

        def timed(loss: Any, **given: Any) -> None:
            # Before the gradients of the ranks meet: that waits, and is communication.
            original(loss, **given)
            self.passes[-1].append(time.process_time() - self.began)

        self.accelerator.backward = timed
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.accelerator.backward = original

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.append([])
        return super()._get_grad_norm(*args, **kwargs)


def rank(folder: Path, size: tuple[int, int, int, int], steps: int, rounds: int) -> None:
    """One process of a measurement; writes ``rankN.json``."""
    one_thread()
    reads = tokenizer()
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in list(SIDES) if number % 2 == 0 else list(reversed(SIDES)):
            torch.manual_seed(0)
            model = Qwen3ForCausalLM(qwen3_config(*size, tokenizer=reads, tie_word_embeddings=True))
            args = BasisConfig(
                output_dir=str(folder / "run"), per_device_train_batch_size=8, gradient_accumulation_steps=4,
                steps_per_generation=4, num_generations=8, max_completion_length=CAP, max_steps=steps + 1,
                per_device_token_budget=SIDES[side], save_strategy="no", report_to="none", disable_tqdm=True,
                gradient_checkpointing=False, use_cpu=True, bf16=False, seed=number, keep_rollouts_mb=0.0,
                learning_rate=1e-5,
            )  # fmt: skip
            prompts = Dataset.from_dict({"prompt": list(map(str, range(512)))})
            trainer: Any = Timed(model, parity, args, prompts, processing_class=reads)
            trainer.spread, trainer.tokens, trainer.last = SPREAD, len(reads) - 5, reads.eos_token_id
            quiet(trainer).train()
            # The first step warms up.
            found[side] += [passes for passes in trainer.passes[1:] if passes]
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(found))


def idle(ranks: list[list[float]]) -> dict[str, float]:
    """Of one step, by each rank's times of its micro-batches: seconds, and the share that the faster rank waits."""
    step = sum(max(times) for times in zip(*ranks, strict=True))
    return {"seconds": step, "idle": 1 - min(map(sum, ranks)) / step, "micro-batches": len(ranks[0])}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    quick = parser_of(__doc__).parse_args(argv).quick
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        command += [
            "--num_processes",
            str(RANKS),
            "--main_process_port",
            "0",
            "-m",
            "benchmarks.rank_balance",
            "--rank",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1"}
        root = Path(__file__).resolve().parents[1]
        subprocess.run([*command, name, *["--quick"] * quick], check=True, cwd=root, env=environment)
        ranks = [json.loads((Path(name) / f"rank{index}.json").read_text()) for index in range(RANKS)]
    sides = {
        side: [idle([of_rank[side][step] for of_rank in ranks]) for step in range(len(ranks[0][side]))]
        for side in SIDES
    }
    pairs = zip(*sides.values(), strict=True)
    ratios = [fixed["seconds"] / by_tokens["seconds"] for fixed, by_tokens in pairs]
    results = {
        "idle share of the faster rank": {
            side: spread([each["idle"] for each in found]) for side, found in sides.items()
        },
        "seconds of a step": {side: spread([each["seconds"] for each in found]) for side, found in sides.items()},
        "micro-batches": {side: spread([each["micro-batches"] for each in found]) for side, found in sides.items()},
        "fixed rows / by tokens": spread(ratios),
        "steps": sides,
    }
    if not quick:
        save("rank_balance", results)
    for side, found in sides.items():
        shares = sorted(each["idle"] for each in found)
        times = median(each["seconds"] for each in found)
        print(f"{side}: idle {median(shares):.1%} [{shares[0]:.1%} to {shares[-1]:.1%}], a step {times:.2f} s")
    print(f"fixed rows / by tokens: {median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}]")
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), *(QUICK if "--quick" in sys.argv else SCALE))
    else:
        main()
