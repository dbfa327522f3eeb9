"""Bad input to the Python API: one clear message that names the thing and the way out, before a model is loaded."""

import pytest

from basis_rl.baselines import Rloo, build_baseline
from basis_rl.rewards import MathVerifyReward
from basis_rl.trainer import BasisConfig, BasisTrainer
from basis_rl.trainer.config import with_objective
from basis_rl.trainer.preflight import (
    baseline_of_settings,
    check_baseline_fits,
    check_dataset,
    check_single_turns,
    required_columns,
    run_context,
)
from basis_rl.values import ValueTable
from tests.support.tiny import config, parity_reward, sums, table_for, tiny_model, tiny_tokenizer


def build(
    tmp_path, dataset=None, reward=parity_reward, baseline="rloo", objective=None, model="no/such-model", **settings
):
    return BasisTrainer(
        model=model,
        reward_funcs=reward,
        args=config(tmp_path, **settings),
        train_dataset=sums() if dataset is None else dataset,
        processing_class=tiny_tokenizer(),
        baseline=baseline,
        objective=objective,
    )


class NeedsMore(Rloo):
    requires = frozenset({"hidden_states"})


CASES = {
    "unknown baseline": ({"baseline": "rlo"}, "Did you mean 'rloo'"),
    "unknown objective": ({"objective": "gsp"}, "Unknown objective 'gsp'. Did you mean 'gspo'"),
    "undeclared objective": (
        {"objective": "tests.support.tiny:parity_reward"},
        r"'tests.support.tiny:parity_reward' does not declare .*objective\(token_advantages=True\)",
    ),
    "own objective and loss_type": (
        {"objective": "examples.custom_objective:simple", "loss_type": "bnpo"},
        "'examples.custom_objective:simple' is not one of TRL's losses, but loss_type='bnpo' is set. Drop one",
    ),
    "tokens averaged away": ({"baseline": "otb", "objective": "luspo"}, "'otb' gives an advantage to each token"),
    "objective against loss_type": ({"objective": "gspo", "loss_type": "bnpo"}, "loss_type='bnpo' is set"),
    "group too small": (
        {"baseline": "rloo", "num_generations": 1},
        "'rloo' needs at least 2 rollouts per prompt, but num_generations is 1.*none, batch_mean, .*basis",
    ),
    "field not collected": ({"baseline": NeedsMore()}, r"requires \['hidden_states'\]"),
    "rollout weights without vLLM": (
        {"baseline": build_baseline("otb", max_rollout_weight=2.0)},
        "'otb' requires the weights of the rollout correction .* with use_vllm",
    ),
    "rollout weights without their correction": (
        {
            "baseline": build_baseline("otb", max_rollout_weight=2.0),
            **{"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False},
        },
        "'otb' requires the weights of the rollout correction .* with use_vllm",
    ),
    "difficulty column": ({"difficulty_column": "level"}, "difficulty_column: .* has no 'level', only"),
    "too many difficulties": (
        {"difficulty_column": "solution", "dataset": sums(30)},
        "'solution' has 30 different values",
    ),
    "dataset too small": ({"dataset": sums(3)}, "has 3 prompts, but one generation batch takes 4"),
    "no KL in this baseline's reward": (
        {"baseline": build_baseline("basis", values=table_for(sums())), "beta": 0.1, "kl_placement": "reward"},
        "'basis' does not take a KL penalty in the reward. Set kl_placement to 'loss', or take one of .*reinforce_pp",
    ),
    "no prompt column": ({"dataset": sums().remove_columns("prompt")}, "has no column 'prompt', only"),
    "no solution column": (
        {"dataset": sums().remove_columns("solution"), "reward": MathVerifyReward()},
        r"'math_verify_reward' reads the columns \['solution'\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_before_the_model_is_loaded(case, tmp_path):
    # The model does not exist: a check that came after loading it would fail with another error.
    arguments, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **arguments)


def with_bad_golds():
    return sums().map(lambda row, i: {"solution": "" if i in (2, 5) else row["solution"]}, with_indices=True)


def test_golds_that_do_not_verify_are_listed(tmp_path):
    with pytest.raises(
        ValueError, match=r"2 of 16 golds do not verify .*\n  row 2: ''\n  row 5: ''\n.*on_invalid_gold: drop"
    ):
        build(tmp_path, dataset=with_bad_golds(), reward=MathVerifyReward())


def test_golds_that_do_not_verify_are_dropped_on_request(tmp_path, tiny_path):
    trainer = build(
        tmp_path, dataset=with_bad_golds(), reward=MathVerifyReward(), model=str(tiny_path), on_invalid_gold="drop"
    )
    assert len(trainer.train_dataset) == 14
    assert "" not in trainer.train_dataset["solution"]


def test_a_table_must_know_every_prompt_and_fit_the_run(tmp_path, tiny_path):
    table = table_for(sums(15))
    with pytest.raises(ValueError, match="1 of 16 training prompts are not in the value table"):
        build(tmp_path, baseline=build_baseline("basis", values=table), model=str(tiny_path))
    full = table_for(sums())
    rewards = {p: full.rewards(p) for p in full.prompt_ids}
    other = ValueTable.from_rewards(rewards, provenance={"revision": "1234", "temperature": 0.3})
    with pytest.raises(
        ValueError, match=r"built for another run:\n  revision: table .*\n  temperature: table 0.3, run 1.0"
    ):
        build(tmp_path, baseline=build_baseline("basis", values=other), model=str(tiny_path))
    build(tmp_path, baseline=build_baseline("basis", values=other, accept_mismatch=True), model=str(tiny_path))


def test_another_chat_template_is_noticed(tmp_path, tiny_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rewards = {p: table_for(sums()).rewards(p) for p in sums()["prompt_id"]}
    table = ValueTable.from_rewards(rewards, provenance={"chat_template": "something else"})
    assert tiny_tokenizer().chat_template != template
    with pytest.raises(ValueError, match='chat_template: table "something else", run '):
        build(tmp_path, baseline=build_baseline("basis", values=table), model=str(tiny_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 0}, "num_generations must be at least 1"),
        ({"num_generations": 3}, "must be divisible by num_generations"),
        ({"on_invalid_gold": "ignore"}, "'error' or 'drop'"),
        ({"kl_placement": "prior"}, "kl_placement must be 'loss' or 'reward'"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3"),
        ({"kl_estimator": "k1"}, "no pull towards the reference"),
        (
            {"num_generations": 1, "vllm_importance_sampling_clip_min": 4.0, "vllm_importance_sampling_clip_max": 3.0},
            "must be less than",
        ),
    ],
)
def test_settings_that_contradict_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


def test_ranks_wait_as_long_as_the_server_may_take(tmp_path):
    patient = {"vllm_request_timeout": 5000.0, "vllm_recovery_timeout": 4000.0, "vllm_server_timeout": 100.0}
    args = config(tmp_path, use_vllm=True, vllm_mode="server", **patient)
    assert args.ddp_timeout == 9400
    assert config(tmp_path, use_vllm=True, vllm_mode="server", **patient, ddp_timeout=99_999).ddp_timeout == 99_999
    assert config(tmp_path, use_vllm=True, vllm_mode="colocate").ddp_timeout == config(tmp_path).ddp_timeout


def test_prefetch_needs_a_server_and_importance_weights(tmp_path):
    with pytest.raises(ValueError, match="async_prefetch needs a vLLM server"):
        config(tmp_path, async_prefetch=True)
    server = {"use_vllm": True, "vllm_mode": "server", "async_prefetch": True}
    with pytest.raises(ValueError, match="right only with their importance weights"):
        config(tmp_path, **server, vllm_importance_sampling_correction=False)
    assert config(tmp_path, **server).async_prefetch


def test_estimators_of_kl_have_a_default_for_each_place(tmp_path):
    assert config(tmp_path).kl_estimator == "k3"
    assert config(tmp_path, kl_placement="reward").kl_estimator == "k1"
    assert config(tmp_path, kl_placement="reward", kl_estimator="k2").kl_estimator == "k2"


def test_secrets_in_dictionaries_are_not_reported(tmp_path):
    args = config(tmp_path, model_init_kwargs={"token": "hf_secretsecretsecret", "revision": "r"})
    assert "hf_secret" not in str(args.to_dict())
    assert args.to_dict()["model_init_kwargs"]["revision"] == "r"
    assert args.model_init_kwargs["token"] == "hf_secretsecretsecret"


def test_groups_of_the_minimum_and_datasets_of_one_batch_are_enough(tmp_path):
    args = config(tmp_path, num_generations=2, per_device_train_batch_size=8)
    check_baseline_fits(Rloo(), args)
    check_dataset(sums(args.generation_batch_size // 2), args, [parity_reward])
    with pytest.raises(ValueError, match="has 7 prompts, but one generation batch takes 8"):
        check_dataset(sums(7), args, [parity_reward])


def test_columns_with_a_default_are_not_asked_for():
    def reward(prompts, completions, solution, level=None, *, source, hint="", **kwargs): ...

    assert required_columns(reward) == {"solution", "source"}


def test_what_is_known_of_a_run(tmp_path):
    tokenizer = tiny_tokenizer()
    args = config(tmp_path, temperature=0.7, reward_weights=[0.5], chat_template_kwargs={"enable_thinking": False})
    found = run_context(tiny_model(tokenizer).config, tokenizer, sums(), [parity_reward], args)
    assert list(found.prompts) == list(sums()["prompt_id"])
    assert len(set(found.prompts.values())) == 16
    assert found.provenance["temperature"] == 0.7
    assert found.provenance["reward"] == "0.5*parity_reward"
    assert found.provenance["max_completion_length"] == 6


@pytest.mark.parametrize("column", ["image", "images"])
def test_prefetch_takes_neither_images_nor_streams_nor_tools(column):
    check_single_turns(sums(), {})
    with pytest.raises(ValueError, match="does not work with images"):
        check_single_turns(sums().add_column(column, ["x"] * 16), {})
    with pytest.raises(ValueError, match="a streamed dataset"):
        check_single_turns(sums().to_iterable_dataset(), {})
    with pytest.raises(ValueError, match="does not work with tools"):
        check_single_turns(sums(), {"tools": [len]})


def test_args_must_be_ours(tmp_path):
    from trl import GRPOConfig

    with pytest.raises(ValueError, match="args must be a BasisConfig, got GRPOConfig"):
        BasisTrainer("x", parity_reward, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), sums())
    assert issubclass(BasisConfig, GRPOConfig)


def test_the_callers_settings_are_not_changed(tmp_path):
    args = config(tmp_path)
    tokenizer = tiny_tokenizer()
    trainer = BasisTrainer(
        tiny_model(tokenizer), parity_reward, args, sums(), processing_class=tokenizer, objective="gspo"
    )
    assert trainer.loss_type == "grpo"
    assert trainer.importance_sampling_level == "sequence"
    assert args.loss_type == "dapo"


TRLS = [
    ({"scale_rewards": False}, "dr_grpo", {}),
    ({"scale_rewards": "none"}, "dr_grpo", {}),
    ({"scale_rewards": "batch"}, "grpo", {"over": "batch"}),
    ({"scale_rewards": True}, "grpo", {}),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "gdpo", {}),
]


@pytest.mark.parametrize(("settings", "name", "params"), TRLS)
def test_trls_own_settings_name_the_baseline_that_is_equal(settings, name, params, tmp_path):
    args = config(tmp_path, **settings)
    wanted = build_baseline(name, **params)
    for given in (build_baseline("grpo"), wanted):
        found = baseline_of_settings(given, args)
        assert (type(found), found.parameters) == (type(wanted), wanted.parameters)


@pytest.mark.parametrize("settings", [{"scale_rewards": "none"}, {"multi_objective_aggregation": "normalize_then_sum"}])
def test_trls_own_settings_do_not_go_with_another_baseline(settings, tmp_path):
    for baseline in (build_baseline("rloo"), build_baseline("grpo", eps=1.0)):
        with pytest.raises(ValueError, match="Leave one of them out"):
            baseline_of_settings(baseline, config(tmp_path, **settings))
    with pytest.raises(ValueError, match="scale_rewards must be"):
        baseline_of_settings(build_baseline("grpo"), config(tmp_path, scale_rewards="prompt"))


def test_cispo_has_a_bound_above_1(tmp_path):
    for args, objective in ((config(tmp_path), "cispo"), (config(tmp_path, loss_type="cispo"), None)):
        assert with_objective(args, objective)[0].epsilon_high == 5.0
        assert args.epsilon_high is None
    assert with_objective(config(tmp_path, epsilon_high=3.0), "cispo")[0].epsilon_high == 3.0
    with pytest.raises(ValueError, match=r"every importance weight would be 0\.2"):
        with_objective(config(tmp_path, epsilon_high=0.2), "cispo")
    assert with_objective(config(tmp_path), "grpo")[0].epsilon_high is None


def test_an_environment_may_make_the_prompts(tmp_path):
    rows = sums().remove_columns(["prompt"])
    check_dataset(rows, config(tmp_path), [], environments=True)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        check_dataset(rows, config(tmp_path), [])
