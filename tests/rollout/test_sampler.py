"""Sampling with transformers: order, counts, lengths, greedy."""

import torch

from basis_rl.rollout import sample
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["1 + 2 =", "a much longer prompt than the others, 3 + 4 =", "5 =", "6 + 6 + 6 ="]


def collect(**options):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    return dict(sample(tiny_model(tokenizer), tokenizer, PROMPTS, max_new_tokens=5, **options))


def test_every_prompt_gets_its_samples():
    result = collect(num_samples=3, batch_size=4)
    assert sorted(result) == [0, 1, 2, 3]
    assert all(len(completions) == 3 for completions in result.values())
    assert all(1 <= len(c.token_ids) <= 5 for completions in result.values() for c in completions)
    assert len({c.token_ids[0] for completions in result.values() for c in completions}) > 1


def test_greedy_does_not_depend_on_the_batch():
    whole, single = collect(temperature=0.0, batch_size=64), collect(temperature=0.0, batch_size=1)
    assert whole == single


def test_completions_end_with_the_end_token():
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    with torch.no_grad():  # a model that always says "end"
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = 1.0
        model.model.norm.weight.fill_(1.0)
    for _, completions in sample(model, tokenizer, PROMPTS, max_new_tokens=5, temperature=0.0):
        ids = completions[0].token_ids
        assert tokenizer.eos_token_id not in ids[:-1]
