"""The table of mutants fits the code: each changes what is there exactly once, into something that still compiles."""

import shutil

import pytest

from tests.mutation.table import ROOT, read_area, read_table


def test_every_mutant_fits_the_code(tmp_path):
    shutil.copytree(ROOT / "basis_rl", tmp_path / "basis_rl", ignore=shutil.ignore_patterns("__pycache__"))
    table = read_table()
    assert len(table) >= 140
    for mutant in table:
        before = mutant.apply(tmp_path)
        if mutant.path.endswith(".py"):
            compile((tmp_path / mutant.path).read_text(), mutant.id, "exec")
        (tmp_path / mutant.path).write_text(before)
        assert all((ROOT / name).exists() for name in mutant.tests), mutant.tests


def test_a_line_that_is_no_mutant_is_refused(tmp_path):
    path = tmp_path / "area.txt"
    path.write_text("tests: functional\nsign ;; functional/kl.py ;; a => b\n")
    with pytest.raises(ValueError, match="line 2: no mutant"):
        read_area(path)
    path.write_text("sign ;; functional/kl.py ;; a => b ;; the sign\n")
    with pytest.raises(ValueError, match="no `tests:` above it"):
        read_area(path)
