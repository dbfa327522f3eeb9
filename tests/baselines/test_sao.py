"""What of the model of SAO's critic is frozen; `test_ppo.py` has its equations."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from basis_rl.baselines import Ppo, Sao
from basis_rl.baselines.ppo import ValueHead, freeze_attention
from tests.support.architectures import ARCHITECTURES, small_model
from tests.support.tiny import tiny_tokenizer

# Names of what mixes tokens in transformers' models, found here by names and there by classes.
MIXERS = {"self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "conv", "mixer"}
LEARNS_IN_A_MIXER = {"up_proj", "down_proj", "experts", "shared_experts", "gate"}  # of Nemotron-H, which calls all so


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_and_what_hybrids_have_in_its_place_is_frozen(name):
    model = small_model(name, dtype=torch.float32)
    freeze_attention(model)
    frozen = 0
    for path, parameter in model.named_parameters():
        parts = set(path.split("."))
        mixes = bool(parts & MIXERS) and not ("mixer" in parts and parts & LEARNS_IN_A_MIXER)
        assert parameter.requires_grad != mixes, path
        frozen += mixes
    assert 0 < frozen < len(list(model.parameters()))


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"No attention .* ValueHead. Set critic_freeze_attention: false"):
        freeze_attention(ValueHead(8))


def test_a_value_model_starts_as_the_policy_and_its_frozen_parameters_are_counted(tiny_path):
    policy = AutoModelForCausalLM.from_pretrained(tiny_path)
    module = Sao().build_module(policy, tiny_tokenizer())
    weights = module.backbone.state_dict()
    for key, value in policy.model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    config = AutoConfig.from_pretrained(tiny_path)
    sizes = {on: sum(p.numel() for p in module.parameters() if p.requires_grad == on) for on in (True, False)}
    assert Sao().module_parameters(config) == sizes[True] + sizes[False]
    assert Sao().frozen_parameters(config) == sizes[False] > 0
    assert Ppo(critic_model="policy").frozen_parameters(config) == 0
    policy.config.name_or_path = ""
    with pytest.raises(ValueError, match="critic_model 'policy' needs a policy that was loaded from"):
        Sao().build_module(policy, tiny_tokenizer())
