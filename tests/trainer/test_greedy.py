"""ReMax in training: one greedy rollout per distinct prompt, the right one for each row, and no trace in the logs."""

import pytest
import torch
from transformers import GenerationConfig

from basis_rl.engine import Sampling, prompt_tokens, sample
from basis_rl.run.usage import Usage
from basis_rl.trainer import BasisTrainer, trainer
from basis_rl.trainer.random_numbers import OwnNumbers
from tests.support.ranks import Ranks
from tests.support.tiny import Keeps, tiny_tokenizer, tiny_trainer


@pytest.mark.parametrize("continuous", [False, pytest.param(True, marks=pytest.mark.long)])
def test_greedy_rewards_are_those_of_greedy_decoding(continuous, tmp_path, tiny_path):
    calls = []

    def score(ids, solution):
        return (sum(ids) + 7 * int(solution)) % 97 / 97

    def reward(prompts, completions, completion_ids, solution, log_metric, log_extra, **kwargs):
        calls.append(len(completions))
        log_metric("reward/calls", 1.0)
        log_extra("number", [float(sum(ids)) for ids in completion_ids])
        return [score(ids, gold) for ids, gold in zip(completion_ids, solution, strict=True)]

    class Compare(Keeps):
        expected: dict

        def _advantages(self, inputs, output):
            rows = {r["solution"]: r["prompt"] for r in inputs}
            tokenizer = tiny_tokenizer()
            tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in rows.values()]
            greedy = sample(self.model, tokenizer, tokens, Sampling(6, temperature=0.0))
            answers = {i: completions[0].token_ids for i, completions in greedy}
            self.model.train()
            self.expected = {gold: score(answers[i], gold) for i, gold in enumerate(rows)}
            self.rows = [r["solution"] for r in inputs]
            return super()._advantages(inputs, output)

    settings = {"log_completions": True, "use_transformers_continuous_batching": continuous}
    trainer = tiny_trainer(tmp_path, "remax", Compare, model=tiny_path, reward_funcs=reward, **settings)
    before = trainer.generation_config
    # The trial before training.
    calls.clear()
    trainer.train()
    ((batch, _),) = trainer.kept
    expected = torch.tensor([trainer.expected[row] for row in trainer.rows])
    torch.testing.assert_close(batch.greedy_rewards, expected)
    assert len(set(expected.tolist())) > 1
    assert calls == [16, 4], "16 rollouts, and one greedy one for each of 4 prompts"
    assert trainer.generation_config is before
    assert len(trainer._logs["extra"]["number"]) == 16
    assert len(trainer._logs["rewards"]["reward"]) == 16
    assert not trainer._pending_metrics


DRAWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}


class FakeRun(BasisTrainer):
    """A rank of a run: what it says to a prompt is told by how it was asked."""

    def __init__(self, accelerator, ranks):
        self.accelerator, self.use_vllm, self.ranks = accelerator, False, ranks
        self.generation_config = GenerationConfig(do_sample=True, max_new_tokens=6, **DRAWN)
        self.spending, self.reward_weights = Usage(), torch.tensor([1.0, 0.5])
        self._numbers = OwnNumbers(torch.device("cpu"))
        self.reads = frozenset({"prompt"})

    def _generate_unlogged(self, prompts):
        self.settings = {name: getattr(self.generation_config, name) for name in ("do_sample", *DRAWN)}
        self.prompts = list(prompts)
        return [f"{prompt}!" for prompt in prompts], [[0] * int(prompt) for prompt in prompts], len(prompts) * 10

    def _scores_unlogged(self, rows, prompts, rollouts, token_ids):
        assert [row["prompt"] for row in rows] == prompts
        assert [f"{len(ids)}!" for ids in token_ids] == rollouts
        return self.ranks.accelerator(0).gather(torch.tensor([[float(prompt), 1.0] for prompt in prompts]))


def test_ranks_ask_for_as_many_and_every_row_gets_its_prompts_reward(monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(trainer, "gather_object", ranks.gather_object)
    prompts = [["3", "3", "4", "4", "5", "5"], ["4", "4", "4", "4", "6", "6"]]

    def work(rank):
        run = FakeRun(ranks.accelerator(rank), ranks)
        return run, run._greedy_rewards([{"prompt": prompt} for prompt in prompts[rank]])

    found = ranks.run(work)
    for _, rewards in found:
        assert rewards.tolist() == [float(prompt) + 0.5 for each in prompts for prompt in each]
    assert [run.prompts for run, _ in found] == [["3", "4", "5"], ["4", "6", "6"]]
    for run, _ in found:
        assert run.spending.drawn == (6, 60)
        assert run.settings == {**dict.fromkeys(DRAWN), "do_sample": False}
        assert run.generation_config.do_sample
        assert run.generation_config.top_k == 5
