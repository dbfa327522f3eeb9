"""One greedy rollout for each distinct prompt, scored without a trace in the logs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from basis_rl.trainer.gather import row_prompt_id, total_rewards

if TYPE_CHECKING:
    from basis_rl.trainer.trainer import BasisTrainer


def greedy_rewards(trainer: BasisTrainer, inputs: Sequence[dict[str, Any]]) -> Tensor:
    """``(N,)`` reward of the greedy rollout of each row's prompt, in the global row order, the same on every rank.

    Each rank generates for the distinct prompts among its own rows. Generation is collective (ZeRO-3, the vLLM server),
    so all ranks ask for the same number: a rank with fewer repeats its last one.
    """
    names = [row_prompt_id(row) for row in inputs]
    rows = [names.index(name) for name in dict.fromkeys(names)]
    counts = trainer.accelerator.gather(torch.tensor([len(rows)], device=trainer.accelerator.device))
    rows += [rows[-1]] * (int(counts.max()) - len(rows))
    asked = [dict(inputs[row]) for row in rows]
    prompts = [copy.deepcopy(row["prompt"]) for row in asked]
    with _greedy(trainer):
        prompt_ids, images, multimodal = trainer._tokenize_prompts(prompts)
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, multimodal, 1)
        tokens = sum(map(len, completion_ids))
        if trainer.tools:
            completions, completion_ids, tokens = trainer.later_turns(prompts, prompt_ids, completion_ids)
    drawn = torch.tensor([len(rows), tokens], device=trainer.accelerator.device)
    trainer.spending.draw(*trainer.accelerator.reduce(drawn, reduction="sum").tolist())
    if not trainer.tools:
        texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        conversational = not isinstance(prompts[0], str)
        completions = [[{"role": "assistant", "content": text}] if conversational else text for text in texts]
    with _logs_untouched(trainer):
        scores = GRPOTrainer._calculate_rewards(trainer, asked, prompts, completions, completion_ids)
    rewards = total_rewards(scores, trainer.reward_weights).tolist()
    by_name = dict(zip(gather_object([names[row] for row in rows]), rewards, strict=True))
    return torch.tensor([by_name[name] for name in gather_object(names)], dtype=torch.float32)


@contextmanager
def _greedy(trainer: BasisTrainer) -> Iterator[None]:
    """Within it the trainer's generation is greedy, whichever engine it has."""
    engine: Any = trainer
    settings: dict[str, Any]
    if trainer.use_vllm:
        engine, settings = trainer.vllm_generation, {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    else:
        config = copy.deepcopy(trainer.generation_config)
        config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        settings = {"generation_config": config}
    kept = {name: getattr(engine, name) for name in settings}
    for name, value in settings.items():
        setattr(engine, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(engine, name, value)


@contextmanager
def _logs_untouched(trainer: BasisTrainer) -> Iterator[None]:
    """What reward functions log within it is dropped: the greedy rollouts are not part of the batch."""
    extra, metrics = copy.deepcopy(trainer._pending_extra_logs), copy.deepcopy(trainer._pending_metrics)
    try:
        yield
    finally:
        trainer._pending_extra_logs, trainer._pending_metrics = extra, metrics
