"""Which architectures are scored without padding: the table of `docs/packing.md`, made by asking each as a run does.

    python -m tools.packing_table        # writes the page

The column of a device that this machine lacks stays as it is on the page.
"""

from __future__ import annotations

from pathlib import Path

import torch
from trl.trainer.utils import add_fused_lm_head

from basis_rl import BasisConfig
from basis_rl.text import markdown_table
from basis_rl.trainer.attention import attention_name
from basis_rl.trainer.packing import enable_packing
from basis_rl.trainer.scoring_check import Precision, settled
from tests.support.architectures import ARCHITECTURES, small_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "packing.md"
MARKS = "<!-- table: python -m tools.packing_table -->\n\n", "\n\n<!-- end of table -->"
PROMPTS = [list(range(10, 45)), list(range(5, 41))]
HEAD = ["model", "attention", "CPU", "GPU"]


def result(name: str, device: str) -> tuple[str, str]:
    """The attention of a small model, and how a run on that device would score its rows."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = small_model(name, dtype=dtype).to(device)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    args = BasisConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none")
    try:
        method = settled(model, enable_packing(model, args), args, PROMPTS, [Precision.of(dtype)])
    except ValueError as error:
        whys = {
            "per_device_train_batch_size": "its rows depend on their neighbours",
            "not this model's head": "TRL's fused head is not its own",
            "cannot be scored": "TRL's fused head does not run on it",
        }
        return attention_name(model), "refused: " + next(why for key, why in whys.items() if key in str(error))
    return attention_name(model), f"{method}: {method.reason}" if method.reason else str(method)


def table(page: str) -> str:
    """The table, with what `page` says of a GPU where there is none."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    known = {row[0]: row[3] for row in rows if len(row) == len(HEAD)}
    found = []
    for name in ARCHITECTURES:
        attention, cpu = result(name, "cpu")
        gpu = result(name, "cuda")[1] if torch.cuda.is_available() else known.get(name, "not run")
        found.append([name, attention, cpu, gpu])
    return markdown_table(found, HEAD)


if __name__ == "__main__":
    text = PAGE.read_text()
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    PAGE.write_text(before + MARKS[0] + table(text) + MARKS[1] + after)
