"""A step with `otb`, from generation to optimizer, makes no tensor of B x T x V elements."""

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from basis_rl.trainer import head
from benchmarks.trainers import random_model
from tests.support.tiny import tiny_tokenizer, tiny_trainer

ROWS, TOKENS, VOCABULARY = 4, 32, 19_000  # rows are those of one forward pass; the batch has twice as many
TILE = 16  # tokens of which the head computes logits at once


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So few tokens take several tiles, as thousands do."""
    monkeypatch.setattr(head, "TILE_BYTES", 4 * TILE * VOCABULARY)
    monkeypatch.setattr(head, "LEAST_ROWS", TILE)


class Storages(TorchDispatchMode):
    """Bytes of the largest storage behind anything that an op returned, and the names of all ops."""

    def __init__(self):
        super().__init__()
        self.largest, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def trainer_for(folder, **settings):
    tokenizer = tiny_tokenizer()
    model = random_model(VOCABULARY, 16, 1, 2, inner=2, tokenizer=tokenizer)
    settings |= {"per_device_train_batch_size": ROWS, "max_completion_length": TOKENS, "processing_class": tokenizer}
    prompts = Dataset.from_dict({"prompt": [f"{i} + 1 =" for i in range(16)]})
    return tiny_trainer(folder, "otb", model=model, train_dataset=prompts, **settings)


LOGITS = 4 * ROWS * TOKENS * VOCABULARY
CASES = {
    "old log-probabilities": {"gradient_accumulation_steps": 1, "max_steps": 2},
    "no old log-probabilities": {"gradient_accumulation_steps": 2, "max_steps": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_of_all_logits(case, tmp_path):
    trainer = trainer_for(tmp_path, **CASES[case])
    assert 3 * max(p.numel() * 4 for p in trainer.model.parameters()) < LOGITS
    with Storages() as storages:
        trainer.train()
    assert {"embedding_dense_backward", "multinomial"} <= storages.names  # backward and generation were seen
    # Weights and their gradient are as large as a tile here.
    assert 4 * TILE * VOCABULARY <= storages.largest < LOGITS / 3
