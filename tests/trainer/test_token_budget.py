"""Micro-batches by tokens: every step has the rollouts and the gradient that it has with fixed rows."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config
from trl import ModelConfig

from basis_rl.estimate.footprint import model_size, setting_of
from basis_rl.estimate.memory import Launch, memory_parts
from basis_rl.trainer.micro_batches import by_tokens
from basis_rl.trainer.plan import Plan, check_adapter
from examples.custom_objective import simple
from tests.estimate.test_estimate_settings import SHAPE
from tests.support.architectures import small_model
from tests.support.ranks import Called
from tests.support.tiny import config, flat, tiny_model, tiny_trainer
from tests.trainer.budgeted import BUDGETS, CASES, main
from tests.trainer.test_rollout_correction import ALIGNED, BOUNDS, logged
from tests.trainer.test_rollout_correction import run as correct

# Tokens of the longest rollout with its prompt, at most.
LONGEST = 75
FEW = ["grpo, groups", "luspo, single", "gpg, groups", "KL of ours", "out of step", "a target"]
REST = [name for name in CASES if name not in FEW and name != "sharded"]
# One row or a few in a micro-batch, and all of a step.
ENDS = (BUDGETS[0], BUDGETS[-1])


def by_ranks(tmp_path_factory, model, names, budgets=BUDGETS):
    """By the number of ranks what each of them has found."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    ranks = Called(two, "tests.trainer.budgeted:main", two, 2, str(model), names, budgets, kind="ddp")
    return {1: [main(one, 1, str(model), names, budgets)], 2: ranks.found()}


@pytest.fixture(scope="module")
def few(tmp_path_factory, tiny_path):
    return by_ranks(tmp_path_factory, tiny_path, [*FEW, "resumed"])


@pytest.fixture(scope="module")
def rest(tmp_path_factory, tiny_path):
    return by_ranks(tmp_path_factory, tiny_path, REST, ENDS)


def assert_same_gradients(found, expected, tolerance=1e-6):
    assert len(found["gradients"]) == len(expected["gradients"]) >= 3
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        assert theirs.norm() > 1e-4
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


GIVEN = [(case, budget) for case in FEW for budget in BUDGETS]
GIVEN += [pytest.param(case, budget, marks=pytest.mark.long) for case in REST for budget in ENDS]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("case", "budget"), GIVEN)
def test_the_gradient_is_that_of_fixed_rows(case, budget, ranks, request):
    for found in request.getfixturevalue("few" if case in FEW else "rest")[ranks]:
        assert_same_gradients(found[case, budget], found[case, None])
        assert found[case, budget]["trained"] == found[case, None]["trained"]
        for ours, theirs in zip(found[case, budget]["logs"], found[case, None]["logs"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_pass_is_within_the_budget_or_of_one_row_and_gradients_meet_once_a_step(budget, ranks, few):
    several = False
    for case in FEW:
        for found in few[ranks]:
            sizes = found[case, budget]["sizes"]
            assert all(tokens <= budget or rows <= 1 for tokens, rows in sizes)
            several |= any(tokens < budget and rows > 1 for tokens, rows in sizes)
            assert all(tokens <= max(budget, LONGEST) for tokens in found[case, budget]["scored"])
            for synced in found[case, budget]["synced"][:-1]:
                assert synced == [False] * (len(synced) - 1) + [True] or ranks == 1
    assert several
    passes = [[len(found[case, budget]["sizes"]) for case in FEW] for found in few[ranks]]
    assert passes == [passes[0]] * ranks, "ranks call the model as often"


def test_ranks_are_balanced_and_rows_move_between_them(few):

    def imbalance(budget):
        tokens = [sum(size[0] for size in rank["grpo, groups", budget]["sizes"]) for rank in few[2]]
        return max(tokens) / sum(tokens) * 2

    assert imbalance(None) > 1.15
    assert all(imbalance(budget) < 1.1 for budget in BUDGETS)
    for rank in few[2]:
        for fixed, moved in zip(rank["grpo, groups", None]["mine"], rank["grpo, groups", 200]["mine"], strict=True):
            assert fixed - moved, "a rollout of this rank is trained on by the other one"
    counts = [[sum(rows.values()) for rows in rank["luspo, single", 200]["mine"]] for rank in few[2]]
    assert counts[0] != counts[1], "else the weights of unequal numbers of rows would not be tested"


def test_what_a_target_learns_is_in_the_order_of_the_batch(few):
    for ranks in (1, 2):
        for found in few[ranks]:
            expected = found["a target", None]["moments"]
            assert expected[0, 0, 0] > 0
            for budget in BUDGETS:
                torch.testing.assert_close(found["a target", budget]["moments"], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_in_the_middle_of_a_generation_batch(ranks, few, tiny_path):
    for found in few[ranks]:
        start, whole, again = found["resumed"]
        assert torch.equal(again, whole)
        assert not torch.equal(start, whole)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp2"])
def test_a_sharded_policy_has_the_norms_of_fixed_rows(kind, tmp_path, tiny_path):
    pytest.importorskip("deepspeed")
    ranks = Called(tmp_path, "tests.trainer.budgeted:main", tmp_path, 2, str(tiny_path), ["sharded"], ENDS, kind=kind)
    for found in ranks.found():
        assert ("FSDP" if kind == "fsdp2" else "DEEPSPEED") in found["sharded", None]["type"]
        expected = found["sharded", None]["logs"]
        assert min(row["grad_norm"] for row in expected) > 1e-3
        for budget in ENDS:
            assert len(found["sharded", budget]["logs"]) == len(expected) == 3
            for ours, theirs in zip(found["sharded", budget]["logs"], expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


CORRECTED = [("dapo", "token_truncate", 25), ("gpg", "sequence_mask", 25), ("vespo", "token_truncate", 10**6)]


@pytest.mark.parametrize(("objective", "mode", "budget"), CORRECTED)
def test_the_correction_of_the_engine_is_that_of_fixed_rows(objective, mode, budget, tmp_path):
    """In the loss's own pass and in one before it."""
    for shape in (ALIGNED, {"gradient_accumulation_steps": 1, "steps_per_generation": 2}):
        settings = {"objective": objective, "vllm_importance_sampling_mode": mode, "max_steps": 3, **BOUNDS, **shape}
        fixed, cut = (
            correct(tmp_path / str(given), "auto", **settings, per_device_token_budget=given)
            for given in (None, budget)
        )
        assert (cut._correction is not None) == (shape is ALIGNED)
        for found, expected in zip(logged(cut), logged(fixed), strict=True):
            names = [
                name for name in expected if name.startswith(("loss", "grad_norm", "reward", "sampling/", "rollout/"))
            ]
            assert {"loss", "grad_norm"} <= set(names)
            for name in names:
                assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("given", [{"baseline": "ppo"}, {"baseline": "otb"}, {"baseline": "remax"}])
def test_baselines_that_look_at_the_policy_train_the_same(given, tmp_path, tiny_path):
    weights = []
    for budget in (None, 40):
        settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4, "optim": "sgd"}
        settings |= {"learning_rate": 0.5, "max_completion_length": 20, **given}
        trainer = tiny_trainer(tmp_path / str(budget), model=tiny_path, per_device_token_budget=budget, **settings)
        trainer.train()
        weights.append(flat(trainer.model.parameters()))
    assert (weights[0] - flat(tiny_model().parameters())).abs().max() > 1e-4
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=2e-5)


REFUSED = {
    "packing none": {"packing": "none"},
    "loss_type bnpo": {"loss_type": "bnpo"},
    "an objective of your own": {"objective": simple},
    "entropy_coef": {"entropy_coef": 0.01},
    "use_adaptive_entropy": {"use_adaptive_entropy": True},
    "top_entropy_quantile below 1": {"top_entropy_quantile": 0.5},
    "log_gradient_variance": {"log_gradient_variance": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_micro_batches_is_refused_with_the_way_out(name, tmp_path):
    with pytest.raises(ValueError, match=rf"per_device_token_budget .*{name}.* per_device_train_batch_size"):
        tiny_trainer(tmp_path, per_device_token_budget=100, **REFUSED[name])
    tiny_trainer(tmp_path, **REFUSED[name])


def test_models_that_are_scored_with_padding_are_refused_also_before_they_are_loaded(tmp_path):
    model = small_model("Mamba", dtype=torch.float32, vocab_size=300)
    with pytest.raises(
        ValueError, match=r"per_device_token_budget .*padding \(it has layers of type linear_attention\)"
    ):
        tiny_trainer(tmp_path, model=model, per_device_token_budget=100)
    plan = Plan(config(tmp_path, per_device_token_budget=100))
    with pytest.raises(ValueError, match="it has layers of type linear_attention"):
        check_adapter(plan, model.config)
    check_adapter(plan, tiny_model().config)


def test_memory_is_estimated_for_the_budget(tmp_path):
    """A micro-batch is never smaller than the longest row, nor larger than a step."""
    model, shape = ModelConfig(model_name_or_path="m"), Qwen3Config(**SHAPE)

    told = []

    def parts(**given):
        args = config(tmp_path, max_completion_length=90, gradient_accumulation_steps=2, **given)
        setting = setting_of(args, model, shape, Launch(), 10)
        size = model_size(shape, model)
        told.append(setting.micro_batch)
        return {part.name: part.bytes for part in memory_parts(size, setting)}, setting.rows

    kept = "activations kept"
    fixed, rows = parts(per_device_train_batch_size=4)
    assert rows == 4
    same, rows = parts(per_device_train_batch_size=8, per_device_token_budget=400)
    assert rows == 4
    assert same[kept] == fixed[kept]
    assert same["LM head, or the layer at work"] >= fixed["LM head, or the layer at work"]
    assert parts(per_device_train_batch_size=8, per_device_token_budget=50)[1] == 1
    assert parts(per_device_train_batch_size=8, per_device_token_budget=150)[1] == 1.5
    assert parts(per_device_train_batch_size=8, per_device_token_budget=10**6)[1] == 16
    assert told == ["4 x (10 + 90)", "at most 400", "at most 100", "at most 150", "at most 1600"]


def test_where_a_longer_rank_has_tokens_there_is_nothing_here():
    """Prompts stay next to their completions, and a weight of 1 does not count in vespo's sum of logarithms."""

    def widened(value, dim, pad_index, pad_first):
        empty = value.new_full((len(value), 2), pad_index)
        return value if value.ndim < 2 else torch.cat([empty, value] if pad_first else [value, empty], dim=1)

    whole = {"prompt_ids": torch.full((4, 3), 7), "completion_ids": torch.full((4, 5), 8), "advantages": torch.ones(4)}
    whole |= {f"{kind}_mask": torch.ones_like(whole[f"{kind}_ids"]) for kind in ("prompt", "completion")}
    whole["importance_sampling_ratio"] = torch.full((4, 5), 0.5)
    one = SimpleNamespace(num_processes=1, process_index=0, gather=lambda value: value, pad_across_processes=widened)
    ((part,),) = by_tokens(one, [whole], 1, 100, True)
    assert part["real_rows"] == 4
    assert part["prompt_ids"][0].tolist() == [0, 0, 7, 7, 7]
    assert part["completion_mask"][0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert part["importance_sampling_ratio"][0].tolist() == [0.5] * 5 + [1.0] * 2
