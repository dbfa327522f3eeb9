"""How much time does generating ahead save?

    python -m benchmarks.prefetch [--quick]      (needs two cores and vLLM's CPU build)

A Qwen3 of several million parameters with random weights is trained with one rollout per prompt and `batch_mean`. The
real vLLM server runs on one core and the trainer on the other, as they would on separate GPUs. Rounds with and without
`async_prefetch` alternate in one run. A figure is the median step of a round, a ratio that of two neighbouring rounds.
`bound` is the ratio with a perfect overlap: max(generation, rest) over their sum, measured without `async_prefetch`.

Results: ``benchmarks/results/prefetch.json``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.engine.server import Server, ServerOptions
from benchmarks.common import one_thread, parser_of, save
from benchmarks.trainers import parity, quiet, random_model, tokenizer

ROUNDS, STEPS, WARM = 5, 12, 3
ROWS, TOKENS = 32, 64


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Keep this thread, and the processes that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Clock(TrainerCallback):
    """Records the time at the end of each optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


class Timed(BasisTrainer):
    """Records the seconds for syncing weights and generating before a batch can be scored."""

    def __init__(self, **kwargs: Any) -> None:
        self.generating: list[float] = []
        super().__init__(**kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.generating.append(time.perf_counter() - start)
        return result


def write_model(folder: Path) -> str:
    """Save a small Qwen3 with random weights and its tokenizer; returns their folder."""
    reads = tokenizer()
    random_model(8_192, 256, 4, 4, tokenizer=reads, max_position_embeddings=512).save_pretrained(folder)
    reads.save_pretrained(folder)
    return str(folder)


def seconds(ahead: bool, model: str, url: str, folder: str, max_steps: int) -> dict[str, list[float]]:
    """Seconds of each step except for the first ones, and the part of them that generation took."""
    clock = Clock()
    args = BasisConfig(
        output_dir=folder,
        async_prefetch=ahead,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_importance_sampling_mode="token_truncate",
        model_init_kwargs={"dtype": "float32"},
        num_generations=1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        max_completion_length=TOKENS,
        max_steps=max_steps,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = Timed(
        model=model,
        reward_funcs=parity,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(512)]}),
        baseline="batch_mean",
        callbacks=[clock],
    )
    quiet(trainer).train()
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    logs = [row for row in trainer.state.log_history if "rollout/kl" in row]
    return {
        "step": steps[WARM:],
        "generating": trainer.generating[WARM + 1 :],
        "kl": [row["rollout/kl"] for row in logs],
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; returns its results."""
    quick = parser_of(__doc__).parse_args(argv).quick
    count, steps = (1, WARM + 2) if quick else (ROUNDS, STEPS)
    one_thread()
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds: dict[str, list[dict[str, list[float]]]] = {"plain": [], "ahead": []}
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model")
        extra = ("--max-num-seqs", str(ROWS), "--kv-cache-memory-bytes", str(64 << 20))
        options = ServerOptions(
            model, port=0, dtype="float32", max_model_len=256, log=Path(name) / "server.log", extra=extra
        )
        with on_core(0), Server(options) as server, on_core(1):
            for _ in range(count):
                for side, kept in rounds.items():
                    kept.append(seconds(side == "ahead", model, server.url, name, steps))
    step = {side: median(t for one in kept for t in one["step"]) for side, kept in rounds.items()}
    generating = {side: median(t for one in kept for t in one["generating"]) for side, kept in rounds.items()}
    for side in rounds:
        print(f"{side}: {step[side]:.3f} s per step, {generating[side]:.3f} s of it until the rollouts are available")
    found = sorted(
        median(ahead["step"]) / median(plain["step"])
        for plain, ahead in zip(rounds["plain"], rounds["ahead"], strict=True)
    )
    rest = step["plain"] - generating["plain"]
    bound = max(generating["plain"], rest) / step["plain"]
    spread = f"from {found[0]:.3f} to {found[-1]:.3f} over {count} rounds"
    print(f"ahead / plain: {median(found):.3f}, {spread}; bound {bound:.3f}")
    results = {"rows": ROWS, "tokens": TOKENS, "seconds": rounds, "ratios": found, "bound": bound}
    if not quick:
        save("prefetch", results)
    return results


if __name__ == "__main__":
    main()
