"""Whatever a model repeats, in a loop of a megabyte: the time to read it is linear in its length."""

import time

import pytest

from basis_rl.rewards import ChoiceReward, ExactReward
from basis_rl.rewards.code.blocks import last_code
from basis_rl.rewards.extract import last_boxed
from basis_rl.rewards.format import has_form
from basis_rl.rewards.math.notation import normal_form, text_form
from basis_rl.rewards.math.places import find_answer
from basis_rl.rewards.math.quick import same_text
from basis_rl.rewards.math.reading import hedged, refused_reading
from basis_rl.rewards.math.screen import screened
from basis_rl.rewards.thought import is_unfinished

CHOICE = ChoiceReward()
EXACT = [ExactReward(where, ignore_punctuation=True) for where in ("box", "tag", "hashes", "last_line", "whole")]
READERS = {
    "box": last_boxed,
    "bare box": lambda text: last_boxed(rf"\boxed {text}x"),
    **{f"exact {each.answer_in}": lambda text, each=each: each([], [text + "x"], solution=["x"]) for each in EXACT},
    **{
        f"form {form}": lambda text, form=form: has_form(rf"<think>a{text}\boxed{{1}}", form)
        for form in ("think_box", "think_answer", "answer", "box")
    },
    "exact in a box": lambda text: EXACT[0]([], [rf"\boxed{{{text}x}}"], solution=["x"]),
    "choice": lambda text: CHOICE.choice("answer" + text),
    "boxed choice": lambda text: CHOICE.choice(rf"\boxed{{{text}}}"),
    "options": lambda text: CHOICE.check_prompts([text, "A. one\nB. two"]),
    **{
        f"unfinished {place}": lambda text, place=place: is_unfinished(text + "x", place=place)
        for place in ("box", "tag", "hashes", "code", "whole")
    },
    **{
        f"place {where}": lambda text, where=where: find_answer(f"<answer>{text}x</answer>#### {text}x", where)
        for where in ("tag", "hashes", "last_line", "last_number")
    },
    "stated": lambda text: find_answer(text, "anywhere"),
    "stated behind": lambda text: find_answer(f"The answer is {text}", "anywhere"),
    "program": lambda text: last_code("```python\n" + text),
    "program before fences": lambda text: last_code(text + "```" * text.count(text[:1])),
    "screen": lambda text: screened("2", text),
    "same text": lambda text: same_text("2", text),
}
PIECES = [
    "\\", r"\boxed{", r"\boxed{{", r"\[ \boxed{1} ", "{", "}", r"\boxed{1}", r"\boxed   ", r"\boxed 5 ", r"\boxed{A, ",
    "9", "999,", "9.", "9,", "1/", "-", "$", "\\(", "<answer>", "</answer>", "<answer></answer>", "####", "####\n",
    "\n", " ", '"', ".!", "<think>", "</think>", "<think>a</think>", "answer ", "answer\n", "Answer: A or ",
    "answer is ", "answer the option ", "the answer is ", "(", "**", r"\text{", "A)", "A ) ", "A ", "\n(", "B.:",
    ". but ", ".let me a ", "hm", ".no", "```python\na\n```\n", "```\na\n```\n", "a```\n", "~~~ `", "~~~\n", "``` ",
    "```", "`", "~", r"\sin(", "9^{", "9!", r"\cup ", "9^9", r"\binom{9}{", "!", ")!",
]  # fmt: skip


def seconds(read, text):
    began = time.thread_time()
    read(text)
    return time.thread_time() - began


@pytest.mark.parametrize("piece", PIECES)
def test_time_is_linear(piece):
    """Eight times the text takes less than 24 times as long: quadratic growth would take 64 times as long.

    What takes less than 30 ms on the long text is nothing to worry about, and too short to be measured.
    """
    short, long = piece * 1_000, piece * 8_000
    for name, read in READERS.items():
        if seconds(read, long) > 0.03:
            small, large = (min(seconds(read, text) for _ in range(3)) for text in (short, long))
            assert large < max(0.03, 24 * small), name


SHORT_PIECES = (
    "1 ", "1 000 ", "**", r"\text{", r"\frac", "{", "^{", "_{", r"\quad ", "√(", "1,000", ",", "~", r"\{:", "'", "(=",
    "x<1 or ", "x<1", "sqrt(", "sqrt((1)", r"\langle ", r"\choose{", r"\text{ for all real ", "(mod ", "(1)/(", "个",
)  # fmt: skip


# Behind a bracket, which begins a matrix as a program writes it.
BRACKETED = ("3", "-", "/", "3.", "3 ", "3;")


@pytest.mark.parametrize("work", [normal_form, refused_reading, lambda text: hedged("5", text), text_form])
def test_time_is_bounded_for_the_longest_text_that_is_read(work):
    for text in (*(piece * 10_000 for piece in SHORT_PIECES), *("[" + piece * 10_000 for piece in BRACKETED)):
        assert min(seconds(work, text[:10_000]) for _ in range(3)) < 1.0
