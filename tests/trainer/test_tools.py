"""Training with tools: what is whose token, ranks in step, answers that would do harm, resuming."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from datasets import Dataset
from trl.chat_template_utils import qwen2_5_chat_template, qwen3_template

from basis_rl.functional.packing import pack_rows
from basis_rl.rewards.extract import completion_text
from basis_rl.tools import ToolResult, calculator
from basis_rl.trainer import BasisTrainer, turns
from basis_rl.trainer.tool_check import as_functions, check_tools, end_of_turn, prepare_tokenizer
from basis_rl.trainer.turns import harmless, has_void_turn, read_turn
from examples.quickstart.warm_start import save
from tests.support.tiny import config, sums, tiny_model, tiny_tokenizer, tiny_trainer
from tests.support.tooled import Kept, by_rule, decided_model, ending, expression, last_turn, tokenizer, trainer


@pytest.fixture(autouse=True)
def _parser():
    yield
    turns.read_turn = read_turn


def segments(ids, mask):
    """Runs of tokens with the same mask: [(mask, ids)]."""
    found = []
    for token, own in zip(ids, mask[: len(ids)].tolist(), strict=True):
        if found and found[-1][0] == own:
            found[-1][1].append(token)
        else:
            found.append((own, [token]))
    return found


@pytest.mark.parametrize("baseline", ["otb", "reinforce_pp"])
def test_what_the_tool_said_is_masked_and_what_the_model_said_is_not(baseline, tmp_path):
    settings = {"beta": 0.1, "kl_placement": "reward"} if baseline == "reinforce_pp" else {}
    trained = trainer(tmp_path, baseline, **settings)
    trained.train()
    tok = trained._tokenizer
    turn_counts = set()
    for step, kept in enumerate(trained.kept):
        batch = kept["batch"]
        assert torch.equal(batch.action_mask, kept["mask"].bool())
        for row, (messages, ids) in enumerate(zip(kept["conversations"], kept["ids"], strict=True)):
            parts = segments(ids, kept["mask"][row])
            said = [part for own, part in parts if own]
            heard = [tok.decode(part) for own, part in parts if not own]
            assert [by_rule(tok, part) for part in said] == [m for m in messages if m["role"] == "assistant"]
            answers = [calculator(expression(part)) for part in said[: len(heard)]]
            assert [m["content"] for m in messages if m["role"] == "tool"] == answers
            shown = [f"\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n" for answer in answers]
            assert heard == shown
            own = [m["content"] for m in messages if m["role"] == "assistant"]
            assert completion_text(messages) == own[-1], "what a reward reads"
            turn_counts.add(len(said))
        silent = ~batch.action_mask
        assert silent.any()
        assert (kept["advantages"][silent] == 0).all()
        for name in ("energies", "kl"):
            field = getattr(batch, name)
            assert field is None or (field[silent] == 0).all()
            assert field is None or step == 0 or (field[batch.action_mask] != 0).any()  # at first pi is the reference
    assert len(turn_counts) >= 3, turn_counts


def test_tool_output_carries_no_gradient(tmp_path):
    trained = trainer(tmp_path, "otb", max_steps=1, beta=0.1)
    batches = []

    def look(inputs, output):
        batches.append(output)
        return Kept._advantages(trained, inputs, output)

    trained._advantages = look
    trained.train()
    (output,) = batches
    output = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in output.items()}
    assert output["advantages"].shape == output["tool_mask"].shape
    disturbed = dict(output)
    silent = output["tool_mask"] == 0
    assert silent.any()
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
        if name in output:
            disturbed[name] = torch.where(silent, 3.0, output[name])
    gradients = []
    for inputs in (output, disturbed):
        trained.model.zero_grad()
        trained.compute_loss(trained.model, inputs).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trained.model.parameters() if p.grad is not None]))
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_a_turn_that_rollouts_share_is_scored_once_with_the_loss_and_weights_of_padded_rows(tmp_path, monkeypatch):
    """With so few tokens to draw from, rollouts of one prompt often call with the same tokens, and hear the same."""
    packings = []

    def keep(*args, **kwargs):
        packings.append(pack_rows(*args, **kwargs))
        return packings[-1]

    def reward(completion_ids, **kwargs):
        return [float(len(ids) % 5) for ids in completion_ids]

    monkeypatch.setattr("basis_rl.trainer.packing.pack_rows", keep)
    monkeypatch.setattr("tests.support.tooled.last_turn", reward)
    tok = tokenizer()
    drawn = {tok.eos_token_id, *tok.convert_tokens_to_ids(list("01"))}
    few = {"suppress_tokens": [i for i in range(len(tok)) if i not in drawn]}
    logs = []
    weights = []
    for packing in ("none", "auto"):
        # Adam would turn rounding errors of gradients that are all but 0 into whole steps.
        plain = {"optim": "sgd", "learning_rate": 0.3}
        trained = trainer(tmp_path, "rloo", packing=packing, generation_kwargs=few, max_steps=3, beta=0.1, **plain)
        trained.train()
        logs.append([entry for entry in trained.state.log_history if "loss" in entry])
        weights.append(torch.cat([p.detach().flatten() for p in trained.model.parameters()]))
    repeated = [len(packed.before) - len(packed.before.unique()) for packed in packings]
    assert sum(repeated) > 10, "scored tokens that are computed once for several rollouts"
    assert max(packed.segments.shape[1] for packed in packings) >= 6
    for padded, packed in zip(*logs, strict=True):
        assert padded["grad_norm"] > 0.01
        for name in ("loss", "grad_norm", "entropy", "kl", "reward"):
            assert packed[name] == pytest.approx(padded[name], abs=2e-4), name
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=2e-4)


class Together:
    """Answers only when as many calls are under way as there are rollouts that call in this turn."""

    __name__ = "calculator"

    def __init__(self):
        self.pool, self.most, self.open = ThreadPoolExecutor(64), 0, 0
        self.lock, self.waited_for = threading.Lock(), threading.Event()

    def __call__(self, expression: str) -> str:
        """Calculate.

        Args:
            expression: What.
        """
        return calculator(expression)

    def start(self, expression):
        with self.lock:
            self.open += 1
            self.most = max(self.most, self.open)
        return self.pool.submit(self.work, expression)

    def work(self, expression):
        self.waited_for.wait(10)
        with self.lock:
            self.open -= 1
        return ToolResult(self(expression), failed=True)


def test_all_calls_of_a_turn_are_begun_before_one_is_waited_for(tmp_path, monkeypatch):
    expected = trainer(tmp_path / "one", "rloo", max_steps=1)
    expected.train()
    tool = Together()
    suffix = BasisTrainer._get_tool_suffix_ids

    def resolve(self, messages):
        tool.waited_for.set()
        return suffix(self, messages)

    monkeypatch.setattr(BasisTrainer, "_get_tool_suffix_ids", resolve)
    trained = trainer(tmp_path / "two", "rloo", tools=[tool], max_steps=1)
    trained.train()
    assert trained.kept[0]["ids"] == expected.kept[0]["ids"]
    first_calls = sum(len(messages) > 1 for messages in trained.kept[0]["conversations"])
    assert tool.most >= first_calls > 1
    log = trained.state.log_history[0]
    assert log["tools/failure_frequency"] == 1.0  # as the tool says of its answers
    assert expected.state.log_history[0]["tools/failure_frequency"] == 0.0


def test_no_more_rounds_than_allowed(tmp_path):
    trained = trainer(tmp_path, "rloo", max_tool_calling_iterations=1, max_steps=1)
    trained.train()
    lengths = {len(messages) for kept in trained.kept for messages in kept["conversations"]}
    assert lengths == {1, 3}


def test_an_answer_that_fills_the_room_is_the_last_word(tmp_path):
    free = trainer(tmp_path / "free", "otb", max_steps=1)
    free.train()
    kept = free.kept[0]
    parts = [segments(ids, mask) for ids, mask in zip(kept["ids"], kept["mask"], strict=True)]
    room, row = min((len(p[0][1]) + len(p[1][1]), row) for row, p in enumerate(parts) if len(p) > 1)
    full = trainer(tmp_path / "full", "otb", max_steps=1, max_completion_length=room)
    full.train()
    kept = full.kept[0]
    assert [m["role"] for m in kept["conversations"][row]] == ["assistant", "tool"]
    assert segments(kept["ids"][row], kept["mask"][row]) == parts[row][:2]
    assert len(kept["ids"][row]) == room
    assert completion_text(kept["conversations"][row]) == kept["conversations"][row][0]["content"]


def test_void_turns():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    told, answer = {"role": "tool", "name": "f", "content": "3"}, {"role": "assistant", "content": "so \\boxed{3}"}
    idle = {"role": "assistant", "content": "let me think"}
    assert not has_void_turn([call, told, answer])
    assert not has_void_turn([answer])
    assert not has_void_turn([call])
    assert has_void_turn([idle])
    assert has_void_turn([call, told, idle])
    assert has_void_turn([])
    assert has_void_turn([call, told, {"role": "assistant", "content": "\\boxed{3"}])


def test_rollouts_with_a_void_turn_are_out_of_the_loss_but_not_of_the_baseline(tmp_path, monkeypatch):
    def sometimes_void(tok, ids, *args, **kwargs):
        message = by_rule(tok, ids)
        return {**message, "content": "hm"} if "tool_calls" not in message and sum(ids) % 2 else message

    batches = {}
    for filtered in (False, True):
        trained = trainer(tmp_path, "rloo", filter_void_turns=filtered, max_steps=1)
        monkeypatch.setattr(turns, "read_turn", sometimes_void)
        scored = BasisTrainer._generate_and_score_completions

        def keep(self, inputs, scored=scored, filtered=filtered):
            output = scored(self, inputs)
            batches[filtered] = (output, self.turns._void, self.kept[-1])
            return output

        monkeypatch.setattr(Kept, "_generate_and_score_completions", keep)
        trained.train()
        monkeypatch.undo()
        void = sum(batches[filtered][1])
        assert trained.state.log_history[0]["tools/void"] == void / 8
    (plain, _, kept_plain), (output, void, kept) = batches[False], batches[True]
    assert 0 < sum(void) < 8
    assert kept["ids"] == kept_plain["ids"]
    assert torch.equal(kept["advantages"], kept_plain["advantages"])
    rows = torch.tensor(void)
    assert (output["tool_mask"][rows] == 0).all()
    assert torch.equal(output["tool_mask"][~rows], plain["tool_mask"][~rows])
    tokens = (output["tool_mask"] * output["completion_mask"]).sum()
    assert output["num_items_in_batch"] == tokens < plain["num_items_in_batch"]


def test_whatever_a_model_writes_is_read(tmp_path):
    tok = tokenizer()
    prefix = tok.apply_chat_template(sums()[0]["prompt"], add_generation_prompt=True, return_dict=False)

    def read(text):
        return read_turn(tok, tok(text)["input_ids"], prefix=prefix, tools=[calculator])

    good = read('so <tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call><|im_end|>')
    assert good["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "1"}}
    nested = '{"a":' * 3000 + "1" + "}" * 3000
    for text in ("", "<tool_call>", "<tool_call></tool_call>", "<tool_call>[1]</tool_call>", "[" * 9000,
                 "<tool_call>" + "[" * 9000 + "</tool_call>", f"<tool_call>{nested}</tool_call>",
                 '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name":"a","arguments":' + "9" * 5000 + "}",
                 "<tool_call>{}</tool_call>", '<tool_call>"calculator"</tool_call>'):  # fmt: skip
        message = read(text)
        assert message["role"] == "assistant"
        assert "tool_calls" not in message
        assert isinstance(message["content"], str)
    half = read('<tool_call>{"name": "\\ud800", "arguments": {"\\udfff": ["\\ud900"]}}</tool_call>')
    assert repr(half).encode("utf-8", "strict")
    assert half["tool_calls"][0]["function"] == {"name": "\ufffd", "arguments": {"\ufffd": ["\ufffd"]}}


def test_what_a_tool_says_ends_no_turn():
    tok = tokenizer()
    text = harmless("a<|im_end|>\n<|im_start|>assistant\n\\boxed{1}\ud800", tok.all_special_tokens)
    assert not set(tok(text)["input_ids"]) & set(tok.all_special_ids)
    assert harmless("1 < 2 | 3", tok.all_special_tokens) == "1 < 2 | 3"


CALLS = [
    {"name": "nobody", "arguments": {}},
    {"name": "\ufffd<|im_end|>", "arguments": {}},
    {"name": "calculator", "arguments": {}},
    {"name": "calculator", "arguments": {"expression": "1", "more": 2}},
    {"name": "calculator", "arguments": [1]},
    {"name": "calculator", "arguments": "1+1"},
    {"name": "calculator", "arguments": {"expression": 7}},
    {"name": "calculator", "arguments": {"expression": "1/0"}},
    {"name": "calculator", "arguments": {"expression": "<|im_end|>"}},
]


def test_calls_that_make_no_sense_are_errors_that_the_model_sees(tmp_path, monkeypatch):
    def nonsense(tok, ids, *args, **kwargs):
        message = by_rule(tok, ids)
        if "tool_calls" in message:
            message["tool_calls"] = [{"type": "function", "function": CALLS[sum(ids) % len(CALLS)]}]
        return message

    trained = trainer(tmp_path, "rloo", max_steps=4, max_completion_length=400)
    monkeypatch.setattr(turns, "read_turn", nonsense)
    trained.train()
    told = [
        m["content"] for k in trained.kept for messages in k["conversations"] for m in messages if m["role"] == "tool"
    ]
    assert len(told) > 10
    assert all("error" in text for text in told)
    assert all(log["tools/failure_frequency"] == 1.0 for log in trained.state.log_history[:-1])


def test_greedy_rollouts_call_tools_too(tmp_path):
    seen = []

    class Greedy(Kept):
        def _generate_unlogged(self, *args):
            result = super()._generate_unlogged(*args)
            seen.append(result)
            return result

    model = tmp_path / "decided"
    save(decided_model(), tokenizer(), model)
    settings = {"generation_kwargs": ending(tokenizer()), "max_completion_length": 64}
    trained = trainer(tmp_path, "remax", cls=Greedy, model=model, **settings)
    trained.train()
    assert len(seen) == len(trained.kept) == 2
    lengths = set()
    for completions, ids, tokens in seen:
        said = [m["content"] for messages in completions for m in messages if m["role"] == "tool"]
        lengths |= {len(messages) for messages in completions}
        assert len(completions) == len(ids) == 2  # distinct prompts
        assert sum(map(len, ids)) > tokens or not said
    assert max(lengths) > 1
    greedy = [last_turn(completions) for completions, _, _ in seen]
    for rewards, kept in zip(greedy, trained.kept, strict=True):
        assert sorted(set(kept["batch"].greedy_rewards.tolist())) == sorted(set(rewards))


def no_docs(x):
    return x


def build(folder, tools, tok=None, **given):
    return tiny_trainer(folder, model="no/such-model", processing_class=tok or tokenizer(), tools=tools, **given)


def test_what_does_not_fit_is_said_before_the_model_is_loaded(tmp_path):
    text = Dataset.from_list([{"prompt": f"{i} + 1 =", "solution": "1"} for i in range(16)])
    unknown = tokenizer()
    unknown.chat_template = unknown.chat_template.replace("tool_call>", "invocation>")
    unknown.response_template = None
    for message, tools, more in [
        ("conversational", [calculator], {"train_dataset": text}),
        ("chat template does not show tool calls", [calculator], {"tok": tiny_tokenizer()}),
        ("Unrecognized chat template", [calculator], {"tok": unknown}),
        ("several are called calculator", [calculator, calculator], {}),
        ("type hints and a docstring", [no_docs], {}),
        ("cannot be called", ["calculator"], {}),
        ("at least 1", [calculator], {"max_tool_calling_iterations": 0}),
        ("needs tools", None, {"filter_void_turns": True}),
    ]:
        with pytest.raises(ValueError, match=message):
            build(tmp_path, tools, **more)


def test_a_call_with_wrong_arguments_is_not_begun():
    begun = []

    class Eager(Together):
        def start(self, *args, **kwargs):
            begun.append(kwargs)

    (function,) = as_functions([Eager()])
    with pytest.raises(TypeError, match="unexpected"):
        function(expression="1", more="2")
    assert begun == []
    function(expression="1")
    assert begun == [{"expression": "1"}]


def test_images_and_tools_work_on_one_process(tmp_path, monkeypatch):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}], "image": "x"}])
    args = config(tmp_path)
    check_tools([calculator], None, rows, args)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(ValueError, match="on one process only"):
        check_tools([calculator], None, rows, args)


def test_a_base_models_turns_end_where_the_template_ends_them(tmp_path):
    tok = tiny_tokenizer()
    tok.chat_template = qwen2_5_chat_template.replace("You are Qwen, created by Alibaba Cloud. ", "")
    tok.eos_token = tok.pad_token  # as Qwen2.5's base models have it
    args = config(tmp_path, generation_kwargs={"stop_token_ids": [5]})
    assert end_of_turn(tok) == tok.convert_tokens_to_ids("<|im_end|>") != tok.eos_token_id
    prepare_tokenizer(tok, args)
    assert tok.eos_token == "<|im_end|>"
    assert tok.response_template is qwen3_template  # though TRL does not know this template
    assert args.generation_kwargs == {"stop_token_ids": [5]}  # transformers stops at the tokenizer's
    tok.eos_token, args.use_vllm = tok.pad_token, True
    prepare_tokenizer(tok, args)
    assert args.generation_kwargs == {"stop_token_ids": sorted([5, tok.eos_token_id])}
    before = dict(args.generation_kwargs)
    prepare_tokenizer(tok, args)
    assert args.generation_kwargs == before


@pytest.mark.parametrize("named", [True, False])
def test_a_base_models_turns_end_so_too_where_python_gives_no_tokenizer(named, tmp_path):
    tok = tokenizer()
    tok.eos_token = tok.pad_token
    model = tiny_model(tok)
    save(model, tok, tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")
    given = {"model": str(tmp_path / "model") if named else model, "processing_class": None, "tools": [calculator]}
    trained = tiny_trainer(tmp_path, "rloo", **given, max_tool_calling_iterations=2)
    assert trained.processing_class.eos_token == "<|im_end|>"


def test_a_run_with_tools_resumes(tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path / "whole", "otb", **settings)
    whole.train()
    again = trainer(tmp_path / "again", "otb", **{**settings, "save_strategy": "no"})
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert [kept["ids"] for kept in whole.kept[1:]] == [kept["ids"] for kept in again.kept]
    assert any(len(messages) > 1 for kept in again.kept for messages in kept["conversations"])
    for (name, a), (_, b) in zip(whole.model.state_dict().items(), again.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
