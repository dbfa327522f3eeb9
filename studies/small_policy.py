"""A real policy, small enough for one CPU core: the quickstart's problems and model, trained by `BasisTrainer`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from basis_rl import BasisConfig, BasisTrainer
from basis_rl.baselines import Baseline
from basis_rl.data import DataArguments, load_prompts
from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.samplers import PromptSampler
from examples.quickstart.warm_start import build_model, build_tokenizer, warm_start

TOKENS = 12  # of a rollout, at most, as in the quickstart
SUM = re.compile(r"(\d+) ([+-]) (\d+)")


def problems(size: int) -> Dataset:
    """Sums and differences to train on, with the columns ``prompt``, ``solution``, ``prompt_id`` and ``family``.

    `size` problems are drawn; they are these without duplicates and without the tenth that is held out.
    """
    kwargs = {"size": size, "seed": 1, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    data = DataArguments(
        dataset_name="reasoning_gym:chain_sum", dataset_kwargs=kwargs, prompt_template="{prompt}", test_fraction=0.1
    )
    dataset = load_prompts(data, conversational=True)
    return dataset.add_column("family", [family(row[0]["content"]) for row in dataset["prompt"]])


def family(problem: str) -> int:
    """A number from 0 to 7: two digits in the first number add 4, two in the second add 2, a difference adds 1.

    `problems` has only pairs of numbers of equal length, and so four families; most of its problems have two-digit
    numbers.
    """
    found = SUM.search(problem)
    assert found is not None, problem
    first, sign, second = found.groups()
    return 4 * (len(first) > 1) + 2 * (len(second) > 1) + (sign == "-")


def warm_policy(
    dataset: Dataset, seed: int, until: float, max_steps: int = 3000
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The quickstart's model, supervised until it predicts the share `until` of the answers (teacher-forced)."""
    set_seed(seed)
    texts = [row[0]["content"] for row in dataset["prompt"][:2000]]
    tokenizer = build_tokenizer([*texts, *["\\boxed{7}", "assistant\n", "user\n"] * len(texts)])
    model = build_model(tokenizer)
    warm_start(model, tokenizer, dataset, until=until, max_steps=max_steps)
    return model, tokenizer


def trainer_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    baseline: Baseline,
    output: Path,
    reward: Any,
    callbacks: Sequence[TrainerCallback] = (),
    prompt_sampler: str | PromptSampler = "uniform",
    make: Callable[..., BasisTrainer] = BasisTrainer,
    **settings: Any,
) -> BasisTrainer:
    """`BasisTrainer` with the quickstart's settings: two updates per batch, GRPO's objective, learning rate 3e-4."""
    chosen: dict[str, Any] = {} if prompt_sampler == "uniform" else {"prompt_sampler": prompt_sampler}
    defaults: dict[str, Any] = {
        "max_completion_length": TOKENS,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
    }
    trainer = make(
        model=model,
        reward_funcs=reward,
        args=BasisConfig(output_dir=str(output), **{**defaults, **settings}),
        train_dataset=dataset,
        processing_class=tokenizer,
        baseline=baseline,
        objective="grpo",
        **chosen,
    )
    trainer.remove_callback(PrinterCallback)
    for callback in callbacks:  # after the trainer's own, which lets the baseline learn
        trainer.add_callback(callback)
    return trainer


def draw(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    dataset: Dataset,
    rollouts: int,
    reward: Callable[..., Sequence[float | None]],
    label: str | None = "rollouts",
    tokens: int = TOKENS,
) -> np.ndarray:
    """``(P, rollouts)`` uint8: the 0/1 rewards of `rollouts` rollouts per problem, sampled at temperature 1.

    There is no progress bar if `label` is None.
    """
    prompts, golds = list(dataset["prompt"]), list(dataset["solution"])
    ids = [prompt_tokens(prompt, tokenizer, {}) for prompt in prompts]
    rewards = np.zeros((len(prompts), rollouts), dtype=np.uint8)
    drawn = sample(model, tokenizer, ids, Sampling(tokens), num_samples=rollouts, batch_size=2048)
    for index, completions in tqdm(
        drawn, total=len(prompts), desc=label, unit="prompt", mininterval=5, disable=label is None
    ):
        texts = [completion.text for completion in completions]
        scores = reward(prompts=[prompts[index]] * rollouts, completions=texts, solution=[golds[index]] * rollouts)
        assert None not in scores, golds[index]
        rewards[index] = np.array(scores, dtype=np.uint8)
    return rewards
