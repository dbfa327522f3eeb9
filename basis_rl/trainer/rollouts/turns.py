"""Rollouts of several turns with tools: TRL's loop, made safe for several ranks, many calls and hostile answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import trl.trainer.grpo_trainer
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from basis_rl.rewards import last_boxed
from basis_rl.trainer.rollouts.tool_check import Pending, as_functions, check_tools

_SURROGATE = re.compile("[\ud800-\udfff]")
_Turn = tuple[list[list[int]], list[list[float]] | None]


class ToolTrainer(GRPOTrainer):
    """`GRPOTrainer` whose rollouts may call tools on any number of ranks.

    TRL's loop over turns runs on each rank by itself, while generation is collective (vLLM server, ZeRO-3, FSDP): ranks
    whose rollouts end at different turns would wait for each other for ever, or take each other's answers. Here every
    turn begins with all ranks telling what they have left; the rows of all are shared out evenly and generated
    together; who has finished helps the others until nobody has a row left.
    """

    generation_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._longest: int | None = None  # tokens of prompt and completion; within the loop over turns only
        self._failed_calls = 0
        self._void: list[bool] = []
        functions = as_functions(kwargs.get("tools"))
        settings, dataset = kwargs.get("args"), kwargs.get("train_dataset")
        if settings is not None:
            check_tools(functions, kwargs.get("processing_class"), dataset, settings, PartialState().num_processes)
        if functions:
            kwargs["tools"] = functions
        super().__init__(*args, **kwargs)

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *args: Any) -> tuple[Any, ...]:
        self._longest = max(map(len, prompt_ids)) + self.max_completion_length
        self._failed_calls = 0
        try:
            result: tuple[Any, ...] = super()._tool_call_loop(prompts, prompt_ids, *args)
            while self._turn([]) is not None:  # the other ranks' rows
                pass
        finally:
            self._longest = None
        mask, completions, completion_ids, log_probs, calls, failures, images = result
        return mask, completions, completion_ids, log_probs, calls, failures + self._failed_calls, images

    def rollouts_apart(self, prompts: list[Any]) -> tuple[list[Any], list[list[int]], int]:
        """One rollout of each prompt, all turns, without a trace in the logs: the rollouts, their token ids, and how
        many tokens are the model's own."""
        prompt_ids, images, fields = self._tokenize_prompts(prompts)
        completion_ids, _ = self._generate_single_turn(prompt_ids, images, fields, 1)
        if not self.tools:
            rollouts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            if not isinstance(prompts[0], str):
                rollouts = [[{"role": "assistant", "content": text}] for text in rollouts]
            return rollouts, completion_ids, sum(map(len, completion_ids))
        first = [[parsed(self._tokenizer, ids, prompt_ids[i], self.tools)] for i, ids in enumerate(completion_ids)]
        with patch.object(trl.trainer.grpo_trainer, "parse_response", parsed):
            mask, rollouts, ids, *_ = self._tool_call_loop(prompts, prompt_ids, completion_ids, first, None, None, {})
        return rollouts, ids, sum(map(sum, mask))

    def scores_apart(
        self, rows: Sequence[Any], prompts: list[Any], rollouts: list[Any], token_ids: list[list[int]]
    ) -> Tensor:
        """``(N, F)`` of all ranks' rollouts; what reward functions log is dropped."""
        logs = {name: copy.deepcopy(getattr(self, name)) for name in ("_pending_extra_logs", "_pending_metrics")}
        with patch.multiple(self, **logs):
            scores: Tensor = super()._calculate_rewards(rows, prompts, rollouts, token_ids)
        return scores

    def _generate(self, prompts: list[Any]) -> Any:
        with patch.object(trl.trainer.grpo_trainer, "parse_response", parsed):
            return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any, *args: Any, **kwargs: Any) -> Any:
        if self._longest is None or images or fields:
            return super()._generate_single_turn(prompt_ids, images, fields, *args, **kwargs)
        turn = self._turn(prompt_ids)
        assert turn is not None
        return turn

    def _turn(self, rows: list[list[int]]) -> _Turn | None:
        """Completions of this rank's rows and their log-probabilities (None without vLLM), in step with all ranks.

        Returns None when no rank has a row. A row that has no room left gets an empty completion.
        """
        everyone: list[tuple[list[list[int]], int]] = gather_object([(rows, self._longest)])
        longest = max(limit for _, limit in everyone)
        open_rows = [[row for row in theirs if len(row) < longest] for theirs, _ in everyone]
        waiting = [row for theirs in open_rows for row in theirs]
        if not any(theirs for theirs, _ in everyone):
            return None
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        answers: list[tuple[list[int], list[float]]] = []
        if waiting:
            share = -(-len(waiting) // ranks)
            asked = waiting + [waiting[0]] * (share * ranks - len(waiting))  # all ranks ask for the same number
            mine = asked[rank * share : (rank + 1) * share]
            with self._room(longest, max(longest - len(row) for row in asked)):
                ids, log_probs = super()._generate_single_turn(mine, None, {}, 1)
            answers = gather_object(list(zip(ids, log_probs or [[]] * len(ids), strict=True)))
        first = sum(map(len, open_rows[:rank]))
        own = iter(answers[first : first + len(open_rows[rank])])
        found = [next(own) if len(row) < longest else ([], []) for row in rows]
        return [ids for ids, _ in found], [log_probs for _, log_probs in found] if self.use_vllm else None

    def _room(self, longest: int, most: int) -> AbstractContextManager[Any]:
        """Within it no more than `most` tokens are generated; by a server, no more than `longest` with the prompt."""
        if self.use_vllm:
            return patch.multiple(self.vllm_generation, max_completion_length=most, longest=longest)
        config = copy.deepcopy(self.generation_config)
        config.max_new_tokens = most
        return patch.object(self, "generation_config", config)

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        """Called when all calls of the turn have been begun: here they are waited for."""
        special = self._tokenizer.all_special_tokens
        for message in tool_messages:
            if isinstance(message["content"], Pending):
                result = message["content"].answer.result()
                self._failed_calls += result.failed
                message["content"] = result.text
            if isinstance(message["content"], str):
                message["content"] = harmless(message["content"], special)
            message["name"] = harmless(message["name"], special)
        suffix: list[int] = super()._get_tool_suffix_ids(tool_messages)
        return suffix

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Tensor:
        if self.tools:
            self._log_turns(completions)
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, *args)
        return rewards

    def _log_turns(self, completions: Sequence[list[dict[str, Any]]]) -> None:
        self._void = [has_void_turn(messages) for messages in completions]
        turns = [sum(message["role"] == "assistant" for message in messages) for messages in completions]
        called = [any(message.get("tool_calls") for message in messages) for messages in completions]
        sums = torch.tensor([len(turns), sum(turns), sum(called), sum(self._void)], device=self.accelerator.device)
        rows, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, total in zip(("turns", "used", "void"), totals, strict=True):
            self.log_metric(f"tools/{name}", total / rows)

    def drop_void(self, output: dict[str, Any]) -> None:
        """Take rollouts with a void turn out of the loss (SimpleTIR, Xue et al. 2025). Their rewards have counted in
        the baseline, their tokens do not count in the loss's average."""
        if not (self.tools and self.args.filter_void_turns):
            return
        void = torch.tensor(self._void, device=output["tool_mask"].device)
        output["tool_mask"] = output["tool_mask"] * (~void)[:, None].to(output["tool_mask"].dtype)
        tokens = (output["completion_mask"] * output["tool_mask"]).sum()
        output["num_items_in_batch"] = self.accelerator.gather(tokens).sum()


def parsed(tokenizer: Any, ids: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """TRL's `parse_response`, for anything that a model may write: what cannot be read is text, never an exception."""
    try:
        message = parse_response(tokenizer, ids, *args, **kwargs)
        for call in message.get("tool_calls") or []:
            if not isinstance(call.get("function", {}).get("name"), str) or "type" not in call:
                raise ValueError("no call")
    except Exception:  # nesting too deep to parse, say
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    result: dict[str, Any] = _without_surrogates(message)
    return result


def _without_surrogates(value: Any) -> Any:
    """JSON can spell halves of a surrogate pair, which no tokenizer and no file takes."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return [_without_surrogates(each) for each in value] if isinstance(value, list) else value


def harmless(text: str, special: Sequence[str]) -> str:
    """The text of a tool, in which nothing is taken for an end of turn or another of the tokenizer's special tokens."""
    text = _SURROGATE.sub("\ufffd", text)
    for token in special:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def has_void_turn(messages: Sequence[dict[str, Any]]) -> bool:
    r"""Some turn of the model neither calls a tool nor gives an answer (``\boxed{}``), or it had none at all."""
    own = [message for message in messages if message["role"] == "assistant"]
    return not own or any(not turn.get("tool_calls") and last_boxed(turn.get("content") or "") is None for turn in own)
