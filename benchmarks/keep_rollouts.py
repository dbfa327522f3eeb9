"""What keeping the rollouts of a step costs: 64 of 200 tokens, four per prompt, with numbers and words at random.

    python -m benchmarks.keep_rollouts [--quick]

Prints milliseconds of processor time and the size of the file; rollouts with a name such as ``key =`` cost the most,
since they are searched for secrets. Results are only printed.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from basis_rl.run.rollouts import KeptRollouts
from basis_rl.trainer.logs import rollout_rows
from basis_rl.types import RolloutBatch
from benchmarks.common import parser_of

ROLLOUTS = 64
TOKENS = 200
# Characters per token, about those of a tokenizer with 150,000 entries on mathematics.
CHARACTERS = 3.5


def text(words: int, extra: str = "") -> str:
    """Sentences of random words and formulas."""
    parts = ["so", "we", "have", "therefore", "the", "value", "of", "the triangle", "\\frac{3}{7}", "x^2 + 1 =", "is"]
    return " ".join(random.choice([*parts, str(random.randrange(10_000)), extra]) for _ in range(words))


def step(extra: str) -> tuple[dict, RolloutBatch]:
    """What TRL has logged of a batch, and the batch."""
    prompts = [[{"role": "user", "content": text(60)}] for _ in range(ROLLOUTS // 4) for _ in range(4)]
    said = [text(TOKENS, extra)[: int(CHARACTERS * TOKENS)] for _ in range(ROLLOUTS)]
    logs = {
        "prompt": prompts,
        "completion": [[{"role": "assistant", "content": each}] for each in said],
        "rewards": {"math_verify_reward": [1.0] * ROLLOUTS},
        "advantages": torch.randn(ROLLOUTS).tolist(),
        "extra": {"verdict": ["right"] * ROLLOUTS},
    }
    batch = RolloutBatch(
        rewards=torch.rand(ROLLOUTS),
        group_ids=torch.arange(ROLLOUTS) // 4,
        prompt_ids=[f"{i // 4:032x}" for i in range(ROLLOUTS)],
        action_mask=torch.ones(ROLLOUTS, TOKENS, dtype=torch.bool),
    )
    return logs, batch


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Measure ordinary rollouts, and those that look as if they named a secret; returns the seconds of each step."""
    repeats = 3 if parser_of(__doc__).parse_args(argv).quick else 50
    found: dict[str, list[float]] = {}
    for name, extra in (("ordinary", "and"), ("naming keys", "key = 12")):
        with tempfile.TemporaryDirectory() as folder:
            kept = KeptRollouts(folder, 200.0)
            seconds = found[name] = []
            for number in range(1, repeats + 1):
                logs, batch = step(extra)
                began = time.process_time()
                kept.add(rollout_rows(logs, batch, [0.5] * ROLLOUTS, None, [(TOKENS, False, "72")] * ROLLOUTS))
                kept.write(number)
                seconds.append(time.process_time() - began)
            size = sum(path.stat().st_size for path in Path(folder, "rollouts").iterdir()) / repeats
        middle = sorted(seconds)[len(seconds) // 2]
        print(f"{name}: {1e3 * middle:.1f} ms (largest {1e3 * max(seconds):.1f}), {size / 1e3:.1f} kB per step")
    return found


if __name__ == "__main__":
    main()
