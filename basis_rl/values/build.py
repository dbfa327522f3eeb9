"""Building a value table: sample the reference model on every prompt, score with the training reward."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from basis_rl.rollout import Completion, sample
from basis_rl.values.provenance import fingerprint, rendered_prompt, run_provenance
from basis_rl.values.table import ValueTable


def build_table(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    reward_funcs: Sequence[Callable[..., Any]],
    *,
    num_rollouts: int = 32,
    max_completion_length: int,
    reward_weights: Sequence[float] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    batch_size: int = 256,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> ValueTable:
    """Rewards of `num_rollouts` completions of each prompt (BASIS Appendix D; 32 or 64 there), with their provenance.

    Args:
        model: the reference model, the one that training starts from.
        tokenizer: its tokenizer.
        dataset: columns ``prompt``, ``prompt_id`` and those that the reward functions read.
        reward_funcs: those of the training, called in the same way.
        num_rollouts: n.
        max_completion_length: tokens of a completion.
        reward_weights: of the training, default all 1.
        temperature: of the training, as are `top_p` and `top_k`.
        top_p: see `sample`.
        top_k: see `sample`.
        batch_size: completions generated at a time.
        chat_template_kwargs: of the training.

    Raises:
        ValueError: a prompt none of whose rollouts could be scored.
    """
    weights = torch.tensor(reward_weights or [1.0] * len(reward_funcs))
    texts = [rendered_prompt(prompt, tokenizer, chat_template_kwargs or {}) for prompt in dataset["prompt"]]
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    completions = sample(
        model,
        tokenizer,
        texts,
        num_samples=num_rollouts,
        max_new_tokens=max_completion_length,
        batch_size=batch_size,
        **sampling,
    )
    rewards: dict[str, list[float]] = {prompt_id: [] for prompt_id in dataset["prompt_id"]}
    with tqdm(total=len(texts) * num_rollouts, desc="value table", unit="rollout", mininterval=2) as progress:
        for index, answers in completions:
            rewards[dataset[index]["prompt_id"]] += _score(dataset[index], answers, reward_funcs, weights)
            progress.update(len(answers))
    provenance = run_provenance(
        model.config,
        tokenizer,
        reward_funcs,
        reward_weights,
        max_completion_length=max_completion_length,
        **sampling,
    )
    return ValueTable.from_rewards(
        rewards,
        fingerprints=dict(zip(dataset["prompt_id"], map(fingerprint, texts), strict=True)),
        provenance={**provenance, "num_rollouts": num_rollouts, "date": datetime.date.today().isoformat()},
    )


def _score(
    row: dict[str, Any], answers: list[Completion], reward_funcs: Sequence[Callable[..., Any]], weights: torch.Tensor
) -> list[float]:
    n = len(answers)
    conversational = not isinstance(row["prompt"], str)
    given = {key: [value] * n for key, value in row.items() if key != "prompt"}
    given |= {
        "prompts": [row["prompt"]] * n,
        "completions": [[{"role": "assistant", "content": a.text}] if conversational else a.text for a in answers],
        "completion_ids": [answer.token_ids for answer in answers],
    }
    scores = torch.tensor([[torch.nan if r is None else r for r in func(**given)] for func in reward_funcs]).T
    total = (scores * weights).nansum(dim=1).masked_fill(scores.isnan().all(dim=1), torch.nan)
    result: list[float] = total.tolist()
    return result


def describe(table: ValueTable, width: int = 40) -> str:
    """The distribution of the mean rewards as text: a histogram of ten bins, and the shares at both ends."""
    means = table.means
    counts = torch.histc(means, bins=10, min=0, max=1).long().tolist()
    lines = [f"{len(table)} prompts, mean reward {float(means.mean()):.3f} (as a share of {table.reward_range})"]
    for i, count in enumerate(counts):
        bar = "#" * round(width * count / max(counts))
        lines.append(f"  {i / 10:.1f} - {(i + 1) / 10:.1f}  {count:7d}  {bar}")
    never, always = float((means == 0).double().mean()), float((means == 1).double().mean())
    lines.append(f"  never solved {never:.1%}, always solved {always:.1%}")
    return "\n".join(lines)
