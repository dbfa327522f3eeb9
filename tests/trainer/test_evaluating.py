"""Evaluation during training: avg@k of each set by name, with its own number of answers, every row once."""

import itertools
import json
from collections import defaultdict

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from trl.trainer.utils import RepeatSampler

from basis_rl.cli.main import main
from basis_rl.data import DataArguments, load_prompts
from basis_rl.trainer.logs import EvalScores
from tests.cli.conftest import recipe as recipe
from tests.support.tiny import DEVICE, flat, parity_reward, sums, tiny_model, tiny_trainer


@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_row_counts_once_however_often_it_fills_a_batch(ranks, size):
    """By the batches of real ranks, of which the last ones begin again; what rows have in common does not matter."""
    earned = [[1.0, 1.0], [0.0, torch.nan], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    drawn = [(row, k) for row in RepeatSampler(earned, 1, shuffle=False) for k in range(2)]
    shares = [list(BatchSamplerShard(BatchSampler(drawn, size, False), ranks, rank)) for rank in range(ranks)]
    scores = EvalScores()
    for batches in zip(*shares, strict=True):
        scores.add(torch.tensor([earned[row][k] for batch in batches for row, k in batch]))
    found = scores.take(2, len(earned))
    assert found == pytest.approx({"reward": 5 / 9, "avg@2": 5 / 10, "pass@2": 4 / 5})
    assert scores.take(2, len(earned)) == {}


def test_passes_are_of_right_and_wrong_rollouts_only():
    """By all subsets; where a reward is neither 0 nor 1 nobody can say which rollouts are right."""
    rewards = [[1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.0] * 6, [1.0] * 6]
    scores = EvalScores()
    for each in rewards:
        scores.add(torch.tensor(each))
    found = scores.take(6, None)
    assert set(found) == {"reward", "avg@6", "pass@2", "pass@4", "pass@6"}
    for k in (2, 4, 6):
        subsets = [list(itertools.combinations(each, k)) for each in rewards]
        mean = sum(sum(max(s) for s in each) / len(each) for each in subsets) / 3
        assert found[f"pass@{k}"] == pytest.approx(mean)
    scores.add(torch.tensor([1.0, 0.25]))
    assert set(scores.take(2, 1)) == {"reward", "avg@2"}
    scores.add(torch.tensor([1.0]))
    assert set(scores.take(1, 1)) == {"reward", "avg@1"}


@pytest.mark.parametrize(
    ("baseline", "group", "sampler", "dropout"),
    [
        ("basis", 1, "uniform", 0.0),
        ("spo", 1, "variance", 0.3),
        ("ppo", 1, "uniform", 0.0),
        ("grpo", 4, "dynamic", 0.0),
    ],
)
def test_an_evaluation_after_each_step_leaves_the_weights_as_they_are(baseline, group, sampler, dropout, tmp_path):
    """Of two steps of a generation batch, one ends within it. A value table does not know the problems."""
    others = sums(21).select(range(16, 21))
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "eval_dataset": others}
    ends = []
    for given in ({}, evaluated):
        model = tiny_model()
        begun = flat(model.parameters())
        for part in model.modules():
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = dropout
        settings = {"num_generations": group, "prompt_sampler": sampler, "max_steps": 4, **given}
        trainer = tiny_trainer(tmp_path / str(len(ends)), baseline, model=model, **settings)
        trainer.train()
        ends.append(flat(trainer.model.parameters()).cpu())
    assert "eval_avg@2" in {key for row in trainer.state.log_history for key in row}
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], begun)


def test_each_set_has_its_average_under_its_name(tmp_path):
    seen = defaultdict(list)
    made = []

    def reward(prompts, completions, completion_ids, prompt_id, **kwargs):
        values = parity_reward(completions, completion_ids)
        if made and not made[0].model.training:
            for name, value in zip(prompt_id, values, strict=True):
                seen[name].append(value)
        return values

    def quarter(completions, **kwargs):
        return [0.25] * len(completions)

    problems = sums(40)
    sets = {"few": problems.select(range(20, 25)), "more": problems.select(range(25, 36))}
    settings = {"num_generations": 1, "num_generations_eval": 3, "per_device_eval_batch_size": 6}
    settings |= {"reward_weights": [0.5, 1.0], "eval_strategy": "steps", "eval_steps": 2}
    own = {"reward_funcs": [reward, quarter], "eval_dataset": sets}
    trainer = tiny_trainer(tmp_path, "batch_mean", **own, **settings)
    made.append(trainer)
    trainer.train()
    logged = {key: value for row in trainer.state.log_history for key, value in row.items() if key.startswith("eval")}
    for name, dataset in sets.items():
        values = [seen[i] for i in dataset["prompt_id"]]
        assert {len(row) for row in values} == {3}
        assert logged[f"eval_{name}_avg@3"] == pytest.approx(0.5 * torch.tensor(values).mean().item() + 0.25)
        assert f"eval_{name}_completions/clipped_ratio" in logged
    assert 0.25 < logged["eval_more_avg@3"] < 0.75
    assert "eval_reward" not in logged
    assert trainer.evaluate(sets["few"])["eval_avg@3"] >= 0
    for mode, place in ((True, "train"), (False, "eval")):  # what is logged goes to the mode that the model is in
        trainer.model.train(mode)
        trainer.log_metric("noted", 1.0 + mode)
        assert trainer._metrics[place]["noted"] == [1.0 + mode]


OWN = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_benchmarks": ["mine.json"],
    "max_eval_samples": 4,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
    "test_fraction": 0.2,
    "baseline": "batch_mean",
    "objective": None,
    "num_generations": 1,
    "steps_per_generation": None,
    "max_steps": 1,
    "use_cpu": DEVICE == "cpu",
}


def test_a_recipe_measures_its_benchmarks_and_names_problems_that_are_trained_on(
    recipe, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mine = [{"problem": f"{i} + 1 =", "answer": i + 1, "level": i % 2} for i in range(5)]
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    recipe = recipe()
    same = '{"size": 64, "seed": 0, "max_terms": 2, "max_digits": 1}'
    data = DataArguments("reasoning_gym:chain_sum", dataset_kwargs=same, prompt_template="{prompt}", test_fraction=0.2)
    rows = load_prompts(data, conversational=False).select(range(4))
    path = tmp_path / "same.jsonl"
    path.write_text("\n".join(json.dumps({"problem": r["prompt"], "answer": r["solution"]}) for r in rows))
    assert main(["check", recipe]) == 0
    with caplog.at_level("WARNING"):
        assert main(["train", recipe, "--eval_benchmarks", str(tmp_path / "mine.json"), str(path)]) == 0
    assert "4 problems of 'same' are among the training problems" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    logged = {key for line in lines for key in line}
    assert {"eval_mine_avg@2", "eval_mine_reward", "eval_same_avg@2", "eval_held_out_avg@2"} <= logged
    capsys.readouterr()
    recipe = [recipe, "--output_dir", str(tmp_path / "other")]
    assert main(["train", *recipe, "--eval_benchmarks", "math50"]) == 2
    assert "Did you mean 'math500'" in capsys.readouterr().err
    assert main(["train", *recipe, "--eval_strategy", "no"]) == 2
    assert "eval_benchmarks needs eval_strategy" in capsys.readouterr().err
