"""Environments: one episode before a model is loaded, and the problems that they make, by their ids."""

import math
import re
from functools import partial

import pytest

from basis_rl.baselines import BasisHistory
from basis_rl.environments import build_environment, play, reset_columns
from basis_rl.identity import played_id, row_id
from basis_rl.rewards.base import declared_range
from basis_rl.trainer.plan import plan_run, reward_range_of, with_data
from tests.support import tooled
from tests.support.tiny import Keeps, config, tiny_trainer


class Hidden:
    """A number, which the seed decides."""

    reward_range = (0.0, 2.0)

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def reset(self, seed, **row):
        self.number = seed % self.size
        self.found = False
        return f"Find number {seed}."

    def get_reward(self):
        return 2.0 * self.found

    def guess(self, number: int) -> str:
        """Guess it.

        Args:
            number: What you guess.
        """
        self.found = number == self.number
        return "right" if self.found else "wrong"

    async def peek(self, where: str, often: int = 2) -> str:
        """Look.

        Args:
            where: The place.
            often: How often.
        """
        raise OSError(f"dark at {where}")


class Own(Hidden):
    """It draws its problems itself."""

    drawn = 0

    def reset(self, **row):
        Own.drawn += 1
        return super().reset(seed=Own.drawn)


def lengths(completions, environments, **kwargs):
    return [float(len(messages) + each.size) for messages, each in zip(completions, environments, strict=True)]


def planned(folder, environment, dataset=None, rewards=None, baseline="rloo", sampler="uniform", **settings):
    plan = plan_run("m", rewards, config(folder, **settings), baseline, None, sampler, environment_factory=environment)
    return with_data(plan, dataset, processing_class=tooled.tokenizer())


def test_an_episode_is_what_the_environment_does_when_it_is_called_by_hand():
    row = {"seed": 4, "prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go. "}]}
    episode = play(partial(Hidden, size=3), row, [lengths])
    by_hand = Hidden(3)
    said = by_hand.reset(**row)
    assert episode.prompt == [row["prompt"][0], {"role": "user", "content": f"Go. {said}"}]
    calls = [each["tool_calls"][0]["function"] for each in episode.completion if each.get("tool_calls")]
    # What has a default is left out.
    assert calls == [{"name": "guess", "arguments": {"number": 1}}, {"name": "peek", "arguments": {"where": "a"}}]
    answers = [each["content"] for each in episode.completion if each["role"] == "tool"]
    assert answers == [by_hand.guess(1), "{'error': 'dark at a'}"]
    assert episode.completion[-1]["role"] == "assistant"
    assert episode.rewards == {"Hidden": by_hand.get_reward(), "lengths": len(episode.completion) + 3.0}
    assert by_hand.get_reward() == 2.0
    assert episode.repeats
    assert not play(Own, {}).repeats
    assert math.isnan(play(Hidden, row, [lambda completions, **kwargs: [None]]).rewards["<lambda>"])
    assert [tool["function"]["name"] for tool in episode.tools] == ["guess", "peek"]


class NoReset:
    def get_reward(self):
        return 1.0


class Unmade:
    def __init__(self):
        raise ConnectionError("nobody at port 1")


class Failing:
    def reset(self, **row):
        return self.missing


class Undescribed:
    def reset(self, **row): ...

    def get_reward(self):
        return 0.0

    def guess(self, number):
        return number


class Wordy(Hidden):
    def get_reward(self):
        return "much"


class Unpaid:
    def reset(self, **row): ...


BROKEN = {
    NoReset: "'NoReset.reset' with the columns seed: AttributeError: .* has no attribute 'reset'",
    Unmade: r"'Unmade' cannot be made: ConnectionError: nobody at port 1 \(test_environments.py, line \d+\)",
    Failing: r"'Failing.reset' .*: AttributeError: .*'missing' \(test_environments.py, line \d+\)",
    Undescribed: "a model cannot be told how to call the tools of 'Undescribed'",
    Wordy: "'Wordy.get_reward': WrongScores: returned 'much'",
    Unpaid: "nothing gives a reward. Give it a method `get_reward`, or set reward_funcs",
}


@pytest.mark.parametrize("environment", BROKEN, ids=lambda each: each.__name__)
def test_a_broken_environment_is_one_message_before_a_model_is_loaded(environment, tmp_path):
    with pytest.raises(ValueError, match=f"^environment: {BROKEN[environment]}"):
        planned(tmp_path, environment)


def test_of_several_environments_all_mistakes_are_told_and_rows_name_them(tmp_path):
    rows = [{"seed": i, "environment": "a" if i % 2 else "b"} for i in range(8)]
    plan = planned(tmp_path, {"a": Hidden, "b": partial(Hidden, 2), "c": Unmade}, rows)
    assert [each.rewards for each in plan.episodes] == [{"Hidden": 2.0}, {"Hidden": 0.0}]
    with pytest.raises(ValueError, match="2 things are wrong") as raised:
        planned(tmp_path, {"a": Failing, "b": Unmade}, rows)
    assert len(raised.value.mistakes) == 2
    with pytest.raises(ValueError, match="of a; not 'b'"):
        planned(tmp_path, {"a": Hidden}, rows)


def test_a_template_without_tools_is_told_with_the_way_out(tmp_path):
    tok = tooled.tokenizer()
    tok.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    plan = plan_run("m", None, config(tmp_path), "rloo", environment_factory=Hidden)
    with pytest.raises(ValueError, match=r"does not show tool calls .* `chat_template: tools`"):
        with_data(plan, None, processing_class=tok)


def test_the_range_of_an_environments_own_reward_counts(tmp_path):
    assert reward_range_of(planned(tmp_path, Hidden)) == (0.0, 2.0)
    lengths.reward_range = (0.0, 9.0)
    both = planned(tmp_path, Hidden, rewards=lengths, reward_weights=[0.5])
    assert reward_range_of(both) == declared_range([lengths, Hidden], [0.5, 1.0]) == (0.0, 6.5)
    del lengths.reward_range
    assert reward_range_of(planned(tmp_path, Hidden, rewards=lengths)) is None


def test_a_class_behind_a_name_is_not_made_to_see_what_it_reads():
    assert reset_columns(partial(Unmade, port=1)) == frozenset()
    made = build_environment(f"{__name__}:Hidden", {"size": 5})
    assert made().size == 5
    assert reset_columns(made) == {"seed"}
    named = build_environment({"a": f"{__name__}:Hidden", "b": f"{__name__}:Hidden"}, {"b": {"size": 2}})
    assert [each().size for each in named.values()] == [3, 2]


@pytest.mark.parametrize(
    ("named", "params", "message"),
    [
        ("no.such:Thing", {}, "The environment 'no.such:Thing' cannot be imported"),
        (f"{__name__}:BROKEN", {}, "cannot be called with .* is not a callable"),
        (f"{__name__}:Hidden", {"sise": 1}, "cannot be called with .* unexpected keyword argument 'sise'"),
        ({"a": f"{__name__}:Hidden"}, {"b": {}}, "'b' is none of the environments a"),
    ],
)
def test_a_name_or_a_parameter_that_is_wrong_is_told(named, params, message):
    with pytest.raises(ValueError, match=message):
        build_environment(named, params)


def build(folder, environment, baseline="rloo", **given):
    """A trainer without a dataset and without reward functions."""
    own = {"train_dataset": None, "reward_funcs": None, "processing_class": tooled.tokenizer()}
    shape = {"num_generations": 1, "max_steps": 1, "steps_per_generation": 1, **given}
    return tiny_trainer(folder, baseline, Keeps, environment_factory=environment, **own, **shape)


@pytest.mark.parametrize("sampler", ["uniform", "frontier"])
def test_seeds_are_problems_that_beliefs_and_samplers_know(sampler, tmp_path):
    """No dataset and no prompts: each seed has an id, which its rollouts of later steps have too, and a text."""
    baseline = BasisHistory(prior="text")
    trainer = build(tmp_path, Hidden, baseline, prompt_sampler=sampler, max_steps=2)
    trainer.train()
    drawn = [name for batch, _ in trainer.kept for name in batch.prompt_ids]
    texts = [text for batch, _ in trainer.kept for text in batch.prompt_texts]
    seeds = [int(re.fullmatch(r"Find number (\d+)\.", text)[1]) for text in texts]
    assert drawn == [row_id({"seed": seed}, trainer.reads) for seed in seeds]
    assert len(drawn) == len(set(drawn)) == 16
    assert set(drawn) <= set(baseline._row)
    assert set(drawn) <= set(baseline.text_prior._met)
    assert trainer.state.log_history[-2]["sampler/coverage"] == pytest.approx(16 / 1000)


def test_problems_that_an_environment_draws_itself_have_the_ids_of_their_prompts(tmp_path):
    trainer = build(tmp_path, Own, BasisHistory())
    assert trainer.draws_problems
    Own.drawn = 0
    trainer.train()
    ((batch, _),) = trainer.kept
    asked = [[{"role": "user", "content": f"Find number {i + 1}."}] for i in range(8)]
    assert len(set(batch.prompt_ids)) == 8
    rows = list(trainer.train_dataset)
    possible = [{played_id(row, trainer.reads, prompt) for row in rows} for prompt in asked]
    assert all(name in names for name, names in zip(batch.prompt_ids, possible, strict=True))
    assert "sampler/coverage" not in trainer.state.log_history[0]


def test_groups_and_samplers_are_told_of_problems_that_do_not_come_again(tmp_path, caplog):
    planned(tmp_path, Own, num_generations=4)
    assert "such as a `seed`" in caplog.text
    assert "rollouts of a group are of different problems" in caplog.text
    caplog.clear()
    planned(tmp_path, Own, baseline="basis_history", num_generations=1)
    planned(tmp_path, Hidden, num_generations=4)
    assert not caplog.text
    with pytest.raises(ValueError, match=r"says other things.* leave out prompt_sampler 'frontier'"):
        planned(tmp_path, Own, sampler="frontier")
    planned(tmp_path, Hidden, sampler="frontier")


def test_a_resume_tells_of_another_environment(tmp_path, capsys):
    settings = {"save_strategy": "steps", "save_steps": 1, "num_generations": 4}

    def trainer(size, steps):
        made = build_environment(f"{__name__}:Hidden", {"size": size})
        return build(tmp_path, made, max_steps=steps, **settings)

    trainer(3, 1).train()
    trainer(4, 2).train(resume_from_checkpoint=True)
    assert re.search(r"environment: .*size=3.*now .*size=4", capsys.readouterr().out)
