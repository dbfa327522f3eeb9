"""FormatReward and OverlongReward: what has the form, what is too long."""

import json
import time
from pathlib import Path

import pytest

from basis_rl.rewards import FormatReward, OverlongReward
from basis_rl.rewards.format import has_form

BOX = r"so \boxed{1}"


# Texts, and the forms that they have.
FORMS = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.mark.parametrize(("text", "forms"), FORMS)
def test_forms(text, forms):
    known = ("think", "think_box", "think_answer", "box", "answer")
    assert {form for form in known if has_form(text, form)} == set(forms)
    assert [FormatReward(form)([], [f" {text}\n"])[0] for form in known] == [float(form in forms) for form in known]


def test_a_thought_that_the_prompt_has_opened():
    reward = FormatReward("think_box", opened_by_prompt=True)
    assert reward([], [f"a</think>{BOX}", f"<think>a</think>{BOX}", BOX]) == [1.0, 0.0, 0.0]


def test_a_pattern_that_backtracks_for_ever_ends():
    reward = FormatReward(pattern=r"(a|aa)+b.*", timeout=0.2)
    logged = {}
    began = time.perf_counter()
    scores = reward([], ["aab\nc", "a" * 40, "aac", [{"role": "assistant", "content": "ab"}]],
                    log_metric=logged.__setitem__)  # fmt: skip
    assert scores == [1.0, 0.0, 0.0, 1.0]
    assert logged["reward/format/timeout"] == 0.25
    assert time.perf_counter() - began < 30


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


THOUGHT = [{"role": "assistant", "content": BOX, "reasoning_content": "a"}]


@pytest.mark.parametrize("completion", [f"a</think>{BOX}", THOUGHT, [{**THOUGHT[0], "reasoning_content": None}]])
@pytest.mark.parametrize("prompt", ["1 =\n<think>\n", "1 ="])
def test_a_thought_is_looked_for_where_template_and_schema_put_it(prompt, completion):
    """The opening is the end of the prompt, and a response schema moves the thought out of the text."""
    has_thought = completion is THOUGHT or ("<think>" in prompt and isinstance(completion, str))
    assert FormatReward()([prompt], [completion]) == [float(has_thought)]
    told = FormatReward()
    told.tell_prompt(prompt)
    assert told([[{"role": "user", "content": "1 ="}]], [completion]) == [float(has_thought)]
    assert ("opened" in told.version) == ("<think>" in prompt)
