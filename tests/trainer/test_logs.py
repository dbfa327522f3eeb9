"""What is logged is of the rollouts and functions beside which it stands, and can be read as JSON."""

import json
import math
from types import SimpleNamespace

import pandas
import pytest
from accelerate import Accelerator
from transformers import Qwen3Config
from trl.trainer.utils import compute_flops_per_token

from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.logs import StepMeans, distinct
from basis_rl.trainer.step_time import StepTimer
from tests.support.tiny import parity_reward, sums, tiny_trainer


@pytest.fixture
def calls():
    return []


def now_and_then(calls):
    """A reward that logs a column in every second batch only, and once of half of its rollouts."""

    def reward(completions, completion_ids, log_extra, log_metric, **kwargs):
        calls.append(["".join(map(str, ids)) for ids in completion_ids])
        number = len(calls)
        if number % 2 == 0:
            log_extra("ids", calls[-1] if number != 4 else calls[-1][: len(calls[-1]) // 2])
        log_metric("ratio", math.inf if number == 1 else 0.5)
        return parity_reward(completions, completion_ids)

    return reward


def test_a_columns_values_stand_beside_their_own_rollouts(calls, tmp_path):
    settings = {"max_steps": 8, "steps_per_generation": 2, "log_completions": True}
    trainer = tiny_trainer(tmp_path, reward_funcs=now_and_then(calls), **settings)
    # The trial before training.
    calls.clear()
    trainer.train()
    for step in range(1, 9):
        table = pandas.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        batch = (step - 1) // 2
        logged = {0: 0, 1: 16, 2: 0, 3: 8}[batch]
        if batch == 0:
            assert "ids" not in table
        else:
            assert [value if isinstance(value, str) else None for value in table["ids"]] == calls[batch][:logged] + [
                None
            ] * (16 - logged)


def test_an_evaluation_has_a_table_of_its_own(calls, tmp_path):
    settings = {"max_steps": 2, "log_completions": True, "eval_strategy": "steps", "eval_steps": 1}
    sets = {"a": sums(4), "b": sums(8)}
    trainer = tiny_trainer(tmp_path, eval_dataset=sets, **settings, per_device_eval_batch_size=8)
    trainer.train()
    found = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert found == sorted(
        f"{name}completions_0000{step}.parquet" for step in (1, 2) for name in ("", "eval_a_", "eval_b_")
    )
    trained = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert len(trained) == trainer.args.generation_batch_size
    assert not trained["advantage"].eq(0).all()
    prompts = {
        row["prompt"][0]["content"]
        for _, row in pandas.read_parquet(tmp_path / "completions" / "eval_a_completions_00002.parquet").iterrows()
    }
    assert prompts == {row["prompt"][0]["content"] for row in sums(4)}


def test_functions_of_one_name_have_metrics_of_their_own(tmp_path):
    assert distinct(["f", "g", "f", "f"]) == ["f", "g", "f_2", "f_3"]
    functions = [
        lambda completions, **kwargs: [1.0] * len(completions),
        lambda completions, **kwargs: [2.0] * len(completions),
    ]
    trainer = tiny_trainer(tmp_path, reward_funcs=[*functions, parity_reward], max_steps=1)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert (logged["rewards/<lambda>/mean"], logged["rewards/<lambda>_2/mean"]) == (1.0, 2.0)
    assert "rewards/parity_reward/mean" in logged


def test_an_infinite_metric_is_no_number_in_json(calls, tmp_path):
    trainer = tiny_trainer(tmp_path, reward_funcs=now_and_then(calls), max_steps=4, save_strategy="steps", save_steps=4)
    # The trial before training.
    calls.clear()
    trainer.train()

    def refuse(word):
        raise AssertionError(word)

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["ratio"] for line in lines if "ratio" in line] == [None, 0.5]
    json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text(), parse_constant=refuse)


def test_means_of_a_step_are_those_of_its_tokens():
    """Of the values of three micro-batches: weighted by tokens or by rollouts, least and greatest of all of them."""
    means, metrics = StepMeans(), {"entropy": [7.0], "reward": [0.5]}
    values = {"entropy": (1.0, 2.0, 4.0), "kl": (0.1, math.nan, 0.4), "clip_ratio/high_max": (0.2, 0.9, 0.1)}
    values |= {"clip_ratio/low_min": (0.3, 0.2, 0.4), "clip_ratio/region_mean": (0.0, 1.0, 0.5)}
    for at, (tokens, rollouts) in enumerate(((10, 4), (30, 1), (0, 3))):
        with means.taking(metrics, tokens, (rollouts + at, rollouts), ("clip_ratio/",)):
            for name, each in values.items():
                metrics.setdefault(name, []).append(each[at])
            metrics["reward"].append(0.25)
    found = means.take(Accelerator(cpu=True))
    assert metrics["entropy"] == [7.0]
    assert metrics["reward"] == [0.5, 0.25, 0.25, 0.25], "not of tokens"
    assert found["entropy"] == pytest.approx((10 * 1 + 30 * 2) / 40)
    assert found["kl"] == pytest.approx(0.1)
    # TRL's mean is also over rows without a rollout, which are there for other ranks.
    assert found["clip_ratio/region_mean"] == pytest.approx((4 * 0 + 2 * 1 + 5 * 0.5) / 8)
    assert found["clip_ratio/high_max"] == 0.9
    assert found["clip_ratio/low_min"] == 0.2
    assert means.take(Accelerator(cpu=True)) == {}


@pytest.mark.parametrize("packing", ["auto", "none"])
def test_tokens_that_went_through_the_model_are_counted(packing, tmp_path):
    """The rollouts of a prompt share it, but for the token that predicts their first one."""
    seen = []

    class Watched(BasisTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            masks = [inputs[f"{part}_mask"] for part in ("prompt", "completion")]
            lengths = dict(zip(map(tuple, inputs["prompt_ids"].tolist()), masks[0].sum(dim=1).tolist(), strict=True))
            packed = sum(length - 1 for length in lengths.values()) + len(masks[0]) + int(masks[1].sum())
            seen.append(packed if packing == "auto" else sum(mask.numel() for mask in masks))
            return super().compute_loss(model, inputs, **kwargs)

    monkey = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 20, "max_steps": 2}
    trainer = tiny_trainer(tmp_path, "rloo", Watched, packing=packing, gradient_accumulation_steps=2, **monkey)
    trainer.train()
    logged = [row["tokens/computed"] for row in trainer.state.log_history if "tokens/computed" in row]
    assert logged == [sum(seen[:2]), sum(seen[2:])]


def test_utilization_counts_what_was_computed(monkeypatch):
    """A fifth of the tokens, of which half are scored: the head's products only for these."""
    timer = StepTimer(
        Accelerator(cpu=True), Qwen3Config(vocab_size=50_000, hidden_size=64, num_hidden_layers=1), "bfloat16"
    )
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(timer, "accelerator", SimpleNamespace(device=device, num_processes=1))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100")
    flops = compute_flops_per_token(timer.config, 100)
    head = 3 * 2 * 50_000 * 64
    assert timer._mfu(1e6, 1.0, 100) == pytest.approx(100 * flops * 1e6 / 989e12)
    assert timer._mfu(2e5, 0.5, 100) == pytest.approx(100 * (flops - head / 2) * 2e5 / 989e12)
