"""docs/metrics.md has every metric that the baselines, the samplers and a run log."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basis_rl.baselines import BASELINES
from basis_rl.conformance.baselines import example_batch
from basis_rl.conformance.samplers import _IDS, example_beliefs
from basis_rl.functional.diagnostics import advantage_metrics
from basis_rl.rewards.math.reward import REJECTED, MathVerifyReward
from basis_rl.samplers import SAMPLERS, build_sampler
from basis_rl.trainer.stream import Group, Load, Stream
from tests.support.tiny import named_baseline, sums, tiny_model, tiny_trainer

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
NAMES = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
# Names of somebody's own in capitals; a batch's numbers of answers and of samples.
PLACES = {"NAME": r"[^/]+", "COLUMN": r"[^/]+", "VALUE": r".+", "N": r"\d+", "K": r"\d+"}


def pattern(name):
    parts = re.split(r"([A-Z]+)", name)
    return re.compile("".join(PLACES[part] if part in PLACES else re.escape(part) for part in parts))


PATTERNS = [pattern(name) for name in NAMES]
SPECIFIC = [name for name in NAMES if not re.search(r"/(NAME|COLUMN)", name)]


def on_the_page(name):
    return any(each.fullmatch(name) for each in PATTERNS)


def test_names_are_there_once():
    assert len(NAMES) == len(set(NAMES)) > 100
    assert not on_the_page("baseline/unheard_of")
    assert on_the_page("reward/level/5")


@pytest.mark.parametrize("name", BASELINES)
def test_metrics_of_each_baseline(name):
    data = sums()
    baseline = named_baseline(name, data)
    batch = example_batch(baseline, data["prompt_id"][:6])
    result = baseline.advantages(batch)
    found = {f"baseline/{key}" for key in result.metrics} | set(advantage_metrics(batch, result))
    found |= {f"baseline/reward_from_{quarter}" for quarter in ("0.00", "0.25", "0.50", "0.75")}
    assert {name for name in found if name not in SPECIFIC} == set()


def test_metrics_of_each_sampler():
    belief = example_beliefs()["mixed"]
    for name in SAMPLERS:
        draw = build_sampler(name).draw(_IDS, belief, 5, torch.Generator().manual_seed(0))
        assert {f"sampler/{key}" for key in draw.metrics} <= set(SPECIFIC), name


def test_metrics_of_the_mathematical_reward():
    logged = {}
    for place in ("box", "tag"):
        MathVerifyReward(num_workers=1, answer_in=place)([], ["7"], ["7"], log_metric=logged.__setitem__)
    assert {f"reward/rejected/{kind}" for kind in REJECTED} <= set(logged) <= set(SPECIFIC)


def test_metrics_of_a_stream():
    rollout = SimpleNamespace(steps=[0], tool_mask=[1], failure="")
    load = Load()
    load.take(1)
    stream = SimpleNamespace(_taken={0: [Group(0, 0, {}, [rollout])]}, _groups=[], _load=load, num_generations=1)
    assert len(load.take(1)) < len(found := Stream.metrics(stream, 0, 0))
    assert set(found) <= set(SPECIFIC)


def test_metrics_of_a_run(tmp_path):
    """With a critic, a prompt sampler, a column of difficulties, the noise of the gradient, KL, and an evaluation."""
    data = sums(32).map(lambda row, i: {"level": i % 2}, with_indices=True)
    settings = {"beta": 0.1, "difficulty_column": "level", "log_gradient_variance": True, "eval_strategy": "steps"}
    settings |= {"gradient_accumulation_steps": 2}
    tiny_model().save_pretrained(tmp_path / "model")  # the reference model is loaded from where the policy was
    settings |= {"eval_steps": 2, "per_device_eval_batch_size": 8, "num_generations_eval": 4}
    settings |= {"train_dataset": data, "eval_dataset": data.select(range(8)), "prompt_sampler": "frontier"}
    trainer = tiny_trainer(tmp_path, "ppo", model=tmp_path / "model", **settings)
    trainer.train()
    keys = {key for row in trainer.state.log_history for key in row}
    assert keys >= {"baseline/value_loss", "sampler/coverage", "reward/level/1", "gradient/variance", "kl"}
    known = {"step", "total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    names = {key if on_the_page(key) else key.removeprefix("eval_") for key in keys - known}
    assert {name for name in names if not on_the_page(name)} == set()
