"""When a rollout that the length limit cut off has an answer, and what each reward makes of those that have none."""

import json
from pathlib import Path

import pytest

from basis_rl.engine import Completion
from basis_rl.rewards import ChoiceReward, CodeReward, ExactReward, MathVerifyReward, ReasoningGymReward
from basis_rl.rewards.call import call
from basis_rl.rewards.registry import REWARDS
from basis_rl.rewards.thought import AfterThought, is_unfinished

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())
BOX = r"\boxed{4}"
GYM = {"dataset": "chain_sum", "entry": {"question": "2 + 2 =", "answer": "4", "metadata": {}}}
PROGRAM = "```python\nprint(4)\n```"
# Of each reward that reads an answer: itself, a right one, and the columns.
ANSWERS = {
    "math_verify": (MathVerifyReward, {"num_workers": 1}, BOX, {"solution": "4"}),
    "exact": (ExactReward, {}, BOX, {"solution": "4"}),
    "choice": (ChoiceReward, {}, "The answer is B.", {"solution": "B"}),
    "reasoning_gym": (ReasoningGymReward, {"num_workers": 1}, BOX, {"reasoning_gym": json.dumps(GYM)}),
    "code": (CodeReward, {"num_workers": 1}, PROGRAM, {"solution": '{"inputs": [""], "outputs": ["4"]}'}),
}


@pytest.fixture(scope="module", params=ANSWERS)
def answering(request):
    make, params, right, columns = ANSWERS[request.param]
    reward = make(**params)
    yield reward, right, columns
    reward.close()


def scores(reward, columns, texts, **given):
    lists = {name: [cell] * len(texts) for name, cell in columns.items()}
    return reward(prompts=["2 + 2 ="] * len(texts), completions=texts, **lists, **given)


def test_every_reward_that_reads_an_answer_is_among_them():
    assert set(ANSWERS) == {name for name, reward in REWARDS.items() if issubclass(reward, AfterThought)}
    assert set(REWARDS) - set(ANSWERS) == {"format", "judge", "overlong"}


@pytest.mark.parametrize(("place", "text"), CASES["final"])
def test_an_answer_that_stands_at_the_end_is_final(place, text):
    assert not is_unfinished(text, place=place)


@pytest.mark.parametrize(("place", "text"), CASES["unfinished"])
def test_an_open_thought_or_a_doubt_behind_the_answer_is_no_end(place, text):
    assert is_unfinished(text, place=place)


def test_a_thought_that_the_template_opened():
    assert is_unfinished(BOX, opened=True)
    assert not is_unfinished(f"a</think>{BOX}", opened=True)


def test_a_thought_that_a_response_schema_took_out_is_closed():
    reward = ExactReward(after_think=True)
    reward.tell_prompt("2 + 2 =\n<think>\n")
    taken = [{"role": "assistant", "content": BOX, "reasoning_content": "hm"}]
    left = [{"role": "assistant", "content": BOX}]
    for truncated in (None, [False, False], [True, True]):
        assert reward([], [taken, left], solution=["4", "4"], truncated=truncated) == [1.0, 0.0]


BROKEN_OFF = ["<think>{}", "{}\nBut wait", "<think>a</think>{}\nWait, no", "<think>{}</think>"]


@pytest.mark.parametrize("form", BROKEN_OFF)
@pytest.mark.parametrize("unfinished", ["wrong", "unscored"])
def test_a_rollout_that_was_cut_off_before_its_end_scores_what_the_setting_says(
    answering, form, unfinished, monkeypatch
):
    reward, right, columns = answering
    monkeypatch.setattr(reward, "unfinished", unfinished)
    texts = [form.format(right), right, right + "\nIt follows from"]
    none = 0.0 if unfinished == "wrong" else None
    assert scores(reward, columns, texts, truncated=[True] * 3) == [none, 1.0, 1.0]
    talk = [[{"role": "assistant", "content": text}] for text in texts]
    assert scores(reward, columns, talk, truncated=[True] * 3) == [none, 1.0, 1.0]
    assert reward.answers(texts, [], [True] * 3)[0] is None
    # One that ended by itself is its own business, and where nobody can say nothing is taken from it.
    by_itself = [right + "\nBut wait"] * 2
    assert scores(reward, columns, by_itself, truncated=[False] * 2) == [1.0] * 2
    assert scores(reward, columns, by_itself) == [1.0] * 2
    assert scores(reward, columns, ["", "I do not know."], truncated=[True, False]) == [none, 0.0]


def test_a_closed_thought_is_no_answer_to_any_reward_once_the_template_thinks(answering, monkeypatch):
    reward, right, columns = answering
    texts = [f"<think>{right}</think>I could not solve it", f"<think>{right}", f"<think>a</think>{right}"]
    monkeypatch.setattr(reward, "after_think", True)
    assert scores(reward, columns, texts) == [0.0, 0.0, 1.0]
    assert reward.version.endswith("after the thought")
    monkeypatch.setattr(reward, "after_think", None)
    assert not reward.version.endswith("after the thought")
    monkeypatch.setattr(reward, "_template_thinks", True)
    assert scores(reward, columns, texts) == [0.0, 0.0, 1.0]
    # As it is read where somebody asks for all of the rollout, also of one that was cut off.
    monkeypatch.setattr(reward, "after_think", False)
    assert scores(reward, columns, texts[1:], truncated=[True, True]) == [1.0, 1.0]


def test_the_setting_is_part_of_the_version_and_checked(answering):
    reward, _, _ = answering
    name = next(name for name, (make, *_) in ANSWERS.items() if make is type(reward))
    make, params, *_ = ANSWERS[name]
    other = make(**params, unfinished="unscored")
    assert other.version != reward.version
    other.close()
    with pytest.raises(ValueError, match=f"{name}: unfinished must be wrong or unscored, got 'right'"):
        make(**params, unfinished="right")


@pytest.mark.parametrize("conversational", [True, False])
def test_value_tables_and_evaluations_say_which_rollouts_were_cut_off(conversational):
    text = rf"maybe {BOX}. But wait"
    prompt = [{"role": "user", "content": "2 + 2 ="}] if conversational else "2 + 2 ="
    said = [Completion(text, [1, 2], True), Completion(text, [1, 2], False), Completion(BOX, [1], True)]
    assert call(ExactReward(), [{"prompt": prompt, "solution": "4"}] * 3, said) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (ExactReward(), r"reads the answer from the last \boxed{}"),
        (ExactReward("whole"), "takes the whole rollout for the answer"),
        (
            ChoiceReward(),
            r"reads the letter from the last \boxed{} or tag, else from the last statement of one",
        ),
    ],
)
def test_what_of_a_rollout_is_graded_is_told(reward, said):
    assert reward.reading == said
    reward.tell_template("</think>", asks_for_box=True)
    assert reward.reading == f"{said}; what stands before </think> does not count"
