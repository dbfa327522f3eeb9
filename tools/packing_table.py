"""Which architectures are scored without padding: the table of `docs/packing.md`, made by scoring rows with each.

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
from basis_rl.trainer.packing import Scorer, enable_packing
from tests.support.architectures import ARCHITECTURES, small_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "packing.md"
MARKS = "<!-- table: python -m tools.packing_table -->\n\n", "\n\n<!-- end of table -->"
HEAD = ["model", "attention", "CPU", "GPU"]


def result(name: str, device: str) -> tuple[str, str]:
    """The attention of a small model and how its rows are scored on a device, after scoring two that begin alike."""
    model = small_model(name, dtype=torch.float32 if device == "cpu" else torch.bfloat16).to(device)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    method = enable_packing(model, BasisConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none"))
    ids = (torch.arange(80, device=device).view(2, 40) % 40 + 3).clamp(max=60)
    labels = ids.masked_fill(torch.arange(40, device=device) < 30, -100)
    with torch.no_grad():
        output = Scorer(model, method)(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True
        )
    assert output.log_probs.isfinite().all(), name
    why = method.reason or ("it has dropout" if str(method) == "packed" else "")
    return attention_name(model), f"{method}: {why}" if why else str(method)


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
