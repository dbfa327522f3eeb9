"""Ranks that were given something else are refused, with its name, before anything is trained."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from basis_rl.trainer import state
from examples.quickstart.warm_start import save
from tests.support.ranks import Called
from tests.support.tiny import sums, tiny_model, tiny_tokenizer, tiny_trainer


def rewarding(offset):
    def reward(completions, completion_ids, solution, **kwargs):
        return [float((sum(ids) + offset) % 2) for ids in completion_ids]

    return reward


def with_column(name, values):
    return sums().remove_columns(name if name in sums().column_names else []).add_column(name, values)


GOLDS = [*map(str, range(1, 31, 2)), "3"]
# What each rank is given, by what the message names.
CASES = {
    "learning_rate 0.02, 0.01": [{"learning_rate": 0.01}, {"learning_rate": 0.02}],
    "temperature 0.5, 1.0": [{"temperature": 1.0}, {"temperature": 0.5}],
    "seed 4, 3": [{"seed": 3}, {"seed": 4}],
    "baseline dr_grpo, rloo": [{"baseline": "rloo"}, {"baseline": "dr_grpo"}],
    "training prompts": [{}, {"train_dataset": sums().select(reversed(range(16)))}],
    "column solution": [{}, {"train_dataset": with_column("solution", GOLDS)}],
    "eval_dataset few": [{"eval_dataset": {"few": sums(4)}}, {"eval_dataset": {"few": sums(5)}}],
    "code of the reward": [{"reward_funcs": rewarding(0)}, {"reward_funcs": rewarding(1)}],
    "weights of the KL reference": [{"beta": 0.1}, {"beta": 0.1, "seeded": 1}],
    "torch 0.1": [{}, {"versions": {"torch": "0.1"}}],
}
# Each with its own on the second rank, and nobody minds.
OWN = {
    "log_level": "error",
    "run_name": "another",
    "dataloader_num_workers": 1,
    "train_dataset": with_column("path", [f"/other/{i}" for i in range(16)]),
    "seeded": 1,
}


def built(folder: Path, baseline="rloo", versions=None, seeded=0, **given):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=seeded)
    if "beta" in given:
        # A reference is loaded from a folder, which each rank may have elsewhere.
        model = str(folder.parent / f"model{seeded}")
    given = {"reward_funcs": rewarding(0), "model": model, **given}
    installed = state.versions
    with patch.object(state, "versions", lambda *names: installed(*names) | (versions or {})):
        return tiny_trainer(folder, baseline, **given)


def on_rank(folder: Path) -> tuple[dict[str, str], int]:
    """Builds trainers for which the second rank is given something else, then trains with what ranks may have alone.

    Returns what each rank raises, and the steps.
    """
    rank = int(os.environ["RANK"])
    raised = {}
    for name, given in CASES.items():
        try:
            built(folder / "run", **given[rank])
        except ValueError as error:
            raised[name] = str(error)
    trainer = built(folder / "run", **(OWN if rank else {"train_dataset": with_column("path", ["/mine"] * 16)}))
    trainer.train()
    return raised, trainer.state.global_step


@pytest.mark.long
def test_ranks_that_disagree_are_refused_by_name(tmp_path):
    """Here the trained weights, log level, loader and a column that no reward reads are the rank's own matter."""
    for seed in range(2):
        save(tiny_model(seed=seed), tiny_tokenizer(), tmp_path / f"model{seed}")
    (first, steps), (second, _) = Called(tmp_path, "tests.trainer.test_disagreeing_ranks:on_rank", tmp_path).found()
    assert list(first) == list(CASES)
    for name, message in first.items():
        assert "the settings of rank 1 differ from rank 0's: " in message
        assert name in message
        # One pair of values, and the message's own.
        assert message.count(", ") == 3 or name in ("training prompts", "baseline dr_grpo, rloo"), message
    assert first == second
    assert steps == 2
