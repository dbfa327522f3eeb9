"""Ranks that were given something else are refused, with its name, before anything is trained."""

import pytest
import torch

from examples.quickstart.warm_start import save
from tests.support.ranks import Launched
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.trainer.disagreeing import CASES


@pytest.mark.long
def test_ranks_that_disagree_are_refused_by_name(tmp_path):
    """Here the trained weights, log level, loader and a column that no reward reads are the rank's own matter."""
    for seed in range(2):
        save(tiny_model(seed=seed), tiny_tokenizer(), tmp_path / f"model{seed}")
    Launched(tmp_path / "log", "tests.trainer.disagreeing", tmp_path).wait()
    (first, steps), (second, _) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert list(first) == list(CASES)
    for name, message in first.items():
        assert "the settings of rank 1 differ from rank 0's: " in message
        assert name in message
        # One pair of values, and the message's own.
        assert message.count(", ") == 3 or name in ("training prompts", "baseline dr_grpo, rloo"), message
    assert first == second
    assert steps == 2
