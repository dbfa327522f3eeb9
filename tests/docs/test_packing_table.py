"""The table of docs/packing.md is what `tools/packing_table.py` finds."""

import torch

from tests.support.architectures import ARCHITECTURES
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
