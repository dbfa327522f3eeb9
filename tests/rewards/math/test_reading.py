"""Normal forms, readings that are refused, and golds that are prose."""

import json
import logging
from pathlib import Path

import pytest

from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.reading import hedged, refused_reading

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


def test_golds_of_prose_are_named(reward, caplog):
    golds = ["7", "?", "seven ? eight", "2x^2 + 3y^2 = d", "", "x+1", r"1, 2, \ldots, 9", r"\Gamma(-1)", ["7", "1 2 3"]]
    with caplog.at_level(logging.WARNING):
        assert reward.check_golds(golds) == [1, 4]
    (record,) = caplog.records
    assert "4 of 9 golds are no formulas" in record.message
    assert "'seven ? eight'; " in record.message
    caplog.clear()
    assert reward.check_golds(["7", "x+1", r"5\text{ cm}", "3:2", r"8\!:\!34 \text{ p.m.}"]) == []
    assert not caplog.records


@pytest.mark.parametrize("text", CASES["as it is"])
def test_what_is_no_other_notation_stays(text):
    assert normal_form(text) == text


@pytest.mark.parametrize("text", CASES["formulas"])
def test_formulas_are_read(text):
    assert refused_reading(normal_form(text)) is None


BESIDE = CASES["beside"]
OTHERS = [
    ("1, 2, ...", "dots"),
    (r"\{x \mid x = 4\}", "builder"),
]


@pytest.mark.parametrize(("text", "reason"), [*((text, "beside") for text in BESIDE), *OTHERS])
def test_what_stands_side_by_side_is_no_formula(text, reason):
    assert refused_reading(normal_form(text)) == reason


def test_texts_compare_without_blanks_that_change_nothing():
    assert text_form("E_{1} , E_{2}") == text_form("E_1,E_2")
    assert text_form("1 2") != text_form("12")
    assert text_form("x^{12}") != text_form("x^12")


@pytest.mark.parametrize(("gold", "answer", "denied"), CASES["denied"])
def test_what_the_gold_does_not_deny_may_not_be_denied(gold, answer, denied):
    assert hedged(gold, answer) is denied
