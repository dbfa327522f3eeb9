"""A model that cannot learn is refused; its reference is itself, and it is sampled without dropout."""

import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from basis_rl.recipe.build import load_by_name
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.model_check import check_saved
from tests.support.tiny import config, parity_reward, sums, tiny_model, tiny_tokenizer, tiny_trainer

LORA = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.5)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_frozen_adapter_is_refused(trainable, tmp_path, tiny_path):
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_path), LORA).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_path)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=trainable)
    if trainable:
        tiny_trainer(tmp_path, model=model)
    else:
        with pytest.raises(ValueError, match=r"all are frozen .* is_trainable=True"):
            tiny_trainer(tmp_path, model=model)


def test_the_reference_of_a_model_object_is_that_object(tmp_path, tiny_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    trainer = tiny_trainer(tmp_path, model=model, beta=0.1, max_steps=1)
    trainer.train()
    assert abs(trainer.state.log_history[0]["kl"]) < 1e-6


class Sampled(BasisTrainer):
    """Keeps the first batch's completions, and whether the model was in training mode before and after."""

    def _generate_single_turn(self, *args, **kwargs):
        before = self.model.training
        self.completions = super()._generate_single_turn(*args, **kwargs)[0]
        self.modes = before, self.model.training, all(module.training for module in self.model.modules())
        return self.completions, None


def test_nothing_drops_out_while_rollouts_are_drawn(tmp_path, tiny_path):
    """LoRA's dropout and attention's: the rollouts are those of the same model without any."""
    drawn = {}
    for dropout in (0.0, 0.9):
        model = AutoModelForCausalLM.from_pretrained(tiny_path, attention_dropout=dropout)
        torch.manual_seed(0)
        lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=dropout)
        trainer = tiny_trainer(tmp_path, model=get_peft_model(model, lora), cls=Sampled, max_steps=1)
        trainer.train()
        drawn[dropout] = trainer.completions
        assert trainer.modes == (True, True, True)
    assert drawn[0.9] == drawn[0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_that_are_rounded_away_are_named(dtype, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        tiny_trainer(tmp_path, model=tiny_model().to(dtype), learning_rate=1e-6)
    assert ("dtype is bfloat16, and no float32 copy" in caplog.text) == (dtype == torch.bfloat16)


@pytest.mark.parametrize(("rows", "shuffled"), [(18, False), (16, False), (18, True)])
def test_rows_that_never_train_are_named(rows, shuffled, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = tiny_trainer(tmp_path, train_dataset=sums(rows), shuffle_dataset=shuffled)
    told = "rows 16 to 17 of the training dataset are never trained on" in caplog.text
    assert told == (rows == 18 and not shuffled)
    seen = {index for epoch in range(9) for index in trainer.epoch_order(epoch)}
    assert (seen < set(range(rows))) == told


@pytest.mark.parametrize("lacks", ["tokenizer", "bytes", "weights"])
def test_a_folder_that_lacks_a_part_of_the_model_is_refused_before_it_is_loaded(
    lacks, tmp_path, tiny_path, monkeypatch
):
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if lacks != "tokenizer":
        tokenizer.save_pretrained(tmp_path)
        weights.write_bytes(weights.read_bytes()[:-100])
    if lacks == "weights":
        weights.unlink()
    check_saved(str(tiny_path))
    words = {"tokenizer": "has no tokenizer", "bytes": "model.safetensors in .* cut off", "weights": "holds no weights"}
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(ValueError, match=words[lacks]):
        load_by_name(str(tmp_path), None, False)
    with pytest.raises(ValueError, match=words[lacks]):
        BasisTrainer(str(tmp_path), parity_reward, config(tmp_path / "run"), sums())
