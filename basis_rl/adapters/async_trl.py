"""Our baselines in TRL's `AsyncGRPOTrainer`: a queue between its rollouts and its training."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from basis_rl.adapters.base import Estimator
from basis_rl.baselines import Baseline
from basis_rl.data.rows import problem_text
from basis_rl.identity import prompt_id


class BaselineQueue:
    """Stands for ``trainer.rollout_queue``: hands its rollouts on, with the advantages of a baseline of ours.

    ``trainer.add_callback(StateInCheckpoints(queue.estimator))`` keeps the state in checkpoints.

    Args:
        queue: ``trainer.rollout_queue``, which holds whole groups one after the other.
        baseline: see `Estimator`.
        num_generations: rollouts of a prompt.
        prompts: groups in a batch, for which the queue waits. What is believed is shared among them.

    Raises:
        ValueError: the baseline does not work there.
    """

    def __init__(self, queue: Any, baseline: Baseline | str, num_generations: int, prompts: int = 8) -> None:
        self.estimator = Estimator(baseline, "AsyncGRPOTrainer", ["prompt_texts"])
        if self.estimator.baseline.token_level == "always":
            raise ValueError(f"'{self.estimator.name}' has advantages of tokens, AsyncGRPOTrainer one of each rollout.")
        self.queue = queue
        self.num_generations = num_generations
        self.size = prompts * num_generations
        self.waiting: list[Any] = []
        self.ready: deque[Any] = deque()

    def qsize(self) -> int:
        """How many rollouts are there."""
        return len(self.ready) + len(self.waiting) + int(self.queue.qsize())

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The next rollout; arguments and errors are those of the queue.

        Raises:
            ValueError: a rollout was split into several rows of training, whose rewards would count several times.
        """
        while not self.ready:
            self.waiting.append(self.queue.get(*args, **kwargs))
            if len(self.waiting) == self.size:
                self._estimate()
        return self.ready.popleft()

    def _estimate(self) -> None:
        samples, self.waiting = self.waiting, []
        groups = [sample.group_id for sample in samples]
        if set(Counter(groups).values()) != {self.num_generations}:
            raise ValueError("AsyncGRPOTrainer has split a conversation into several rows; baselines need one of each.")
        rewards = torch.tensor([sample.metrics["reward"] for sample in samples])
        mask = pad_sequence([torch.as_tensor(sample.completion_mask) for sample in samples], batch_first=True)
        prompt_ids = [prompt_id(sample.prompt) for sample in samples]
        texts = [problem_text(sample.prompt) for sample in samples]
        advantages = self.estimator.estimate(rewards, mask, groups, prompt_ids, prompt_texts=texts)
        for sample, values in zip(samples, advantages, strict=True):
            # All actions have the advantage of the rollout, and other tokens 0.
            sample.advantage = float(values[values.abs().argmax()])
        self.ready.extend(samples)
