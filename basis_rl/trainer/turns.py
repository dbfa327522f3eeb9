"""Rollouts of several turns with tools: TRL's loop, made safe for several ranks, many calls and hostile answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import trl.trainer.grpo_trainer
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.chat_template_utils import parse_response

from basis_rl.rewards import last_boxed
from basis_rl.run.seams import attributes
from basis_rl.trainer.tool_check import Pending

_SURROGATE = re.compile("[\ud800-\udfff]")
_Turn = tuple[list[list[int]], list[list[float]] | None]
Generate = Callable[..., _Turn]


@dataclass
class Turns:
    """Rollouts that may call tools, on any number of ranks.

    TRL's loop over turns runs on each rank by itself, while generation is collective (vLLM server, ZeRO-3, FSDP): ranks
    whose rollouts end at different turns would wait for each other forever, or take each other's results. Here every
    turn begins with an exchange of the open rows of all ranks, which are divided evenly and generated together. A rank
    that has finished helps the others until none has a row left.

    Args:
        accelerator: gathers.
        tokenizer: of the policy.
        max_completion_length: tokens of a rollout, over all turns.
        room: ``room(longest, most)``, a context within which no more than `most` tokens are generated; by a server, no
            more than `longest` with the prompt.
        has_log_probs: whether the engine gives the log-probabilities of what it sampled (vLLM).
    """

    accelerator: Accelerator
    tokenizer: Any
    max_completion_length: int
    room: Callable[[int, int], AbstractContextManager[Any]]
    has_log_probs: bool
    # Most tokens of a prompt and its completion, and what generates a turn; None outside of the loop over turns.
    _longest: int | None = field(default=None, init=False)
    _generate: Generate | None = field(default=None, init=False)
    _failed_calls: int = field(default=0, init=False)
    _void: list[bool] = field(default_factory=list, init=False)

    @property
    def running(self) -> bool:
        """Whether the loop over turns is on."""
        return self._longest is not None

    def loop(
        self, trl_loop: Callable[..., tuple[Any, ...]], generate: Generate, prompts: Any, prompt_ids: list[list[int]],
        *args: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """TRL's loop over the turns that follow the first, in step with all ranks.

        Args:
            trl_loop: TRL's `_tool_call_loop`.
            generate: TRL's `_generate_single_turn`.
            prompts: as TRL has them; `prompt_ids` and `args` likewise.
        """
        longest = max(map(len, prompt_ids)) + self.max_completion_length
        self._failed_calls = 0
        with attributes(self, _longest=longest, _generate=generate):
            with reading_calls():
                result = trl_loop(prompts, prompt_ids, *args)
            # Help the other ranks until none has a row left.
            while self.turn([]) is not None:
                pass
        mask, completions, completion_ids, log_probs, calls, failures, images = result
        return mask, completions, completion_ids, log_probs, calls, failures + self._failed_calls, images

    def turn(self, rows: list[list[int]]) -> _Turn | None:
        """Completions of this rank's rows and their log-probabilities (None without vLLM), in step with all ranks.

        Returns None when no rank has a row. A row that has no room left gets an empty completion.
        """
        everyone: list[tuple[list[list[int]], int]] = gather_object([(rows, self._longest)])
        longest = max(limit for _, limit in everyone)
        open_rows = [[row for row in theirs if len(row) < longest] for theirs, _ in everyone]
        waiting = [row for theirs in open_rows for row in theirs]
        if not any(theirs for theirs, _ in everyone):
            return None
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        answers: list[tuple[list[int], list[float]]] = []
        if waiting:
            assert self._generate is not None
            share = -(-len(waiting) // ranks)
            # Generation is collective, so all ranks must ask for the same number.
            asked = waiting + [waiting[0]] * (share * ranks - len(waiting))
            mine = asked[rank * share : (rank + 1) * share]
            with self.room(longest, max(longest - len(row) for row in asked)):
                ids, log_probs = self._generate(mine, None, {}, 1)
            answers = gather_object(list(zip(ids, log_probs or [[]] * len(ids), strict=True)))
        first = sum(map(len, open_rows[:rank]))
        own = iter(answers[first : first + len(open_rows[rank])])
        found = [next(own) if len(row) < longest else ([], []) for row in rows]
        return [ids for ids, _ in found], [log_probs for _, log_probs in found] if self.has_log_probs else None

    def take_answers(self, tool_messages: list[dict[str, Any]]) -> None:
        """Wait for the answers of a turn, all of whose calls have been begun, and make them harmless, in place."""
        self._failed_calls += settled_answers(tool_messages, self.tokenizer.all_special_tokens)

    def take_metrics(self, completions: Sequence[list[dict[str, Any]]]) -> dict[str, float]:
        """Turns, calls and void turns per rollout, over all ranks; remembers which of this rank's rollouts are void."""
        self._void = [has_void_turn(messages) for messages in completions]
        turns = [sum(message["role"] == "assistant" for message in messages) for messages in completions]
        called = [any(message.get("tool_calls") for message in messages) for messages in completions]
        sums = torch.tensor([len(turns), sum(turns), sum(called), sum(self._void)], device=self.accelerator.device)
        rows, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        return {f"tools/{name}": total / rows for name, total in zip(("turns", "used", "void"), totals, strict=True)}

    def drop_void(self, output: dict[str, Any]) -> None:
        """Take rollouts with a void turn out of the loss (SimpleTIR, Xue et al. 2025). Their rewards have counted in
        the baseline, their tokens do not count in the loss's average."""
        void = torch.tensor(self._void, device=output["tool_mask"].device)
        output["tool_mask"] = output["tool_mask"] * (~void)[:, None].to(output["tool_mask"].dtype)
        tokens = (output["completion_mask"] * output["tool_mask"]).sum()
        output["num_items_in_batch"] = self.accelerator.gather(tokens).sum()


def count_turn(environments: Sequence[Any] | None, is_first: bool = False) -> None:
    """Tell environments with an attribute ``turn_index`` which turn of the model the next calls come from: 0, 1, ...

    They see calls, not turns: a turn may have several, or one that never reaches them.
    """
    for environment in environments or []:
        if hasattr(environment, "turn_index"):
            environment.turn_index = 0 if is_first else environment.turn_index + 1


def settled_answers(tool_messages: list[dict[str, Any]], special: Sequence[str]) -> int:
    """Wait for the answers of a turn, all of whose calls have been begun, and make them harmless, in place; returns how
    many failed."""
    failed = 0
    for message in tool_messages:
        if isinstance(message["content"], Pending):
            result = message["content"].answer.result()
            failed += result.failed
            message["content"] = result.text
        if isinstance(message["content"], str):
            message["content"] = harmless(message["content"], special)
        message["name"] = harmless(message["name"], special)
    return failed


def reading_calls() -> AbstractContextManager[None]:
    """Within it, TRL reads calls of tools by `read_turn`."""
    return attributes(trl.trainer.grpo_trainer, parse_response=read_turn)


def read_turn(tokenizer: Any, ids: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """TRL's `parse_response`, for anything that a model may write: what cannot be read is text, never an exception."""
    try:
        message = parse_response(tokenizer, ids, *args, **kwargs)
        for call in message.get("tool_calls") or []:
            if not isinstance(call.get("function", {}).get("name"), str) or "type" not in call:
                raise ValueError("no call")
    # Whatever the parser raises: a model may write calls that are nested too deeply for it.
    except Exception:
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    return _without_surrogates(message)


def _without_surrogates(value: Any) -> Any:
    """JSON can spell halves of a surrogate pair, which no tokenizer and no file takes."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return [_without_surrogates(each) for each in value] if isinstance(value, list) else value


def harmless(text: str, special: Sequence[str]) -> str:
    """A tool's text, changed where the tokenizer would read a special token in it, such as an end of turn."""
    text = _SURROGATE.sub("\ufffd", text)
    for token in special:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def has_void_turn(messages: Sequence[dict[str, Any]]) -> bool:
    r"""Whether some turn of the model neither calls a tool nor gives an answer (``\boxed{}``), or it had no turn."""
    own = [message for message in messages if message["role"] == "assistant"]
    return not own or any(not turn.get("tool_calls") and last_boxed(turn.get("content") or "") is None for turn in own)
