"""FormatReward and OverlongReward: what has the form, what is too long."""

import time

import pytest

from basis_rl.rewards import FormatReward, OverlongReward
from basis_rl.rewards.format import has_form
from tests.rewards.growth import grows_linearly

BOX, ANSWER = r"so \boxed{1}", "<answer>1</answer>"


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        (f"<think>a</think>{BOX}", {"think", "think_box", "box"}),
        (f"<think>a</think>\n{ANSWER}", {"think", "think_answer", "answer"}),
        (f"<think>a</think> hm {ANSWER}", {"think", "answer"}),
        (f"<think>a</think>{ANSWER} hm", {"think"}),
        (f"<think>a</think>{ANSWER}{ANSWER}", {"think"}),
        (f"<think>{BOX}</think>b", {"think", "box"}),
        (f"<think>{ANSWER}</think>b", {"think"}),
        (f"<think>a {BOX}", {"box"}),
        (f"<think></think>{BOX}", {"box"}),
        (f"<think> </think>{BOX}", {"box"}),
        (f"<think>a</think>b</think>{BOX}", {"box"}),
        (f"<think>a<think>b</think>{BOX}", {"box"}),
        (f"b<think>a</think>{BOX}", {"box"}),
        (f"a</think>{BOX}", {"box"}),
        ("<think>a</think>", set()),
        (r"<think>a</think>\boxed{}", {"think"}),
        (r"<think>a</think>\boxed{1", {"think"}),
        ("<think>a</think><answer> </answer>", {"think"}),
        ("<think>a</think></answer><answer>1</answer>", {"think"}),
        ("<answer>1</answer>2</answer>", set()),
        ("<answer>1</answer></answer>", set()),
        ("<think>a</think><answer>1</answer> 2</answer>", {"think"}),
        ("</answer><answer>1</answer>", set()),
        ("<answer>1<answer>2</answer>", set()),
        ("<answer>1", set()),
        ("", set()),
        (ANSWER, {"answer"}),
    ],
)
def test_forms(text, forms):
    known = ("think", "think_box", "think_answer", "box", "answer")
    assert {form for form in known if has_form(text, form)} == forms
    assert [FormatReward(form)([], [f" {text}\n"])[0] for form in known] == [float(form in forms) for form in known]


def test_a_thought_that_the_prompt_has_opened():
    reward = FormatReward("think_box", opened_by_prompt=True)
    assert reward([], [f"a</think>{BOX}", f"<think>a</think>{BOX}", BOX]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<think>a</think>", "<answer>", "</answer>", "\\boxed{", " "])
def test_time_is_linear(piece):
    forms = ("think_box", "think_answer", "answer", "box")
    assert grows_linearly(lambda n: [has_form("<think>a" + piece * n + BOX, form) for form in forms])


def test_a_pattern_that_backtracks_for_ever_ends():
    reward = FormatReward(pattern=r"(a+)+b.*", num_workers=2, timeout=0.5)
    logged = {}
    began = time.perf_counter()
    scores = reward([], ["aab\nc", "a" * 40, "aac", [{"role": "assistant", "content": "ab"}]],
                    log_metric=logged.__setitem__)  # fmt: skip
    assert scores == [1.0, 0.0, 0.0, 1.0]
    assert logged["reward/format/timeout"] == 0.25
    assert time.perf_counter() - began < 30
    reward.close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"form": "thinkbox"}, "form must be one of think, think_box"),
        ({"form": "box", "pattern": "a"}, "not both"),
        ({"pattern": "(a"}, "not a regular expression"),
        ({"timeout": 0}, "timeout > 0"),
    ],
)
def test_parameters_out_of_range(parameters, message):
    with pytest.raises(ValueError, match=message):
        FormatReward(**parameters)


@pytest.mark.parametrize(("longest", "cache"), [(20480, 4096), (100, 30), (7, 7), (1, 1), (6, None), (3, None)])
def test_overlong_is_trls_and_the_equation(longest, cache):
    from trl.rewards import get_soft_overlong_punishment

    reward = OverlongReward(longest, cache)
    lengths = [*range(0, min(longest, 200) + 20), longest - 1, longest, longest + 1, 2 * longest]
    logged = {}
    ids = [[0] * n for n in lengths]
    ours = reward(prompts=[], completions=[""] * len(ids), completion_ids=ids, log_metric=logged.__setitem__)
    theirs = get_soft_overlong_punishment(longest, reward.cache)(completion_ids=ids)
    assert ours == pytest.approx(theirs)
    assert ours[lengths.index(longest)] == -1.0
    assert logged["reward/overlong/share"] == sum(n > longest - reward.cache for n in lengths) / len(lengths)


@pytest.mark.parametrize("lengths", [(0, None), (10, 0), (10, 11), (10.5, 2), ("10", 2)])
def test_overlong_lengths_out_of_range(lengths):
    with pytest.raises(ValueError, match="overlong: "):
        OverlongReward(*lengths)
