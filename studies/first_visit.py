"""What can be known of a prompt's value before it is sampled for the first time?

    python -m studies.first_visit [--policies quickstart worked selection] [--seeds 0 1] [--quick]

`BasisTrainer` trains a policy (`batch_mean`, one rollout per prompt, 64 prompts per batch, each prompt once). Before
the policy learns from a batch, 32 further rollouts measure the true value of each of the batch's prompts. These
estimators have not seen the prompt before:

- ``batch mean``: the mean of the other rewards of the batch;
- ``hidden``: Bayesian logistic regression on the policy's own last hidden state at the end of the prompt, fitted to
  the rewards of the earlier batches (`basis_rl.functional.regression`);
- ``start``: the same on the hidden states of the policy before training, which need to be computed only once;
- ``words``: the same on hashed words and pairs of neighbouring words of the prompt, which need no model.

Errors are mean squared errors from the true value, minus the sampling error of its 32 rollouts; over all batches, and
over the last third.

Results: ``studies/results/first_visit.json``.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from basis_rl import BasisTrainer
from basis_rl.baselines import build_baseline
from basis_rl.data import problem_text
from basis_rl.functional.history import expected_sigmoid
from basis_rl.functional.regression import hashed_words, logistic_posterior, predicted_logits
from basis_rl.rewards import MathVerifyReward
from benchmarks.common import one_thread
from benchmarks.trainers import quiet
from studies import small_policy, training, worked_sums
from studies.runs import Planned, kept_runs, placed, save_table, study_parser
from studies.selection import task as selection

POLICIES = ("quickstart", "worked", "selection")
WORDS = 128  # hashed features
PRIOR = 4.0  # variance of a logit before anything is known


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the study: batches per run, prompts per batch, rollouts that measure a prompt's value, warm start."""

    batches: int = 60
    prompts: int = 64
    rollouts: int = 32
    learning_rate: float = 1e-4
    warm_start: int = 3000


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy to train: its problems, its reward, the tokens of a rollout, and the function for its warm start."""

    prompts: Dataset
    reward: Any
    tokens: int
    make: Any


def setting(policy: str, scale: Scale, seed: int) -> Setting:
    """The setting of one of `POLICIES`."""
    count = scale.batches * scale.prompts
    if policy == "selection":
        prompts, _ = selection.datasets(selection.TASKS["mixed"], count, 1)
        steps = min(1_500, scale.warm_start)
        make = partial(selection.warm_model, prompts, "mixed", seed, steps=steps)
        return Setting(prompts, selection.reward, selection.TOKENS, make)
    problems = small_policy.problems(20_000)
    prompts = problems.select(range(min(count, len(problems))))
    worked = policy == "worked"
    until, model = (0.25, worked_sums.worked_model) if worked else (0.45, training.quickstart_model)
    make = partial(model, problems, seed, until=until, max_steps=scale.warm_start)
    return Setting(prompts, MathVerifyReward(), worked_sums.TOKENS if worked else small_policy.TOKENS, make)


class FirstVisits(BasisTrainer):
    """Records each prompt's hidden state, reward and measured value before the policy learns from it."""

    def __init__(self, *args: Any, measure: Any, **kwargs: Any) -> None:
        self.visits: list[dict[str, Any]] = []
        self._measure_values = measure
        super().__init__(*args, **kwargs)
        self._before = copy.deepcopy(self.model).eval()

    def _advantages(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> Tensor:
        result = super()._advantages(inputs, output)
        inputs_of = {"input_ids": output["prompt_ids"], "attention_mask": output["prompt_mask"]}
        with torch.no_grad():
            models = {"hidden": self.accelerator.unwrap_model(self.model), "start": self._before}
            states = {name: model.base_model(**inputs_of).last_hidden_state[:, -1] for name, model in models.items()}
        self.visits.append({
            **{name: state.double().numpy() for name, state in states.items()},
            "prompts": [row["prompt"] for row in inputs],
            "rewards": self._pending.newest.rewards.double().numpy(),
            "values": self._measure_values(self.model, Dataset.from_list(inputs)),
        })  # fmt: skip
        self.model.train()
        return result


def words(prompts: list[Any]) -> np.ndarray:
    """``(P, WORDS)`` hashed words of prompts."""
    return hashed_words([problem_text(prompt) for prompt in prompts], WORDS).double().numpy()


def regression_errors(features: list[np.ndarray], rewards: list[np.ndarray], values: list[np.ndarray]) -> list[float]:
    """Mean squared error in each batch of predictions from the batches before it."""
    width = features[0].shape[1] + 1
    mean, covariance = torch.zeros(width, dtype=torch.float64), PRIOR * torch.eye(width, dtype=torch.float64)
    errors: list[float] = []
    seen = torch.zeros((0, width), dtype=torch.float64)
    known = torch.zeros(0, dtype=torch.float64)
    for phi, r, truth in zip(features, rewards, values, strict=True):
        rows = torch.cat([torch.ones(len(phi), 1, dtype=torch.float64), torch.from_numpy(phi)], dim=1)
        predicted = expected_sigmoid(*predicted_logits(mean, covariance, rows))
        errors.append(float(((predicted.numpy() - truth) ** 2).mean()))
        seen = torch.cat([seen, rows])
        known = torch.cat([known, torch.from_numpy(r)])
        counts = torch.ones_like(known)
        mean, covariance = logistic_posterior(mean, seen, known, counts, torch.zeros_like(known), PRIOR)
    return errors


def run(scale: Scale, policy: str, seed: int, output: Path) -> dict[str, Any]:
    """Train once and measure; returns `errors_of` what was seen."""
    folder, chosen = output / f"{policy}-seed{seed}", setting(policy, scale, seed)
    chosen.make(folder / "warm_start")
    model = AutoModelForCausalLM.from_pretrained(folder / "warm_start", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "warm_start", padding_side="left")

    def measure(policy_now: Any, prompts: Dataset) -> np.ndarray:
        with torch.random.fork_rng(devices=[]):
            drawn = small_policy.draw(
                policy_now, tokenizer, prompts, scale.rollouts, chosen.reward, tokens=chosen.tokens
            )
        return drawn.mean(axis=1)

    trainer: Any = small_policy.trainer_for(
        model, tokenizer, chosen.prompts, build_baseline("batch_mean"), folder / "run", chosen.reward,
        make=partial(FirstVisits, measure=measure), num_generations=1, per_device_train_batch_size=scale.prompts,
        steps_per_generation=1, seed=seed, max_steps=scale.batches, learning_rate=scale.learning_rate,
        max_completion_length=chosen.tokens,
    )  # fmt: skip
    quiet(trainer).train()
    trainer.end()
    return errors_of(trainer.visits, scale.rollouts)


def errors_of(visits: list[dict[str, Any]], rollouts: int) -> dict[str, dict[str, float]]:
    """Mean error of each estimator over all batches and over the last third, minus the noise of the measured values."""
    rewards, values = ([each[key] for each in visits] for key in ("rewards", "values"))
    states = {name: [each[name] for each in visits] for name in ("hidden", "start")}
    unit = {name: [h / np.linalg.norm(h, axis=1, keepdims=True) for h in each] for name, each in states.items()}
    noise = [float((v * (1 - v)).mean() / (rollouts - 1)) for v in values]
    others = [(r.sum() - r) / (len(r) - 1) for r in rewards]
    errors = {
        "batch mean": [float(((b - v) ** 2).mean()) for b, v in zip(others, values, strict=True)],
        **{name: regression_errors(features, rewards, values) for name, features in unit.items()},
        "words": regression_errors([words(each["prompts"]) for each in visits], rewards, values),
    }
    below = {name: [e - n for e, n in zip(each, noise, strict=True)] for name, each in errors.items()}
    late = 2 * len(visits) // 3
    return {
        "all": {name: float(np.mean(each)) for name, each in below.items()},
        "last third": {name: float(np.mean(each[late:])) for name, each in below.items()},
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the study; returns its runs."""
    parser = study_parser(__doc__, "first_visit")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args(argv)
    placed(options, parser.parse_args([]))
    scale = Scale(batches=3, prompts=8, rollouts=4, warm_start=3) if options.quick else Scale()
    one_thread()
    planned = [
        Planned(
            {"policy": policy, "seed": seed}, options.output / f"{policy}-seed{seed}.json",
            {**dataclasses.asdict(scale), "policy": policy, "seed": seed},
            partial(run, scale, policy, seed, options.output),
        )
        for seed in options.seeds for policy in options.policies
    ]  # fmt: skip
    runs, facts = kept_runs(planned)
    for each in runs:
        for part in ("all", "last third"):
            least = each[part]["batch mean"]
            shown = ", ".join(f"{name} {error / least:.3f}" for name, error in each[part].items() if least)
            print(
                f"{each['policy']}, seed {each['seed']}, {part}: batch mean's error {least:.4f}; shares of it: {shown}"
            )
    save_table("first_visit", {**facts, "scale": dataclasses.asdict(scale)}, runs, options.results)
    return runs


if __name__ == "__main__":
    main()
