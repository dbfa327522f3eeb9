"""Where the first rollouts teach nothing, a run says why as far as they show it, with one of them."""

import math

import pytest

from basis_rl.cli.main import main
from basis_rl.rewards import ChoiceReward, ExactReward, MathVerifyReward
from basis_rl.run.errors import RewardFailed
from basis_rl.trainer.first_rollouts import FIRST, Rollout, explanation, reads_boxes
from tests.cli.conftest import recipe as recipe
from tests.support.tiny import flat, parity_reward, tiny_trainer

OWN = {
    "output_dir": "out",
    "reward_funcs": ["math_verify"],
    "reward_kwargs": {"answer_in": "box"},
    "use_cpu": True,
}


def rollouts(*texts, truncated=False):
    return [Rollout([{"role": "user", "content": "2 + 2 ="}], text, (5, 6), truncated) for text in texts]


SIGNS = {
    "no box": (rollouts("So 4.", "It is 4"), True, r"no \boxed{}, from which the answer is read: 2 of 2"),
    "mostly no box": (rollouts("So 4.", "4", r"\boxed{5}"), True, r"is read: 2 of 3"),
    "no box is read": (rollouts("So 4.", "It is 4"), False, "they have text and an end"),
    "a box": (rollouts(r"\boxed{5}", r"\boxed{6}"), True, "they have text and an end"),
    "cut off": (
        rollouts(r"\boxed{5}", truncated=True),
        True,
        "cut off (max_completion_length 9): 1 of 1",
    ),
    "nothing": (rollouts("", " "), False, "no text: 2 of 2"),
}


@pytest.mark.parametrize("case", SIGNS)
def test_what_rollouts_show_is_said(case):
    drawn, boxes, words = SIGNS[case]
    functions = [ExactReward(answer_in="box" if boxes else "tag"), parity_reward]
    told = explanation([0.0] * len(drawn), drawn, 9, functions)
    assert words in told
    assert f"--- prompt\n2 + 2 =\n--- rollout\n{drawn[0].completion}\n---" in told
    assert "are 0" in told
    assert explanation([0.0, 1.0], drawn, 9, functions) is None
    unscored = explanation([math.nan] * 2, drawn, 9, functions)
    assert "are None, since no function scored a rollout (exact_reward, parity_reward)" in unscored
    assert "too hard" not in unscored
    assert ("look for what makes the function return None" in unscored) == ("too hard" in told)


def test_a_box_is_missed_only_where_one_is_read():
    boxes = [MathVerifyReward(num_workers=1), ExactReward()]
    others = [
        ChoiceReward(),
        MathVerifyReward(num_workers=1, answer_in="tag"),
        ExactReward(answer_in="tag"),
        parity_reward,
    ]
    assert [reads_boxes([reward]) for reward in (*boxes, *others)] == [True] * 2 + [False] * 4
    assert reads_boxes([*others, boxes[0]])


@pytest.mark.parametrize("reward", ["math", "mixed"])
def test_a_run_says_so_once_it_has_seen_enough(reward, tmp_path, capsys):
    functions = {"math": MathVerifyReward(num_workers=1), "mixed": parity_reward}[reward]
    shape = {"per_device_train_batch_size": 32, "steps_per_generation": 1, "max_steps": 3}
    trainer = tiny_trainer(tmp_path, reward_funcs=functions, **shape)
    per_batch = trainer.args.generation_batch_size
    assert FIRST % per_batch == 0
    seen = []
    real = trainer._advantages

    def counted(*given):
        result = real(*given)
        seen.append("All rewards of the first 64 rollouts are 0" in capsys.readouterr().out)
        return result

    trainer._advantages = counted
    trainer.train()
    if reward == "math":
        assert [i for i, told in enumerate(seen, 1) if told] == [FIRST // per_batch]
    else:
        assert not any(seen)


@pytest.mark.parametrize("count", [0, 3])
def test_check_shows_what_it_samples_and_why_it_scores_nothing(count, recipe, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", recipe(), *(["--draw", str(count)] if count else [])]) == 0
    said = capsys.readouterr().out
    assert said.count("--- reward 0, ") == count
    assert ("All rewards of the first 3 rollouts are 0" in said) == (count == 3)
    assert ("no \\boxed{}, from which the answer is read: 3 of 3" in said) == (count == 3)


def no_score(completions, **kwargs):
    return [None] * len(completions)


@pytest.mark.parametrize(("steps", "ends"), [(2, 2), (40, 8)])
def test_a_run_without_any_score_stops_with_the_reason(steps, ends, tmp_path):
    """After 64 rollouts, of which two steps train 16; a shorter run at its end."""
    trainer = tiny_trainer(tmp_path, reward_funcs=no_score, max_steps=steps)
    before = flat(trainer.model.parameters()).clone()
    with pytest.raises(RewardFailed, match=r"no function scored a rollout \(no_score\)"):
        trainer.train()
    assert 0 < trainer.state.global_step <= ends
    assert before.equal(flat(trainer.model.parameters())), "the policy has not moved"
