"""Sampling with transformers: order, counts, lengths, and the same distribution as in training."""

import string

import torch
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from basis_rl.engine import Sampling, end_tokens, prompt_tokens, sample
from tests.support.tiny import sums, tiny_model, tiny_tokenizer

PROMPTS = ["1 + 2 =", "a much longer prompt than the others, 3 + 4 =", "5 =", "6 + 6 + 6 ="]


def collect(tokenizer=None, model=None, prompts=PROMPTS, num_samples=1, batch_size=256, **sampling):
    tokenizer = tokenizer or tiny_tokenizer()
    torch.manual_seed(0)
    tokens = [prompt_tokens(prompt, tokenizer, {}) for prompt in prompts]
    settings = Sampling(**{"max_new_tokens": 5, **sampling})
    return dict(
        sample(
            model or tiny_model(tokenizer), tokenizer, tokens, settings, num_samples=num_samples, batch_size=batch_size
        )
    )


def test_every_prompt_gets_its_samples():
    result = collect(num_samples=3, batch_size=4)
    assert sorted(result) == [0, 1, 2, 3]
    assert all(len(completions) == 3 for completions in result.values())
    assert all(1 <= len(c.token_ids) <= 5 for completions in result.values() for c in completions)
    assert len({c.token_ids[0] for completions in result.values() for c in completions}) > 1


def test_greedy_does_not_depend_on_the_batch():
    whole, single = collect(temperature=0.0, batch_size=64), collect(temperature=0.0, batch_size=1)
    assert whole == single
    copies = collect(temperature=0.0, num_samples=3, batch_size=7)
    assert copies == {index: 3 * completions for index, completions in single.items()}, "each prompt has its own"


def test_completions_stop_at_their_own_end_token():
    # A model whose end token is likely: rows of one batch end at different places, and none goes on after its end.
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = 3.0 * torch.sign(model.model.embed_tokens.weight.mean(0))
    result = collect(tokenizer, model, num_samples=64, max_new_tokens=12)
    assert all(c.truncated == (tokenizer.eos_token_id not in c.token_ids) for cs in result.values() for c in cs)
    rows = [c.token_ids for completions in result.values() for c in completions]
    ended = [row for row in rows if tokenizer.eos_token_id in row]
    assert len({len(row) for row in ended}) > 2
    assert all(row.index(tokenizer.eos_token_id) == len(row) - 1 for row in ended)
    assert all(len(row) == 12 for row in rows if tokenizer.eos_token_id not in row)


def test_a_completion_that_ended_at_a_stop_string_is_not_truncated():
    result = collect(num_samples=4, generation_kwargs={"stop_strings": list(string.ascii_letters)})
    found = [c for completions in result.values() for c in completions]
    # At the limit the last token may have been a stop string.
    assert not any(c.truncated and any(char in string.ascii_letters for char in c.text[:-1]) for c in found)
    assert {c.truncated for c in found} == {True, False}
    assert {len(c.token_ids) for c in found if c.token_ids[-1] == tiny_tokenizer().pad_token_id} <= {1}


def test_ends_are_the_tokenizers_and_the_checkpoints():
    tokenizer = tiny_tokenizer()
    own = tokenizer.eos_token_id
    assert end_tokens(None, tokenizer) == end_tokens(GenerationConfig(), tokenizer) == [own]
    assert end_tokens(GenerationConfig(eos_token_id=own + 1), tokenizer) == [own, own + 1]
    assert end_tokens(GenerationConfig(eos_token_id=[own + 2, own]), tokenizer) == [own, own + 2]


def test_the_checkpoints_own_generation_settings_are_not_used():
    tokenizer = tiny_tokenizer()
    plain, penalised = tiny_model(tokenizer), tiny_model(tokenizer)
    penalised.generation_config.repetition_penalty = 1e6
    penalised.generation_config.top_k = 1
    assert collect(tokenizer, plain, num_samples=8) == collect(tokenizer, penalised, num_samples=8)
    assert penalised.generation_config.top_k == 1, "and they are put back"
    assert collect(num_samples=8) != collect(num_samples=8, top_k=1)


def test_prompts_are_tokenized_as_in_training():
    tokenizer = tiny_tokenizer()
    messages = sums(1)[0]["prompt"]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt_tokens(messages, tokenizer, {}) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.pad_token_id)]
    )
    assert prompt_tokens("1 + 2", tokenizer, {})[0] == tokenizer.pad_token_id, "a text gets its first token, as in TRL"
