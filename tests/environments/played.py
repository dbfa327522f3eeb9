"""A training of a tiny model that calls one tool of an environment, by a rule over its random tokens."""

from tests.support import tooled
from tests.support.tiny import tiny_trainer


def trained(folder, monkeypatch, tool, argument, **own):
    """One step; two turns in three are calls of `tool` with a number from 0 to 4. The trainer, with what it kept."""
    tok = tooled.tokenizer()

    def read(tokenizer, ids, *args, **kwargs):
        if sum(ids) % 3 and ids[-1:] == [tok.eos_token_id]:
            call = {"name": tool, "arguments": {argument: sum(ids) % 5}}
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        return {"role": "assistant", "content": str(sum(ids) % 5)}

    monkeypatch.setattr(tooled.turns, "read_turn", read)
    settings = {"max_completion_length": 48, "max_tool_calling_iterations": 4, "max_steps": 1}
    settings |= {"generation_kwargs": tooled.only(tok), "processing_class": tok}
    trainer = tiny_trainer(folder, "grpo", tooled.Kept, **settings, **own)
    trainer.train()
    return trainer


def calls(conversation):
    """Numbers that the model called the tool with, and the answers. A last call has none if it left no room for one, or
    if there were as many before as may be (4)."""
    asked = [call["function"]["arguments"] for turn in conversation for call in turn.get("tool_calls") or []]
    return [next(iter(each.values())) for each in asked], [turn for turn in conversation if turn["role"] == "tool"]
