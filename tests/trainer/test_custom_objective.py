"""Somebody's own objective: by a recipe, by Python, and a plain loop in its place train the same policy."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from basis_rl.cli.main import main
from basis_rl.recipe.build import load_config_and_tokenizer, load_training_data
from basis_rl.recipe.file import parse_recipe
from basis_rl.recipe.words import with_sections
from basis_rl.trainer import BasisTrainer
from examples.custom_objective import simple
from tests.cli.conftest import SETTINGS
from tests.support.tiny import parity_reward

NAME = "examples.custom_objective:simple"
OWN = {
    "dataset_kwargs": {"size": 32, "seed": 0, "max_terms": 2, "max_digits": 1},
    "reward_funcs": ["tests.support.tiny.parity_reward"],
    "num_iterations": 2,  # the ratios leave 1
    "max_steps": 6,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "epsilon": 0.05,
    "objective": None,
}


def recipe(folder, model, **changes):
    folder.mkdir()
    path = folder / "recipe.yaml"
    settings = {**SETTINGS, **OWN, "model_name_or_path": str(model), "output_dir": str(folder / "out"), **changes}
    path.write_text(yaml.safe_dump(with_sections({k: v for k, v in settings.items() if v is not None})))
    return str(path)


class PlainLoop(BasisTrainer):
    """The example's formula, rollout by rollout and token by token, with a forward pass of its own."""

    def compute_loss(self, model, inputs, **kwargs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        scores = model(input_ids=ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
        width = inputs["completion_ids"].shape[1]
        log_probs = scores.gather(-1, ids[:, 1:, None])[:, -width:, 0]
        old, loss = inputs["old_per_token_logps"], 0.0
        for i, a in enumerate(inputs["advantages"].tolist()):
            row = []
            for t in range(width):
                if inputs["completion_mask"][i, t]:
                    ratio = torch.exp(log_probs[i, t] - old[i, t])
                    row.append(-(ratio * a - abs(a) * (ratio - 1) ** 2 / (2 * self.args.epsilon)))
            loss = loss + sum(row) / len(row) / len(ids)
        return loss


def by_python(cls, folder, model, **objective):
    parsed = parse_recipe([recipe(folder, model)])
    _, tokenizer = load_config_and_tokenizer(parsed.model, parsed.args)
    trainer = cls(
        model=str(model),
        reward_funcs=parity_reward,
        args=parsed.args,
        train_dataset=load_training_data(parsed, tokenizer),
        processing_class=tokenizer,
        baseline="rloo",
        **objective,
    )
    trainer.train()
    return trainer


def test_recipe_python_and_a_plain_loop_train_the_same_policy(tmp_path, tiny_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_path)
    assert main(["train", recipe(tmp_path / "recipe", tiny_path, objective=NAME)]) == 0
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "recipe" / "out")
    python = by_python(BasisTrainer, tmp_path / "python", tiny_path, objective=simple)
    loop = by_python(PlainLoop, tmp_path / "loop", tiny_path)
    moved = 0.0
    for before, a, b, c in zip(*(m.parameters() for m in (start, trained, python.model, loop.model)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(b, c, rtol=0, atol=2e-5)
        moved = max(moved, float((before - a).abs().max()))
    assert moved > 1e-2

    out = tmp_path / "recipe" / "out"
    assert json.loads((out / "run.json").read_text())["objective"] == NAME
    assert f"objective `{NAME}`" in (out / "README.md").read_text()
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    outside = [row["objective/outside"] for row in log if "objective/outside" in row]
    assert len(outside) == 6
    assert outside[0] == 0.0
    assert max(outside) > 0.1
    assert not any(key.startswith("clip_ratio") for row in log for key in row)
    assert python.objective is simple


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (NAME, 0, "keeps the contract: finite, masked_tokens, gradient_at_ratio_1, token_advantages"),
        ("examples.custom_sampler:Harder", 0, "keeps the contract: rows, determinism"),
        ("tests.trainer.test_custom_objective:upside_down", 2, "does not declare"),
        ("basis_rl.rewards:FormatReward", 0, "keeps the contract: name, version, golds"),
        ("tests.trainer.test_custom_objective:shrinking", 2, "result: it"),
    ],
)
def test_check_tells_an_objective_a_sampler_and_a_reward_apart(name, code, said, capsys):
    assert main(["check", name]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def shrinking(completions, **columns):
    return [1.0] * (len(completions) - 1)


def upside_down(inputs):
    raise AssertionError("it is refused before it is called")
