"""What a run tells its rewards about its prompts, when their processes start, and what older rules have left."""

import logging

import pytest
from transformers import AutoModelForCausalLM

from basis_rl.recipe.build import load_config_and_tokenizer, load_training_data, plan_recipe
from basis_rl.recipe.file import parse_recipe
from basis_rl.rewards import ChoiceReward, ExactReward, FormatReward, MathVerifyReward
from basis_rl.rewards.math.reward import RULES
from basis_rl.trainer.plan import with_data
from basis_rl.values import ValueTable
from tests.cli.conftest import recipe as recipe
from tests.support.tiny import named_baseline, sums, tiny_model, tiny_tokenizer, tiny_trainer

OWN = {"reward_funcs": ["math_verify"]}
WARNING = r"No prompt asks for a \boxed{}"
BOXED = {"prompt_template": r"{prompt} Use \boxed{}."}
THINKS = "{{ '</think>' }}"


def warned(caplog):
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.parametrize(
    ("changes", "place", "notes"),
    [
        ({}, "anywhere", 1),
        (BOXED, "box", 0),
        ({"system_prompt": r"Use \boxed{}."}, "box", 0),
        ({"reward_kwargs": {"answer_in": "box"}}, "box", 0),
        ({"reward_kwargs": {"answer_in": "tag"}}, "tag", 0),
        ({"reward_kwargs": {"rules": "plain"}}, "anywhere", 0),
    ],
)
def test_a_recipe_whose_prompts_ask_for_no_box_takes_answers_anywhere(recipe, caplog, changes, place, notes):
    parsed = parse_recipe([recipe(**changes)])
    plan = plan_recipe(parsed)
    _, tokenizer = load_config_and_tokenizer(parsed.model, parsed.args)
    with caplog.at_level(logging.WARNING):
        with_data(plan, load_training_data(parsed, tokenizer, plan), processing_class=tokenizer)
    (reward,) = plan.reward_funcs
    assert reward.place == place
    assert len(warned(caplog)) == notes


def test_the_chat_template_may_ask_for_it(recipe, caplog):
    parsed = parse_recipe([recipe()])
    plan = plan_recipe(parsed)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = r"{{ 'Put it into \\boxed{}.' }}" + tokenizer.chat_template
    with_data(plan, load_training_data(parsed, tokenizer, plan), processing_class=tokenizer)
    assert plan.reward_funcs[0].place == "box"


@pytest.mark.parametrize("given", [MathVerifyReward, lambda: "math_verify"])
def test_from_python_there_is_one_warning_and_the_box_stays(tmp_path, caplog, given):
    with caplog.at_level(logging.WARNING):
        trainer = tiny_trainer(tmp_path, reward_funcs=given())
    assert len(warned(caplog)) == 1
    assert trainer.functions[0].place == "box"


@pytest.mark.parametrize("thinks", [True, False])
def test_rewards_of_answers_know_whether_the_template_thinks(tmp_path, thinks):
    tokenizer = tiny_tokenizer()
    if thinks:
        tokenizer.chat_template = tokenizer.chat_template + "{% if false %}" + THINKS + "{% endif %}"
    rewards = [MathVerifyReward(num_workers=1), ExactReward(), ChoiceReward(), FormatReward()]
    tiny_trainer(tmp_path, model=tiny_model(tokenizer), processing_class=tokenizer, reward_funcs=rewards,
                 reward_weights=[1.0] * 4, on_invalid_gold="drop", train_dataset=letters())  # fmt: skip
    assert [reward.thinks for reward in rewards[:3]] == [thinks] * 3
    assert ["after the thought" in reward.version for reward in rewards[:3]] == [thinks] * 3


def letters():
    """Questions that show their options."""

    def lettered(row, index):
        return {"prompt": f"{row['prompt']}\nA. one\nB. two", "solution": "ABCD"[index % 4]}

    return sums().map(lettered, with_indices=True)


def test_the_workers_start_while_the_model_is_loaded(tmp_path, tiny_path, monkeypatch):
    order = []

    class Starts(MathVerifyReward):
        def start(self):
            order.append("workers")

    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained",
        lambda *args, **kwargs: order.append("model") or load(*args, **kwargs),
    )
    tiny_trainer(tmp_path, model=tiny_path, reward_funcs=Starts(num_workers=1))
    assert order[0] == "workers"


def test_tables_and_checkpoints_of_older_rules_are_refused_by_name(tmp_path):
    reward = MathVerifyReward(num_workers=1)
    settings = {"reward_funcs": reward, "save_strategy": "steps", "save_steps": 1}
    trainer = tiny_trainer(tmp_path / "run", **settings, max_steps=1)
    trainer.train()
    older = type("Older", (MathVerifyReward,), {"version": reward.version.replace(f"rules {RULES}", "rules 0")})
    named = rf'reward: "math_verify_reward\[.*rules {RULES}.*\]", now "math_verify_reward\[.*rules 0.*\]"'
    again = tiny_trainer(tmp_path / "run", **{**settings, "reward_funcs": older(num_workers=1)}, max_steps=2)
    with pytest.raises(ValueError, match=named):
        again.train(resume_from_checkpoint=True)
    baseline = named_baseline("basis", sums())
    assert isinstance(baseline.values, ValueTable)
    baseline.values.provenance["reward"] = "math_verify_reward[math-verify 0.9.0, rules 0]"
    with pytest.raises(ValueError, match=rf'(?s)table ".*rules 0\]", run ".*rules {RULES}.*\]"'):
        tiny_trainer(tmp_path / "table", baseline, reward_funcs=reward)
