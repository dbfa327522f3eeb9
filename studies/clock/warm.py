"""The models of the tasks ``written`` and ``tooled``: SmolLM2 that has seen some solutions.

    python -m studies.clock.warm MODEL FOLDER [--task written] [--steps N] [--bf16] [--quick]

SmolLM2 by itself solves none of these problems by writing them out, nor does it call a tool, and a reward that is
always 0 teaches nothing. So it is trained on solutions first, by TRL's `SFTTrainer`, on problems that neither training
nor the held-out rows have, and only until it solves some of them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.common import parser_of
from examples.tools.warm_start import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from studies.clock import tooled
from studies.clock.tasks import WRITTEN_TEXT, factors, written_rows, written_solution

# Rows of the task ``written``, which are not to be seen here.
STUDY_ROWS = 1_800
KINDS = ("easy", "learnable")


def examples(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Questions with their solutions, half of them easy, none of them in the study."""
    taken = {row["prompt"] for row in written_rows(STUDY_ROWS)}
    chance = random.Random(seed)
    found = []
    for kind in KINDS:
        asked = [(WRITTEN_TEXT.format(*pair), pair) for pair in factors(kind, count, chance)]
        fresh = [(question, pair) for question, pair in asked if question not in taken]
        found += [(question, written_solution(*pair)) for question, pair in fresh]
    chance.shuffle(found)
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": solution}],
        }
        for question, solution in found
    ]


def warm(source: str, folder: Path, task: str, steps: int, bf16: bool, rows: int = 16, rate: float = 1e-4) -> None:
    """Train the model of the folder `source` for some steps of `rows` examples, and save it in `folder`."""
    args = SFTConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=rows, learning_rate=rate,
        warmup_steps=5, lr_scheduler_type="linear", bf16=bf16, use_cpu=True, save_strategy="no", report_to="none",
        logging_steps=5, seed=0, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source)
    found = examples(500) if task == "written" else tooled.solutions(1_000)
    if task == "tooled":
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.response_template = RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    data = Dataset.from_list(found)
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder))


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=("written", "tooled"), default="written")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--bf16", action="store_true", help="for processors that have it")
    options = parser.parse_args(argv)
    # The first step of a warm-up changes nothing.
    warm(options.model, options.folder, options.task, 2 if options.quick else options.steps, options.bf16)


if __name__ == "__main__":
    main()
