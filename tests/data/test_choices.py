"""Options of multiple-choice questions, and which of them a gold names."""

import pytest

from basis_rl.data.choices import how_read, letter_of, lettered, read_options

THREE = ["red", "7", "blue"]


@pytest.mark.parametrize(
    "cells",
    [
        [THREE],
        [{"text": THREE, "label": ["A", "B", "C"]}],
        [{"A": "red", "B": "7", "C": "blue", "D": None}],
        [str(THREE)],
        ['["red", "7", "blue", null]'],
        ['{"A": "red", "B": "7", "C": "blue", "D": null}'],
        ["A) red\nB) 7\nC) blue"],
        ["(a) red\n(b) 7\n(c) blue\n"],
        ["1. red\n2. 7\n3. blue"],
        [["A. red", "B. 7", "C. blue", None]],
        ["red", 7, " blue "],
        ["red", "7", "blue", None],
        [[*THREE, " "]],
        # In a column with other numbers, Arrow makes a float of 7.
        [["red", 7.0, "blue"]],
    ],
)
def test_every_form_gives_the_same_lines(cells):
    assert lettered(read_options(cells)) == "A. red\nB. 7\nC. blue"


@pytest.mark.parametrize(
    "cells", [["red"], [["red"]], [None], [3], [{"text": []}], [list(range(27))], ["A) red\nand so on"]]
)
def test_what_are_no_options_is_refused(cells):
    with pytest.raises(ValueError, match="holds no options"):
        read_options(cells)


@pytest.mark.parametrize(
    ("golds", "letters"),
    [
        (["A", "(C)", "B."], "ACB"),
        (["a ", "(c)", "B"], "ACB"),
        (["0", "2", "1"], "ACB"),
        (["1", "3", "2"], "ACB"),
        (["red", "blue", "7"], "ACB"),
        (["0", "2", "9"], ["A", "C", None]),
        (["A) red", "(c) blue", "B", "B. red"], ["A", "C", "B", None]),
    ],
)
def test_golds_of_one_column_are_read_in_one_way(golds, letters):
    options = read_options([THREE])
    reading, count = how_read([(gold, options) for gold in golds])
    assert [letter_of(gold, options, reading) for gold in golds] == list(letters)
    assert count == sum(letter is not None for letter in letters)


@pytest.mark.parametrize("empty", [None, ""])
def test_an_option_that_is_empty_keeps_its_number(empty):
    options = read_options(["red", empty, "blue", "green"])
    assert lettered(options) == "A. red\nB. blue\nC. green"
    assert [letter_of(gold, options, "numbers from 0") for gold in "0123"] == ["A", None, "B", "C"]
    assert [letter_of(gold, options, "labels") for gold in "ABCD"] == ["A", None, "B", "C"]


def test_labels_of_the_row_come_first():
    """In ARC some rows have A to D, others 1 to 4."""
    rows = [("2", read_options([{"text": THREE, "label": ["1", "2", "3"]}])), ("B", read_options([THREE]))]
    assert how_read(rows) == ("labels", 2)
    assert [letter_of(*row, "labels") for row in rows] == ["B", "B"]


def test_texts_that_only_look_labelled_stay_as_they_are():
    for texts in (["B. Franklin", "A. Smith"], ["1. e4 e5", "1. d4 d5"], ["A. red", "green"]):
        assert [text for _, text in read_options([texts])] == texts


def test_numbered_options_have_golds_by_their_numbers():
    options = read_options([["1) red", "2) 7", "3) blue"]])
    for golds, reading in ((["1", "3", "2"], "labels"), (["0", "2", "1"], "numbers from 0")):
        assert how_read([(gold, options) for gold in golds])[0] == reading
        assert [letter_of(gold, options, reading) for gold in golds] == ["A", "C", "B"]
