"""Data that a run would misread, or fail on after it has begun, is refused by name; what is one step away passes."""

import copy

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from tokenizers.processors import TemplateProcessing

from basis_rl.engine.local import prompt_tokens
from basis_rl.rewards import FormatReward, MathVerifyReward
from basis_rl.rewards.choice import ChoiceReward
from basis_rl.rewards.exact import ExactReward
from basis_rl.trainer.plan import check_with_model, plan_run, with_data
from basis_rl.trainer.prompt_check import render_prompt
from tests.support.tiny import config, parity_reward, sums, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
BEGIN, END = TOKENIZER.eos_token, TOKENIZER.eos_token_id


def user(content):
    return [{"role": "user", "content": content}]


def parts(text):
    return user([{"type": "text", "text": text}])


def prompts(*different, rest="1 + 1 ="):
    """Sixteen rows, of which the last ones have these prompts."""
    rest = user(rest) if not isinstance(different[0], str) else rest
    rows = [rest] * (16 - len(different)) + list(different)
    return Dataset.from_dict({"prompt": rows, "solution": ["2"] * 16})


def golds(*different):
    return Dataset.from_dict({"prompt": [user(f"{i} =") for i in range(8)], "solution": [*different]})


def stream(dataset):
    return IterableDataset.from_generator(lambda: iter(dataset))


def renamed(column):
    return sums().add_column(column, list(range(16)))


def tokenizer(template=None, before=(), after=()):
    """That of the tests with another chat template, or with tokens around texts."""
    made = copy.deepcopy(TOKENIZER)
    if template is not None:
        made.chat_template = template
    made.bos_token = BEGIN
    if before or after:
        single = " ".join([*before, "$A", *after])
        special = [(token, made.convert_tokens_to_ids(token)) for token in {*before, *after}]
        made.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return made


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
OF_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    "{% endfor %}"
)
SYSTEM = [{"role": "system", "content": "Short."}, *user("1 =")]
TOLD = [*user("1 ="), {"role": "assistant", "content": "1"}]
TEXTS = prompts("1 + 2 =", "3 + 4 =")
MATH, EXACT, CHOICE = MathVerifyReward(num_workers=1), ExactReward(), ChoiceReward()
ONES = ["1"] * 7
NO_GOLD = stream(sums().remove_columns("solution"))

# What is wrong, how it is right one step away, and what the message says.
MISTAKES = {
    "None gold": (
        {"dataset": golds(*ONES, None), "reward": MATH},
        {"dataset": golds(*ONES, "1"), "reward": MATH},
        r"1 of 8 golds .*\n  row 7: None",
    ),
    "NaN gold": (
        {"dataset": golds(*[1.0] * 7, float("nan")), "reward": EXACT},
        {"dataset": golds(*[1.0] * 8), "reward": EXACT},
        r"1 of 8 golds .*\n  row 7: nan",
    ),
    "numbers where texts are read": (
        {"dataset": golds(*range(8)), "reward": CHOICE},
        {"dataset": golds(*range(8)), "reward": MATH},
        r"8 of 8 golds .*\n  row 0: 0\n(.*\n)*Make texts of numbers",
    ),
    "stream without a column": (
        {"dataset": NO_GOLD, "reward": MATH, "max_steps": 1},
        {"dataset": NO_GOLD, "max_steps": 1},
        r"reads the columns \['solution'\]",
    ),
    "stream with a bad gold": (
        {"dataset": stream(golds(*ONES, "")), "reward": MATH, "on_invalid_gold": "drop"},
        {"dataset": golds(*ONES, ""), "reward": MATH, "on_invalid_gold": "drop"},
        "or filter the stream",
    ),
    "short stream": ({"dataset": stream(sums(3))}, {"dataset": stream(sums(4))}, "has 3 prompts, but one generation"),
    "long prompt in a stream": (
        {"dataset": stream(prompts(user("1 + " * 3000)))},
        {"dataset": stream(prompts(user("1 + " * 300)))},
        "The longest prompt .* the model's context is",
    ),
    "vLLM's context": (
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 8},
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 200},
        "the model's context is 8",
    ),
    "no system role": (
        {"dataset": prompts(SYSTEM), "tokenizer": tokenizer(NO_SYSTEM)},
        {"dataset": prompts(user("Short. 1 =")), "tokenizer": tokenizer(NO_SYSTEM)},
        "System role not supported.*put the system message .system_prompt. into the user's turn",
    ),
    "no chat template": (
        {"tokenizer": tokenizer("")},
        {"dataset": TEXTS, "tokenizer": tokenizer("")},
        "has no chat template",
    ),
    "parts": (
        {"dataset": Dataset.from_dict({"prompt": [parts("1 =")] * 16})},
        {"dataset": Dataset.from_dict({"prompt": [parts("1 =")] * 16}), "tokenizer": tokenizer(OF_PARTS)},
        "has content in parts",
    ),
    "content None": ({"dataset": prompts(user(None))}, {"dataset": prompts(user("1"))}, "row 15 .* content is None"),
    "last turn": ({"dataset": prompts(TOLD)}, {"dataset": prompts([*TOLD, *user("And?")])}, "row 15 ends with a turn"),
    "no messages": ({"dataset": prompts([])}, {"dataset": prompts(user("?"))}, "row 15 is empty"),
    "empty text": ({"dataset": prompts("a", " ")}, {"dataset": prompts("a", "b")}, "row 15 is empty"),
    "empty message": ({"dataset": prompts(user(" "))}, {"dataset": prompts(user("?"))}, "row 15 has no text"),
    "evaluation": (
        {"eval_dataset": {"a": prompts(user("1")), "b": prompts(TOLD)}},
        {"eval_dataset": {"a": prompts(user("1")), "b": prompts(user("1"))}},
        r"eval_dataset\['b'\]: the prompt of row 15 ends with",
    ),
    "golds of an evaluation": (
        {"eval_dataset": {"mine": golds(*ONES, "")}, "reward": MATH},
        {"eval_dataset": {"mine": golds(*ONES, "1")}, "reward": MATH},
        "1 of 8 golds do not verify",
    ),
    "columns of an evaluation": (
        {"eval_dataset": {"mine": sums().remove_columns("solution")}, "reward": MATH},
        {"eval_dataset": {"mine": sums()}, "reward": MATH},
        r"reads the columns \['solution'\]; the evaluation set has",
    ),
    "DatasetDict": (
        {"dataset": DatasetDict({"train": sums(), "test": sums()})},
        {"dataset": DatasetDict({"train": sums()})["train"], "eval_dataset": DatasetDict({"test": sums()})},
        "got a dict. Of several datasets, take one",
    ),
    "BOS twice": (
        {"dataset": prompts(f"{BEGIN}a", f"{BEGIN}b", rest=f"{BEGIN}c"), "tokenizer": tokenizer(before=[BEGIN])},
        {"dataset": TEXTS, "tokenizer": tokenizer(before=[BEGIN])},
        "twice, since the tokenizer adds one",
    ),
    "EOS appended": (
        {"dataset": TEXTS, "tokenizer": tokenizer(after=[TOKENIZER.eos_token])},
        {"tokenizer": tokenizer(after=[TOKENIZER.eos_token])},
        "set its add_eos_token to False",
    ),
    "weights": ({"reward_weights": [float("nan")]}, {"reward_weights": [0.5]}, "reward_weights must be finite"),
    "unused columns": ({"remove_unused_columns": True}, {"remove_unused_columns": False}, "remove_unused_columns"),
    "completions": ({"dataset": renamed("completions")}, {"dataset": renamed("completion_")}, "hands reward functions"),
    "prompts": ({"dataset": renamed("prompts")}, {"dataset": renamed("prompt_")}, r"has the columns \['prompts'\]"),
    "log_extra": ({"dataset": renamed("log_extra")}, {"dataset": renamed("extra")}, r"has the columns \['log_extra'\]"),
    "image": ({"dataset": renamed("image")}, {"dataset": renamed("imagery")}, "a tokenizer and no processor"),
    "steps": ({"max_steps": -5}, {"max_steps": -1}, "max_steps must be"),
    "no steps": ({"max_steps": 0}, {"max_steps": 1}, "max_steps must be"),
    "no epochs": ({"max_steps": -1, "num_train_epochs": 0}, {"max_steps": 1, "num_train_epochs": 0}, "train_epochs"),
}  # fmt: skip


def check(folder, dataset=None, eval_dataset=None, reward=parity_reward, tokenizer=TOKENIZER, **settings):
    """Every check of a run, none of which needs the model's weights."""
    if tokenizer.chat_template == "":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = None
    dataset = sums() if dataset is None else dataset
    plan = plan_run("no/such-model", reward, config(folder, **settings), "rloo")
    plan = with_data(plan, dataset, eval_dataset, processing_class=tokenizer)
    check_with_model(plan, tiny_model(TOKENIZER).config)
    return plan


@pytest.mark.parametrize("case", MISTAKES)
def test_what_would_be_misread_is_named(case, tmp_path):
    wrong, right, words = MISTAKES[case]
    check(tmp_path, **right)
    with pytest.raises(ValueError, match=words):
        check(tmp_path, **wrong)


@pytest.mark.parametrize("format", ["numpy", "torch", "arrow"])
def test_arrays_are_read_as_the_lists_and_texts_that_they_are(format, tmp_path):
    formatted = sums().with_format(format)
    plan = check(tmp_path, formatted, {"a": formatted})
    assert plan.train_dataset[0] == plan.eval_dataset["a"][0] == sums()[0]


def test_a_transform_of_ones_own_stays(tmp_path):
    loud = sums().with_transform(lambda rows: {**rows, "solution": [f"{each}!" for each in rows["solution"]]})
    assert check(tmp_path, loud).train_dataset[0]["solution"] == "1!"


@pytest.mark.parametrize("tail", ["<think>\\n", ""])
def test_a_reward_of_the_form_knows_whether_the_template_opens_the_thought(tail, tmp_path):
    reward = FormatReward()
    opening = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}" + tail.replace("\\n", "\n"))
    check(tmp_path, reward=reward, tokenizer=opening)
    assert reward([user("1 =")], ["a</think>so \\boxed{1}"]) == [float(bool(tail))]


HOSTILE = {
    "reaches out": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "counts without end": ("{% for i in range(10 ** 12) %}x{% endfor %}", "OverflowError"),
    "divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "is no template": ("{% for %}", "TemplateSyntaxError"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_one_message(case):
    text, kind = HOSTILE[case]
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = text
    with pytest.raises(ValueError, match=rf"The chat template cannot write the prompt .*{kind}"):
        render_prompt(tokenizer, user("1 + 1 ="), {})
    if kind in ("SecurityError", "TemplateSyntaxError"):
        with pytest.raises(ValueError, match=rf"The chat template cannot write the prompt .*{kind}"):
            prompt_tokens(user("1 + 1 ="), tokenizer, {})
