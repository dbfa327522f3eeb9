"""The critic's networks: what a value may depend on, in which precision it is computed, and which model may serve."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from basis_rl.baselines.ppo import Ppo, ValueHead, ValueModel, load_value_model
from tests.support.tiny import tiny_tokenizer

IDS = torch.randint(20, 200, (2, 9), generator=torch.Generator().manual_seed(1))


def value_model(path):
    """With a head whose values are not all 0."""
    torch.manual_seed(0)
    model = load_value_model(str(path), tiny_tokenizer())
    torch.nn.init.normal_(model.head.outer.weight)
    return model.eval()


def values_of(model, ids, mask=None):
    """Values of the last five tokens."""
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids) if mask is None else mask, tokens=5)


def test_a_value_sees_the_tokens_before_it_and_no_others(tiny_path):
    model = value_model(tiny_path)
    before = values_of(model, IDS)
    assert before.shape == (2, 5)
    for t in range(5):
        changed = IDS.clone()
        changed[:, -5 + t] += 1  # the action at t
        after = values_of(model, changed)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1]), f"a value sees the action after it: {t}"
        assert (after[:, t + 1 :] != before[:, t + 1 :]).all(), t


def test_padding_of_the_prompt_does_not_change_a_value(tiny_path):
    model = value_model(tiny_path)
    padded = torch.cat([torch.full((2, 4), 7), IDS], dim=1)
    mask = (torch.arange(13) >= 4).long().expand(2, -1)
    plain = values_of(model, IDS)
    torch.testing.assert_close(values_of(model, padded, mask), plain, rtol=0, atol=1e-5)
    assert (values_of(model, padded) - plain).abs().max() > 1e-3, "padding would be seen"


def test_values_start_at_zero_and_do_not_depend_on_the_scale_of_hidden_states():
    head = ValueHead(16)
    hidden = torch.randn((2, 3, 16), generator=torch.Generator().manual_seed(0))
    assert (head(hidden) == 0).all()
    torch.nn.init.normal_(head.outer.weight)
    torch.testing.assert_close(head(1000 * hidden), head(hidden), rtol=1e-3, atol=1e-3)
    assert head(hidden).std() > 0.01


def test_the_head_is_computed_in_float32_under_autocast():
    head = ValueHead(16)
    torch.nn.init.normal_(head.outer.weight)
    hidden = torch.randn((2, 3, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        low = head(hidden)
    assert low.dtype == torch.float32
    assert torch.equal(low, head(hidden))


def test_a_value_model_has_no_dropout(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=300, num_key_value_heads=1, attention_dropout=0.5, **shape)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = value_model(tmp_path).train()
    assert torch.equal(values_of(model, IDS), values_of(model, IDS))


def test_modules_of_dropout_are_turned_off(tmp_path, monkeypatch):
    class WithDropout(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)
            self.config = Qwen2Config(hidden_size=16)

    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", lambda *args, **kwargs: WithDropout())
    assert load_value_model(str(tmp_path), tiny_tokenizer()).backbone.drop.p == 0.0


def test_parameters_are_counted_without_weights(tiny_path):
    model = load_value_model(str(tiny_path), tiny_tokenizer())
    assert isinstance(model, ValueModel)
    assert Ppo(critic_model=str(tiny_path)).module_parameters(None) == sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match="critic_model 'no/such-model' could not be loaded"):
        Ppo(critic_model="no/such-model").module_parameters(None)
