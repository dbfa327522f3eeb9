"""SAO's critic: PPO's with other settings (`test_ppo.py` has its equations), and what of its model is frozen."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from basis_rl.baselines import Ppo, Sao, build_baseline
from basis_rl.baselines.ppo import ValueHead, freeze_attention
from basis_rl.types import RolloutBatch
from tests.support.architectures import ARCHITECTURES, small_model
from tests.support.tiny import tiny_tokenizer

# Actions with tool output between them, rows of one action and of none, and one without a reward.
MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]
).bool()
REWARDS = torch.tensor([1.0, 0.0, 1.0, math.nan, 0.5])


def given_batch():
    values = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(0))
    ids = [f"prompt-{i}" for i in range(5)]
    return RolloutBatch(
        rewards=REWARDS, group_ids=torch.arange(5), prompt_ids=ids, action_mask=MASK, step=0, values=values
    )


def test_sao_is_ppo_with_other_settings():
    settings = {"lam_alpha": 1.5, "critic_lam": 1.0, "critic_model": "policy", "critic_learning_rate": 5e-6}
    settings |= {"critic_epochs": 2, "critic_warmup_steps": 10, "critic_freeze_attention": True}
    sao = build_baseline("sao")
    assert sao.learning == Ppo(**settings).learning
    assert [sao.policy_waits(step) for step in (0, 9, 10)] == [True, True, False]
    batch = given_batch()
    assert torch.equal(sao.advantages(batch).values, Ppo(**settings).advantages(batch).values)
    assert not torch.equal(sao.advantages(batch).values, Ppo().advantages(batch).values)


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
