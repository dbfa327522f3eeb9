"""Rollouts of a value table that are kept beside it, so that another reward can grade them without a model."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from basis_rl.engine import Completion
from basis_rl.engine.client import request_seed
from basis_rl.run.artefacts import differences
from basis_rl.values.provenance import fingerprint
from basis_rl.values.shards import Shards, begun
from basis_rl.values.sources import Drawing, Prompts, Seeds

# The facts that depend on the reward, which may change: it also decides which rows are dropped and which columns count.
_OF_THE_REWARD = frozenset({"reward", "reward_code", "dataset"})


def kept_folder(table: Path) -> Path:
    """Where the rollouts of a table are."""
    return table.with_name(f"{table.name}.rollouts")


def pack(prompt: Sequence[int], rollouts: Sequence[Completion]) -> str:
    """A prompt's tokens, as a fingerprint, and its rollouts as one compressed line."""
    text = json.dumps([fingerprint(str(list(prompt))), rollouts])
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> tuple[str, list[Completion]]:
    """Inverse of `pack`."""
    prompt, rollouts = json.loads(zlib.decompress(base64.b64decode(packed)))
    return prompt, [Completion(*rollout) for rollout in rollouts]


class KeptSource:
    """The rollouts of an earlier build, in place of those of a model or a server.

    Args:
        folder: `kept_folder` of the table.
        config: of the model.
        tokenizer: its tokenizer.

    Raises:
        ValueError: no rollouts are kept there.
    """

    def __init__(self, folder: Path, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.folder = folder
        self.config = config
        self.tokenizer = tokenizer
        self.identity = begun(folder)
        if not self.identity:
            raise ValueError(
                f"--values_regrade: there are no rollouts in '{folder}'. Build the table with --values_keep_rollouts "
                "true first, which samples once."
            )
        self.name: str = self.identity["sampler"]
        seed = self.identity["seed"]
        records = Shards(folder, self.identity).records()
        self._packed = {request_seed(seed, each.part, each.prompt_id): each.rollouts for each in records}

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse a build that would sample otherwise.

        Raises:
            ValueError: says where the two differ.
        """
        known, asked = (
            {key: value for key, value in each.items() if key not in _OF_THE_REWARD}
            for each in (self.identity, json.loads(json.dumps(identity)))
        )
        if differing := differences(known, asked):
            raise ValueError(
                f"--values_regrade: the rollouts in '{self.folder}' were sampled otherwise:\n  "
                + "\n  ".join(differing)
                + "\nOnly the reward may change. Set these back, or build the table without --values_regrade."
            )

    def chunks(self, prompts: Prompts, count: int) -> list[list[int]]:
        """Each prompt by itself."""
        return [[index] for index in range(len(prompts))]

    def draw(self, prompts: Prompts, seeds: Seeds, sampling: Any, count: int, stop: threading.Event) -> Drawing:
        """See `ModelSource.draw`; nothing is sampled.

        Raises:
            ValueError: the rollouts of a prompt were not kept.
        """
        for (index,), seed in seeds.items():
            if stop.is_set():
                return
            packed = self._packed.get(seed)
            prompt, rollouts = unpack(packed) if packed else ("", [])
            if prompt != fingerprint(str(list(prompts[index]))):
                raise ValueError(
                    f"--values_regrade: '{self.folder}' has no rollouts of the dataset's prompt {index}: the prompt "
                    "was another one, --values_early_exit left them out, or they were sampled before "
                    "--values_keep_rollouts was set. Build the table without --values_regrade."
                )
            yield index, rollouts
