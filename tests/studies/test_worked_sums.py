"""The policy that works before it answers."""

import itertools
import re
from random import Random

from studies import worked_sums
from studies.small_policy import problems


def test_a_worked_sum_is_right_in_every_step():
    rows = problems(300)
    for row, seed in itertools.product(rows, range(3)):
        text = row["prompt"][0]["content"]
        *steps, box = worked_sums.worked(text, Random(seed)).split()
        start = int(re.search(r"(\d+) [+-]", text)[1])
        totals = [start, *(int(step.split("=")[1]) for step in steps)]
        changes = [int(step.split("=")[0]) for step in steps]
        assert [after - before for before, after in itertools.pairwise(totals)] == changes
        assert box == f"\\boxed{{{totals[-1]}}}"
        assert str(totals[-1]) == row["solution"]
