"""The table of docs/scaling.md is what `tools/scaling_table.py` finds."""

import pytest

from basis_rl.text import markdown_table
from tools.scaling_table import GPUS, HEAD, MARKS, PAGE, TRAINED, row


@pytest.mark.parametrize("gpus", [GPUS[0], *(pytest.param(each, marks=pytest.mark.long) for each in GPUS[1:])])
def test_the_table_of_gpus_is_what_check_estimates(gpus):
    written = PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0].splitlines()
    found = markdown_table([row(*gpus, trained) for trained in TRAINED], HEAD).splitlines()
    assert len(written) == 2 + len(GPUS) * len(TRAINED)
    at = 2 + GPUS.index(gpus) * len(TRAINED)
    assert written[at : at + len(TRAINED)] == found[2:]
