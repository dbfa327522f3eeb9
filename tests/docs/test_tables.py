"""The tables of docs/packing.md and docs/scaling.md are what the scripts in `tools/` find."""

import pytest
import torch

from basis_rl.text import markdown_table
from tests.support.architectures import ARCHITECTURES
from tools import scaling_table
from tools.packing_table import MARKS, PAGE, table


def columns(text):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_the_table_of_architectures_is_what_scoring_shows():
    page = PAGE.read_text()
    written = columns(page.split(MARKS[0])[1].split(MARKS[1])[0])
    found = columns(table(page))
    assert list(written) == list(ARCHITECTURES)
    assert {name: row[:2] for name, row in written.items()} == {name: row[:2] for name, row in found.items()}
    if not torch.cuda.is_available():
        assert written == found, "what a GPU has shown stays"


GPUS = scaling_table.GPUS


@pytest.mark.parametrize("gpus", [GPUS[0], *(pytest.param(each, marks=pytest.mark.long) for each in GPUS[1:])])
def test_the_table_of_gpus_is_what_check_estimates(gpus):
    page = scaling_table.PAGE.read_text()
    written = page.split(scaling_table.MARKS[0])[1].split(scaling_table.MARKS[1])[0].splitlines()
    rows = [scaling_table.row(*gpus, trained) for trained in scaling_table.TRAINED]
    assert len(written) == 2 + len(GPUS) * len(rows)
    at = 2 + GPUS.index(gpus) * len(rows)
    assert written[at : at + len(rows)] == markdown_table(rows, scaling_table.HEAD).splitlines()[2:]
