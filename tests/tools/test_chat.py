"""The chat template with tools, for models whose own has none."""

import json
from types import SimpleNamespace

import pytest
from trl.chat_template_utils import is_chat_template_prefix_preserving, supports_tool_calling

from basis_rl.tools import calculator, chat_template
from basis_rl.trainer.tool_check import prepare_tokenizer
from basis_rl.trainer.turns import read_turn
from tests.support.tiny import tiny_tokenizer

QUESTION = {"role": "user", "content": "What is 6 x 7?"}
ASKS = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": '6 * "7"'}}}


@pytest.fixture
def tokenizer():
    tok = tiny_tokenizer()
    tok.chat_template = chat_template("tools", tok)
    return tok


def test_trl_takes_the_template_and_reads_its_calls_back(tokenizer):
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    prepare_tokenizer(tokenizer, SimpleNamespace(use_vllm=False))
    for text, calls in (("", [ASKS]), ("So.", [ASKS, ASKS]), ("42", [])):
        turn = {"role": "assistant", "content": text, "tool_calls": calls}
        before = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([QUESTION, turn], return_dict=False)
        assert whole[: len(before)] == before
        found = read_turn(tokenizer, whole[len(before) :], prefix=before)
        assert (found.get("content") or "").strip() == text
        assert (found.get("tool_calls") or []) == calls


def test_the_model_is_told_all_that_the_schema_has(tokenizer):
    given = {"tools": [calculator], "add_generation_prompt": True, "tokenize": False}
    for messages in ([QUESTION], [{"role": "system", "content": "Be short."}, QUESTION]):
        told = tokenizer.apply_chat_template(messages, **given)
        assert all(each["content"] in told for each in messages)
        assert "- calculator: Calculate an arithmetic expression.\n" in told
        schema = json.loads(told.split("  expression: ")[1].split("\n")[0])
        assert schema["type"] == "string"
        assert told.endswith("<|im_start|>assistant\n")
        assert told.count("<|im_start|>system") == 1
    plain = tokenizer.apply_chat_template([QUESTION], tokenize=False)
    assert plain == f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n"


def test_a_file_is_taken_as_it_is_and_what_cannot_be_is_told(tokenizer, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}")
    assert chat_template(str(own), tokenizer) == "{{ messages }}"
    with pytest.raises(ValueError, match=r"there is no file 'other.jinja'"):
        chat_template("other.jinja", tokenizer)
    other = SimpleNamespace(get_vocab=lambda: {"<|im_start|>": 0})
    with pytest.raises(ValueError, match=r"needs the tokens .* which the tokenizer does not have"):
        chat_template("tools", other)
    assert chat_template(str(own), other) == "{{ messages }}"
