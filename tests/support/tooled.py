"""Rollouts of several turns from a model that has learnt nothing: what is a call is a rule over its random tokens."""

from __future__ import annotations

from typing import Any

from basis_rl.rewards.extract import completion_text
from basis_rl.tools import calculator
from basis_rl.trainer import turns
from examples.quickstart.warm_start import save
from examples.tools.warm_start import tool_tokenizer
from tests.support.tiny import Keeps, sums, tiny_model, tiny_trainer


def tokenizer():
    return tool_tokenizer([f"{i} + {i + 1} =" for i in range(16)], vocab_size=300)


def few_tokens(tok) -> list[int]:
    """Digits and the end of a turn: with so few a random model ends its turns soon."""
    return [tok.eos_token_id, *tok.convert_tokens_to_ids(list("0123456"))]


def only(tok) -> dict[str, Any]:
    """`generation_kwargs` by which transformers draws no others."""
    allowed = set(few_tokens(tok))
    return {"suppress_tokens": [i for i in range(len(tok)) if i not in allowed]}


def decided_model():
    """What it says at its likeliest depends on what it is asked."""
    model = tiny_model(tokenizer())
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(15)
    return model


def ending(tok) -> dict[str, Any]:
    """`generation_kwargs` by which likeliest tokens come to an end, too."""
    return {**only(tok), "exponential_decay_length_penalty": (1, 1.5)}


def longest_prompt(tok) -> int:
    """In tokens."""
    rows = (tok.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in sums())
    return max(map(len, rows))


def expression(ids: list[int]) -> str:
    return f"{sum(ids) % 50} + 1"


def by_rule(tok, ids: list[int], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """In place of parsing: two turns in three are a call, if they have an end; the others an answer."""
    if sum(ids) % 3 and ids[-1] == tok.eos_token_id:
        call = {"name": "calculator", "arguments": {"expression": expression(ids)}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": "assistant", "content": f"\\boxed{{{sum(ids)}}}"}


def last_turn(completions, **kwargs):
    """0 or 1 by the model's last message, of rollouts that call."""
    return [float(len(messages) > 1 and sum(completion_text(messages).encode()) % 2) for messages in completions]


class Kept(Keeps):
    """Keeps each batch's rollouts."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        for messages, ids in zip(completions, completion_ids, strict=True):
            # a tool has the last word only where its answer leaves no room
            assert messages[-1]["role"] == "assistant" or len(ids) == self.max_completion_length
        self.conversations = completions
        self.completion_lists = completion_ids
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids)

    def noted(self, inputs, output, local):
        return {
            "conversations": self.conversations,
            "ids": self.completion_lists,
            "mask": (output["completion_mask"] * output["tool_mask"]).cpu(),
            "advantages": local.clone().cpu(),
            "batch": self._pending.newest,
        }


def trainer(folder, baseline: str, tools=(calculator,), cls=Kept, model=None, **settings: Any):
    tok = tokenizer()
    turns.read_turn = by_rule
    drawn = {} if settings.get("use_vllm") else {"generation_kwargs": only(tok)}
    multi = {"max_completion_length": 48, "max_tool_calling_iterations": 4, "max_steps": 2, "steps_per_generation": 1}
    multi["allow_truncated_sampling"] = True
    if model is None:
        model = f"{folder}-model"
        save(tiny_model(tok), tok, model)
    own = {"model": str(model), "reward_funcs": last_turn, "processing_class": tok, "tools": list(tools)}
    return tiny_trainer(folder, baseline, cls, **{**own, **multi, **drawn, **settings})
