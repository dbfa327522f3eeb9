"""What does a whole step cost with a real language model and a real vLLM engine, TRL's trainer and ours?

    python -m benchmarks.vllm_step --model FOLDER [--steps N] [--sides SIDE ...] [--quick]

SmolLM2-135M-Instruct (`python -m examples.smollm2.model FOLDER`) answers 32 times (4 problems of arithmetic in words,
8 rollouts each, at most 128 tokens, in micro-batches of 8) by vLLM in the trainer's process, on one thread and in
float32; then one update. Each side is a process of its own, and they take steps in turn: a step begins when the other
side's has ended. A figure is processor time of one step, the first, a warm-up, left out.

- ``TRL``: `GRPOTrainer`, with our weight transfer: TRL's own leaves a stale head in vLLM's CPU build where embeddings
  are tied.
- ``padded``: ours with ``packing: none``.
- ``packed``: ours as it is: no padding, prompts once, and no scoring pass beside the loss's own.

Results: ``benchmarks/results/vllm_step.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import one_thread, parser_of, save

SIDES = ("TRL", "padded", "packed")
ROWS, GROUP, MICRO_BATCH, CAP = 32, 8, 8, 128
PROBLEMS = (
    "Natalia sold clips to 48 of her friends in April, half as many in May. How many clips did she sell altogether?",
    "What is 17 * 23?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "If x + 3 = 10, what is x?",
    "Compute the sum of the first 20 positive integers and explain each step.",
    "Tom has 3 apples, buys 5 more and eats 2. How many are left?",
    "A train leaves at 3:15 and arrives at 5:50. How many minutes does it travel?",
    "Name one prime number between 20 and 30.",
)


def reward(completions: list[Any], **_: Any) -> list[float]:
    """1 if a rollout has a 7 in it: what is learnt does not matter here."""
    return [float("7" in completion[0]["content"]) for completion in completions]


def train(side: str, model: str, steps: int, longest: int) -> None:
    """One side: waits for a line before each step, and prints a line of JSON after it."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from basis_rl import BasisConfig, BasisTrainer
    from basis_rl.engine.generation import checked_generation
    from basis_rl.engine.weights import SyncSettings
    from benchmarks.trainers import quiet

    one_thread()
    out = sys.stdout
    generated = [0.0]

    class Turns(TrainerCallback):
        began: float | None = None

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            print("ready", file=out, flush=True)
            sys.stdin.readline()
            self.began, generated[0] = time.process_time(), 0.0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert self.began is not None
            spent = {"step": time.process_time() - self.began, "generation": generated[0]}
            # The sides wait for each other, and three of them at their peak are more than 24 GiB.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            print(json.dumps(spent), file=out, flush=True)

    class Timed:
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = super()._generate(*args, **kwargs)  # type: ignore[misc]
            generated[0] += time.process_time() - began
            return found

    settings: dict[str, Any] = {
        "num_generations": GROUP, "per_device_train_batch_size": MICRO_BATCH, "max_completion_length": longest,
        "gradient_accumulation_steps": ROWS // MICRO_BATCH, "max_steps": steps, "learning_rate": 1e-6, "seed": 3,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
        "use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROBLEMS * 8]})
    common: dict[str, Any] = {"model": model, "reward_funcs": reward, "train_dataset": rows}
    trainer: Any
    # vLLM wants a file there.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as rest, contextlib.redirect_stdout(rest):
        if side == "TRL":
            theirs = type("TimedTrl", (Timed, GRPOTrainer), {})
            sync = SyncSettings("folder", None, 1e-3, request_timeout=600.0, recovery_timeout=60.0, fp32_head=False)
            with checked_generation(sync):
                trainer = theirs(args=GRPOConfig(output_dir=folder, **settings), **common)
        else:
            packing = "none" if side == "padded" else "auto"
            args = BasisConfig(output_dir=folder, packing=packing, **settings)
            trainer = type("TimedBasis", (Timed, BasisTrainer), {})(args=args, baseline="grpo", **common)
        trainer.add_callback(Turns())
        quiet(trainer).train()
        logs = [
            {name: entry.get(name) for name in ("loss", "grad_norm", "completions/mean_length")}
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
    print(json.dumps({"logs": logs}), file=out, flush=True)


class Side:
    """A side's process."""

    def __init__(self, name: str, given: list[str], folder: Path) -> None:
        words = [sys.executable, "-m", "benchmarks.vllm_step", "--side", name, *given]
        quiet = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        self.errors = folder / f"{name}.log"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                words, env=os.environ | quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def line(self) -> str:
        """What it says next. Raises RuntimeError if it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("ready", "{")):
                return line
        raise RuntimeError(f"A side has ended:\n{self.errors.read_text()[-3000:]}")

    def step(self) -> dict[str, Any]:
        """One step of it."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.line())
        return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=6, help="of each side, of which the first is not counted")
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    steps = 2 if chosen.quick else chosen.steps
    if chosen.side:
        train(chosen.side, chosen.model, steps, 8 if chosen.quick else CAP)
        return {}
    given = ["--model", chosen.model, "--steps", str(steps), *(["--quick"] if chosen.quick else [])]
    times: dict[str, list[dict[str, float]]] = {name: [] for name in chosen.sides}
    with tempfile.TemporaryDirectory() as folder:
        sides = {}
        for name in chosen.sides:
            sides[name] = Side(name, given, Path(folder))
            assert sides[name].line().startswith("ready")
        for number in range(steps):
            first = number % len(sides)
            for name in [*chosen.sides[first:], *chosen.sides[:first]]:
                times[name].append(sides[name].step())
                print(f"step {number} {name}: {times[name][-1]}", flush=True)
                if number < steps - 1:
                    assert sides[name].line().startswith("ready")
        logs = {name: json.loads(side.line())["logs"] for name, side in sides.items()}
    counted = {name: found[1:] for name, found in times.items()}
    results: dict[str, Any] = {"seconds": counted, "logs": logs, "ratios": {}}
    for name in chosen.sides:
        share = median(each["generation"] / each["step"] for each in counted[name])
        print(f"{name}: {median(each['step'] for each in counted[name]):.1f} s a step, {share:.0%} of it generation")
    for name in chosen.sides[1:]:
        ratios = sorted(a["step"] / b["step"] for a, b in zip(counted[chosen.sides[0]], counted[name], strict=True))
        results["ratios"][f"{chosen.sides[0]} / {name}"] = ratios
        print(f"{chosen.sides[0]} / {name}: {median(ratios):.2f} [{ratios[0]:.2f} to {ratios[-1]:.2f}]")
    if not chosen.quick:
        save("vllm_step", results)
    return results


if __name__ == "__main__":
    main()
