"""Building a value table: sample the reference model on every prompt, score with the training reward."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from basis_rl.rollout import Completion, Sampling, prompt_tokens, sample
from basis_rl.values.provenance import fingerprint, rendered_prompt, run_provenance
from basis_rl.values.table import ValueTable


def build_table(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    reward_funcs: Sequence[Callable[..., Any]],
    sampling: Sampling,
    *,
    num_rollouts: int = 32,
    reward_weights: Sequence[float] | None = None,
    batch_size: int = 256,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> ValueTable:
    """Rewards of `num_rollouts` completions of each prompt (BASIS Appendix D; 32 or 64 there), with their provenance.

    Prompts none of whose rollouts could be scored are left out, and counted in a line of output.

    Args:
        model: the reference model, the one that training starts from.
        tokenizer: its tokenizer.
        dataset: columns ``prompt``, ``prompt_id`` and those that the reward functions read.
        reward_funcs: those of the training, called as TRL calls them.
        sampling: of the training.
        num_rollouts: n.
        reward_weights: of the training, default all 1.
        batch_size: completions generated at a time.
        chat_template_kwargs: of the training.

    Raises:
        ValueError: nothing at all could be scored.
    """
    weights = torch.tensor(reward_weights or [1.0] * len(reward_funcs))
    template = chat_template_kwargs or {}
    prompts, ids = list(dataset["prompt"]), list(dataset["prompt_id"])
    tokens = [prompt_tokens(prompt, tokenizer, template) for prompt in prompts]
    rewards: dict[str, list[float]] = {prompt_id: [] for prompt_id in ids}
    with tqdm(total=len(prompts) * num_rollouts, desc="value table", unit="rollout", mininterval=2) as progress:
        for index, answers in sample(
            model, tokenizer, tokens, sampling, num_samples=num_rollouts, batch_size=batch_size
        ):
            rewards[ids[index]] += _score(dataset[index], answers, reward_funcs, weights)
            progress.update(len(answers))
    scored = {prompt_id: rs for prompt_id, rs in rewards.items() if any(r == r for r in rs)}
    if len(scored) < len(rewards):
        print(
            f"{len(rewards) - len(scored)} of {len(rewards)} prompts are left out: none of their rollouts was scored."
        )
    provenance = run_provenance(model.config, tokenizer, reward_funcs, sampling, reward_weights)
    return ValueTable.from_rewards(
        scored,
        fingerprints={
            i: fingerprint(rendered_prompt(p, tokenizer, template)) for i, p in zip(ids, prompts, strict=True)
        },
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
    hooks = {"trainer_state": TrainerState(), "log_extra": _ignore, "log_metric": _ignore}
    scores = torch.tensor([[torch.nan if r is None else r for r in f(**given, **hooks)] for f in reward_funcs]).T
    total = (scores * weights).nansum(dim=1).masked_fill(scores.isnan().all(dim=1), torch.nan)
    result: list[float] = total.tolist()
    return result


def _ignore(name: str, value: Any) -> None:
    """Where a training logs, building a table does not."""


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
