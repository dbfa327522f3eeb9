"""Rewards by name: what a recipe says becomes objects, or one clear message; and two of them train together."""

import pytest
import yaml
from accelerate import Accelerator

from basis_rl.recipe.build import build_rewards
from basis_rl.recipe.file import parse_recipe
from basis_rl.rewards import FunctionReward, MathVerifyReward
from basis_rl.rewards.base import called, declared_range, read_columns, required_columns
from basis_rl.rewards.call import call
from basis_rl.rewards.registry import build_reward
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.rewarding import RewardGuard
from basis_rl.values.provenance import reward_code, reward_identity
from tests.rewards import user_functions
from tests.support.tiny import config, sums, tiny_model, tiny_tokenizer

MINE = "tests.rewards.user_functions"
ARGS = ["--model_name_or_path", "none", "--dataset_name", "reasoning_gym:chain_sum", "--report_to", "none",
        "--bf16", "false", "--use_cpu", "true", "--max_completion_length", "50"]  # fmt: skip


def recipe(folder, text, *arguments):
    (folder / "recipe.yaml").write_text(text)
    return parse_recipe([str(folder / "recipe.yaml"), *ARGS, "--output_dir", str(folder / "out"), *arguments])


def test_a_recipe_with_several_rewards(tmp_path):
    text = (
        "reward_funcs: [math_verify, format, overlong, tests.rewards.user_functions.Scaled]\n"
        "reward_weights: [1.0, 0.1, 1.0, 0.5]\n"
        "reward_kwargs:\n  format: {form: box}\n  overlong: {cache: 20}\n  Scaled: {factor: 3.0}\n"
    )
    parsed = recipe(tmp_path, text, "--reward_kwargs.overlong.cache", "10", "--reward_kwargs.math_verify.timeout", "9")
    rewards = build_rewards(parsed)
    assert [r.__name__ for r in rewards] == ["math_verify_reward", "format_reward", "overlong_reward", "scaled"]
    assert rewards[1].form == "box"
    assert (rewards[2].cache, rewards[2].max_completion_length) == (10, 50)
    assert rewards[3].factor == 3.0
    assert parsed.args.reward_weights == [1.0, 0.1, 1.0, 0.5]
    again = recipe(tmp_path, yaml.safe_dump(parsed.resolved))
    assert again.run.reward_kwargs == parsed.run.reward_kwargs
    assert reward_identity(build_rewards(again), [1.0] * 4) == reward_identity(rewards, [1.0] * 4)


def test_a_single_reward_takes_its_parameters_flat_or_by_name(tmp_path):
    for text in ("{cache: 7}", "{overlong: {cache: 7}}"):
        (reward,) = build_rewards(recipe(tmp_path, f"reward_funcs: overlong\nreward_kwargs: {text}\n"))
        assert (reward.cache, reward.max_completion_length) == (7, 50)
    (default,) = build_rewards(recipe(tmp_path, "reward_kwargs: {timeout: 7}\n"))
    assert isinstance(default, MathVerifyReward)


def test_a_function_in_the_pool_by_its_path(tmp_path):
    text = f"reward_funcs: ['pool:{MINE}:right']\nreward_kwargs: {{right: {{over_limit: 3, num_workers: 1}}}}\n"
    (reward,) = build_rewards(recipe(tmp_path, text))
    assert (type(reward), reward.over_limit) == (FunctionReward, 3)
    reward.close()


@pytest.mark.parametrize("name", ["scaled_now", "scaled_later"])
def test_a_function_of_ones_own_takes_arguments(tmp_path, name):
    rewards = [
        build_rewards(recipe(tmp_path, f"reward_funcs: [{MINE}.{name}]\nreward_kwargs: {{factor: {factor}}}\n"))[0]
        for factor in (2.0, 3.0)
    ]
    assert [each.__name__ for each in rewards] == [name] * 2
    assert [required_columns(each) for each in rewards] == [{"solution"}] * 2
    rows = [{"prompt": "p", "solution": "abc"}, {"prompt": "q", "solution": "a"}]
    said = [("x", [1], False)] * 2
    assert [call(each, rows, said) for each in rewards] == [[6.0, 2.0], [9.0, 3.0]]
    assert reward_code([rewards[0]]) != reward_code([rewards[1]])
    # A column of that name is none of what it reads.
    assert [call(each, [{**row, "factor": 9.0} for row in rows], said) for each in rewards] == [[6.0, 2.0], [9.0, 3.0]]
    assert "factor" not in read_columns(rewards)
    (guarded,) = RewardGuard(Accelerator(cpu=True)).guarded([rewards[0]], [name])
    assert called(guarded, {"completions": ["x"], "solution": ["abc"]}) == [6.0]


def test_a_function_with_arguments_is_what_it_declares_of_itself():
    first, second = (build_reward(f"{MINE}.declared", {"scale": scale}) for scale in (2.0, 3.0))
    assert read_columns([first]) == {"tests"}
    assert declared_range([first]) == (0, 5)
    assert len({reward_code([each]) for each in (first, second, user_functions.declared)}) == 3
    assert len({reward_identity([each]) for each in (first, second, user_functions.declared)}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward_funcs: [math_verfy]", r"Unknown reward function 'math_verfy'\. Did you mean 'math_verify'.*Known:"),
        ("reward_funcs: [format, format]", "'format' is there twice"),
        ("reward_funcs: [format, exact]\nreward_weights: [1]", "reward_weights has 1 entries for the 2 reward_funcs"),
        ("reward_funcs: [format, exact]\nreward_kwargs: {form: box}", "'form' is none of .*mean 'format'"),
        ("reward_funcs: [format, exact]\nreward_kwargs: {format: {frm: a}}", "no parameter 'frm'. Did you mean 'form'"),
        (f"reward_funcs: ['pool:{MINE}:right']\nreward_kwargs: {{time: 3}}", "no parameter 'time'.*num_workers"),
        (f"reward_funcs: [{MINE}.gone]", "cannot be imported"),
        (f"reward_funcs: [{MINE}.NUMBER]", "is an int, not a function"),
        (f"reward_funcs: [{MINE}.scaled_now]\nreward_kwargs: {{fcator: 1}}", "no parameter 'fcator'. Did you mean"),
        (f"reward_funcs: [{MINE}.Scaled]\nreward_kwargs: {{factr: 1}}", "no parameter 'factr'. Did you mean 'fac"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_clear_message(tmp_path, text, message):
    parsed = recipe(tmp_path, text + "\n")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build_rewards(parsed)


# A parameter that is out of its range, for each reward.
OUT_OF_RANGE = {
    "math_verify": [{"num_workers": 0}, {"num_workers": 1.5}, {"timeout": 0}, {"batch_timeout": 0}, {"rules": "strict"},
                    {"answer_in": "whole"}, {"answer_in": "tag", "rules": "plain"}],
    "code": [{"max_tests": 0}, {"processes": 0}, {"tolerance": -1}, {"timeout": 0}, {"memory_bytes": 0},
             {"num_workers": 0}, {"batch_timeout": 0}],
    "reasoning_gym": [{"threshold": 0.0}, {"threshold": 1.5}, {"answer_in": "bax"}, {"timeout": 0}, {"num_workers": 0}],
    "exact": [{"answer_in": "boxes"}],
    "choice": [{"letters": 4}, {"letters": "abc"}, {"letters": "AAB"}, {"gold_index": 2}, {"gold_index": True}],
    "format": [{"form": "thinkbox"}, {"pattern": "a", "form": "box"}, {"pattern": "(a"}, {"timeout": 0}],
    "overlong": [{"max_completion_length": 0}, {"cache": 0}, {"cache": 11}, {"max_completion_length": 10.5},
                 {"max_completion_length": "10"}, {"cache": True}],
    "judge": [{"concurrency": 0}, {"timeout": 0}, {"max_retries": -1}, {"batch_timeout": 0}, {"max_failed": 10},
              {"max_characters": 0}],
    f"pool:{MINE}:length": [{"timeout": -1}, {"wall_timeout": 0}, {"num_workers": 0}, {"on_error": "zero"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "params"), [(name, each) for name, rows in OUT_OF_RANGE.items() for each in rows])
def test_a_parameter_out_of_its_range_is_named_with_its_reward(name, params):
    needed = {"judge": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}.get(name, {})
    with pytest.raises(ValueError, match=f"^{name.partition(':')[0]}: .*{next(iter(params))}"):
        build_reward(name, {**needed, **params}, {"max_completion_length": 10})


def test_a_needed_parameter_that_nobody_knows():
    with pytest.raises(ValueError, match="'overlong' needs the parameter 'max_completion_length'"):
        build_reward("overlong", {})


@pytest.mark.parametrize("stop", ["stop_strings", "eos_token_id"])
def test_the_trainer_says_which_rollouts_the_length_limit_cut_off(tmp_path, stop):
    """One that ended at a stop string has no end token either."""
    seen = []

    def watching(completions, completion_ids, truncated, **kwargs):
        seen.extend(zip(completion_ids, truncated, strict=True))
        return [float(i % 2) for i in range(len(completions))]

    tokenizer = tiny_tokenizer()
    end = "7" if stop == "stop_strings" else tokenizer.convert_tokens_to_ids(["7", "8", "9"])
    args = config(tmp_path, max_steps=4, generation_kwargs={stop: end})
    data = {"train_dataset": sums(), "processing_class": tokenizer}
    trainer = BasisTrainer(model=tiny_model(), reward_funcs=watching, args=args, baseline="rloo", **data)
    # The function was tried once.
    seen.clear()
    trainer.train()
    for ids, cut in seen:
        assert cut is (len(ids) == args.max_completion_length if end == "7" else ids[-1] not in end)
    assert {cut for _, cut in seen} == {True, False}


def test_rewards_train_together_by_their_weights(tmp_path):
    weights = [1.0, 0.5, 2.0]
    rewards = [
        build_reward("overlong", {"cache": 5}, {"max_completion_length": 6}),
        build_reward(f"pool:{MINE}:length", {"num_workers": 1}),
        build_reward("exact", {"answer_in": "whole"}),
    ]
    args = config(tmp_path, reward_weights=weights, max_steps=2)
    data = {"train_dataset": sums(), "processing_class": tiny_tokenizer()}
    trainer = BasisTrainer(model=tiny_model(), reward_funcs=rewards, args=args, baseline="rloo", **data)
    trainer.train()
    (entry,) = (each for each in trainer.state.log_history if "rewards/length/mean" in each)
    parts = [entry[f"rewards/{name}/mean"] for name in ("overlong_reward", "length", "exact_reward")]
    assert entry["reward"] == pytest.approx(sum(w * part for w, part in zip(weights, parts, strict=True)), rel=1e-5)
    assert parts[0] < 0 < parts[1]
    assert {"reward/overlong/share", "reward/length/timeout", "reward/exact/no_answer"} <= set(entry)
    for reward in rewards:
        reward.close()
