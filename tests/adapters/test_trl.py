"""TRL's own trainers with our baselines, on the CPU."""

import queue
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from basis_rl.adapters.async_trl import BaselineQueue
from basis_rl.adapters.trl import STATE_FILE, BaselineMixin
from basis_rl.baselines import BasisHistory, build_baseline
from basis_rl.identity import prompt_id
from tests.adapters.test_adapted_baselines import by_itself
from tests.support.tiny import Keeps, parity_reward, sums, tiny_model, tiny_tokenizer, tiny_trainer


class Trainer(BaselineMixin, GRPOTrainer):
    """Keeps the advantages of each generation batch."""

    def _estimated(self, *args):
        values = super()._estimated(*args)
        self.kept.append(values.double())
        return values


def trained(folder, baseline, resume=None, prompts=2, **settings):
    args = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4, max_completion_length=6,
        max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=3, loss_type="dapo",
        **{"save_strategy": "no", **settings},
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    trainer = Trainer(
        model=tiny_model(tokenizer), reward_funcs=parity_reward, args=args, train_dataset=sums(prompts),
        processing_class=tokenizer, baseline=baseline,
    )  # fmt: skip
    trainer.kept = []
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def ours(folder, baseline):
    trainer = tiny_trainer(
        folder, baseline, cls=Keeps, steps_per_generation=1, max_steps=3, objective="dapo", train_dataset=sums(2)
    )
    trainer.train()
    return [values for _, values in trainer.kept]


@pytest.mark.parametrize("name", ["basis_history", "rloo"])
def test_three_steps_of_trls_trainer_have_the_advantages_of_ours(name, tmp_path):
    params = {"target": "value"} if name == "basis_history" else {}
    theirs = trained(tmp_path / "theirs", build_baseline(name, **params))
    expected = ours(tmp_path / "ours", build_baseline(name, **params))
    assert len(theirs.kept) == len(expected) == 3
    assert any(values.abs().max() > 0.1 for values in expected)
    for found, values in zip(theirs.kept, expected, strict=True):
        torch.testing.assert_close(found, values, rtol=0, atol=1e-6)
    logged = {key for row in theirs.state.log_history for key in row}
    assert ("baseline/known" if name == "basis_history" else "baseline/undefined") in logged


def test_a_resumed_run_goes_on_with_its_belief(tmp_path):
    # TRL's own resume is exact in the first epoch only.
    whole = trained(tmp_path, BasisHistory(), prompts=16, save_strategy="steps", save_steps=1)
    assert (tmp_path / "checkpoint-2" / STATE_FILE).is_file()
    resumed = trained(tmp_path, BasisHistory(), resume=str(tmp_path / "checkpoint-2"), prompts=16)
    [found] = resumed.kept
    torch.testing.assert_close(found, whole.kept[2])
    assert resumed.estimator.step == 3


@dataclass
class Sample:
    """The fields of TRL's `RolloutSample` that matter."""

    prompt: Any
    group_id: int
    completion_mask: Any
    metrics: Any
    advantage: float = 0.0


def sampled(step, prompts=2, group=3):
    generator = torch.Generator().manual_seed(step)
    for place in range(prompts):
        for _ in range(group):
            mask = np.array([0] * 3 + [1] * int(torch.randint(1, 5, (), generator=generator)))
            reward = float(torch.randint(0, 2, (), generator=generator))
            yield Sample(sums()[place + step]["prompt"], 10 * step + place, mask, {"reward": reward})


def test_rollouts_of_an_asynchronous_run_pass_a_queue():
    samples = [list(sampled(step)) for step in range(3)]
    batches = []
    for batch in samples:
        masks = [torch.tensor(each.completion_mask) for each in batch]
        mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True).bool()
        rewards = torch.tensor([each.metrics["reward"] for each in batch])
        batches.append((rewards, mask, [each.group_id for each in batch], [prompt_id(each.prompt) for each in batch]))
    source = queue.Queue()
    rollouts = BaselineQueue(source, BasisHistory(), num_generations=3, prompts=2)
    for batch, expected in zip(samples, by_itself(BasisHistory(), batches), strict=True):
        for each in batch[:-1]:
            source.put(each)
        with pytest.raises(queue.Empty):
            rollouts.get(timeout=0.01)
        source.put(batch[-1])
        assert rollouts.qsize() == len(batch)
        assert [rollouts.get(timeout=0.01) for _ in batch] == batch
        found = torch.tensor([each.advantage for each in batch])
        assert found.abs().max() > 0.1
        rows = torch.arange(len(batch))
        last = torch.tensor([len(each.completion_mask) - 1 for each in batch])
        torch.testing.assert_close(found, expected[rows, last].float())


def test_split_conversations_and_advantages_of_tokens_are_refused():
    source = queue.Queue()
    for each in [*sampled(0, prompts=1), *sampled(0, prompts=1)]:
        source.put(each)
    with pytest.raises(ValueError, match="split a conversation"):
        BaselineQueue(source, "rloo", num_generations=3, prompts=2).get()
    with pytest.raises(ValueError, match="advantages of tokens"):
        BaselineQueue(source, BasisHistory(target="optimal_token"), num_generations=3)
