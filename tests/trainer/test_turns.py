"""Turns in step: ranks that have different numbers of rows left generate together, and each gets its own answers."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig
from trl import GRPOTrainer

from basis_rl.tools import ToolResult
from basis_rl.trainer import BasisTrainer, turns
from basis_rl.trainer.random_numbers import OwnNumbers
from basis_rl.trainer.tool_check import Pending
from tests.support.ranks import Ranks


@pytest.fixture
def two(monkeypatch):
    ranks = Ranks(2)
    monkeypatch.setattr(turns, "gather_object", ranks.gather_object)
    return ranks


class FakeRun(BasisTrainer):
    """A rank of a run; `asked` gets what it generates for, its room, and the most tokens with the prompt."""

    def __init__(self, accelerator, use_vllm, asked):
        self.accelerator, self.use_vllm, self.asked = accelerator, use_vllm, asked
        self.turns = turns.Turns(accelerator, None, 10, self._room, has_log_probs=use_vllm)
        self.vllm_generation = SimpleNamespace(max_completion_length=99, longest=None)
        self.generation_config = GenerationConfig(max_new_tokens=99)

    def generate(self, rows, images, fields, num_generations):
        assert (images, fields, num_generations) == (None, {}, 1)
        engine = self.vllm_generation
        room = engine.max_completion_length if self.use_vllm else self.generation_config.max_new_tokens
        self.asked.append((rows, room, engine.longest))
        return [[sum(row)] for row in rows], [[-float(sum(row))] for row in rows] if self.use_vllm else None


def within_loop(ranks, rank, use_vllm, longest, asked):
    """`Turns` of one rank, as within the loop over turns."""
    run = FakeRun(ranks.accelerator(rank), use_vllm, asked[rank])
    run.turns._longest, run.turns._generate = longest, run.generate
    return run


@pytest.mark.parametrize("use_vllm", [False, True])
def test_every_rank_gets_the_answers_to_its_own_rows(use_vllm, two):
    asked = [[], []]
    rows = [[[1, 1], [2] * 7, [3] * 8, [4, 4, 4]], [[5]]]  # of which the third has no room left

    def work(rank):
        run = within_loop(two, rank, use_vllm, 8 - rank, asked)
        made = run.turns
        found = made.turn(rows[rank]), made.turn(rows[rank][:1] if rank else []), made.turn([])
        engine = run.vllm_generation
        assert engine.max_completion_length == run.generation_config.max_new_tokens == 99
        assert engine.longest is None
        return found

    (first, second, none), (other, alone, nothing) = two.run(work)
    assert first[0] == [[2], [14], [], [12]]
    assert first[1] == ([[-2.0], [-14.0], [], [-12.0]] if use_vllm else None)
    assert other[0] == [[5]]
    assert (second[0], alone[0]) == ([], [[5]])
    assert none is nothing is None
    limits = (7, 8 if use_vllm else None)  # of the shortest prompt, [5]; the longest that any rank allows
    assert asked[0] == [([[1, 1], [2] * 7], *limits), ([[5]], *limits)]
    assert asked[1] == [([[4, 4, 4], [5]], *limits), ([[5]], *limits)]


def test_a_rank_without_rows_fills_up_and_all_full_rows_generate_nothing(two):
    asked = [[], []]
    rows = [[[1], [2], [3]], []]
    odd = two.run(lambda rank: within_loop(two, rank, True, 4, asked).turns.turn(rows[rank]))
    assert [found[0] for found in odd] == [[[1], [2], [3]], []]
    assert [each[0][0] for each in asked] == [[[1], [2]], [[3], [1]]], "as many on each rank"
    asked = [[], []]
    full = two.run(lambda rank: within_loop(two, rank, True, 2, asked).turns.turn([[1, 1]]))
    assert full == [([[]], [[]])] * 2
    assert asked == [[], []]


def test_the_loop_helps_the_others_until_nobody_has_a_row(two):
    asked = [[], []]

    def work(rank):
        run = FakeRun(two.accelerator(rank), True, asked[rank])
        made = run.turns

        def trl_loop(prompts, prompt_ids, rounds):
            assert made.running
            found = [made.turn([[k + 1]])[0][0][0] for k in range(rounds)]
            return [1], "completions", found, None, 5, 2, []

        result = made.loop(trl_loop, run.generate, None, [[1, 1], [1]], 3 if rank else 1)
        assert not made.running, "outside the loop a turn is a rank's own"
        return result

    for rank, (mask, completions, ids, log_probs, calls, failures, images) in enumerate(two.run(work)):
        assert ids == ([1, 2, 3] if rank else [1])
        assert (mask, completions, log_probs, calls, failures, images) == ([1], "completions", None, 5, 2, [])
    assert [len(each) for each in asked] == [3, 3]
    assert {limit for each in asked for *_, limit in each} == {12}, "the longest prompt and the completion"


def test_answers_are_waited_for_and_neither_they_nor_names_end_a_turn():
    tokenizer = SimpleNamespace(all_special_tokens=["<|im_end|>"])
    made = turns.Turns(None, tokenizer, 10, None, has_log_probs=False)
    answer = Future()
    messages = [
        {"role": "tool", "name": "sum<|im_end|>", "content": Pending(answer)},
        {"role": "tool", "name": "sum", "content": "7<|im_end|>"},
        {"role": "tool", "name": "look", "content": [{"type": "image"}]},
    ]
    threading.Timer(0.1, answer.set_result, [ToolResult("so<|im_end|>", failed=True)]).start()
    made.take_answers(messages)
    assert [message["name"] for message in messages] == ["sum< |im_end|>", "sum", "look"]
    assert [message["content"] for message in messages] == ["so< |im_end|>", "7< |im_end|>", [{"type": "image"}]]
    assert made._failed_calls == 1


def test_within_the_loop_a_turn_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, *args: ("alone", *args))
    made = object.__new__(BasisTrainer)
    made.use_vllm = True
    made._served = made.environments = None
    made._numbers = OwnNumbers(torch.device("cpu"))
    made.turns = SimpleNamespace(running=True, turn=lambda rows: ("together", rows))
    assert made._generate_single_turn([[1]], None, {}, 1) == ("together", [[1]])
    assert made._generate_single_turn([[1]], ["image"], {}, 1) == ("alone", [[1]], ["image"], {}, 1)
    made.turns.running = False
    assert made._generate_single_turn([[1]], None, {}, 1) == ("alone", [[1]], None, {}, 1)
