"""Entropies and pooled hidden states in training: against the policy itself, in every way in which rows are scored."""

import pytest
import torch
from peft import LoraConfig

from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.scoring import PooledStates
from examples.quickstart.warm_start import build_model, save
from tests.support.architectures import ARCHITECTURES, small_model
from tests.support.tiny import tiny_tokenizer, tiny_trainer
from tests.trainer.test_energies import SETTINGS

pytestmark = pytest.mark.gpu


class Keep(BasisTrainer):
    """Keeps the batch, what the policy says of it row by row, and how often the policy is scored."""

    kept = None
    passes = 0

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        self.passes += self._in_loss is None
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _advantages(self, inputs, output):
        states, entropies = [], torch.zeros_like(output["completion_ids"], dtype=torch.float64)
        for row, (prompt, answer) in enumerate(zip(output["prompt_ids"], output["completion_ids"], strict=True)):
            prompt = prompt[output["prompt_mask"][row].bool()]
            answer = answer[output["completion_mask"][row].bool()]
            with torch.no_grad():
                found = self.model(torch.cat([prompt, answer])[None], output_hidden_states=True)
            # The first ones are embeddings, so this is what the layer with index 4 returns.
            before = found.hidden_states[5][0, len(prompt) - 1 : -1]
            states.append(torch.stack([before[0], before[-10:].mean(dim=0)]))
            probs = (found.logits[0, len(prompt) - 1 : -1].double() / self.temperature).softmax(-1)
            entropies[row, : len(answer)] = -(probs * probs.log()).sum(-1)
        before_signals = self.passes
        local = super()._advantages(inputs, output)
        self.kept = self._pending.newest, torch.stack(states).cpu(), entropies.cpu(), self.passes - before_signals
        return local


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A tiny model of six layers, of which the one with index 4 is read."""
    folder = tmp_path_factory.mktemp("deep")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(1)
    save(build_model(tokenizer, hidden_size=16, layers=6), tokenizer, folder)
    return folder


def trained(folder, model, baseline="poise", **settings):
    settings = {"max_completion_length": 14, "max_steps": 1, **settings}
    trainer = tiny_trainer(folder, baseline, Keep, model=model, **settings)
    trainer.train()
    return trainer


WAYS = [*((case, False, "auto") for case in SETTINGS), ("both", True, "auto"), ("temperature", False, "none")]


@pytest.mark.parametrize(("case", "lora", "packing"), WAYS)
def test_they_are_those_of_the_policy(case, lora, packing, tmp_path, deep):
    peft_config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False) if lora else None
    own = {"peft_config": peft_config, "packing": packing, **SETTINGS[case]}
    batch, states, entropies, passes = trained(tmp_path, deep, **own).kept
    torch.testing.assert_close(batch.hidden_states, states, rtol=1e-4, atol=1e-5)
    assert (batch.entropies - entropies)[batch.action_mask].abs().max() < 1e-5
    assert (batch.entropies[~batch.action_mask] == 0).all()
    assert (states[:, 0] - states[:, 1]).abs().min(dim=1).values.max() > 0
    # One pass serves both, and none is made where TRL has made one.
    assert passes == (case in ("no old log-probabilities", "reference model"))


def test_a_completion_of_one_token_has_the_state_of_the_prompt_twice(tmp_path, deep):
    batch, states, *_ = trained(tmp_path, deep, max_completion_length=1).kept
    torch.testing.assert_close(batch.hidden_states, states, rtol=1e-4, atol=1e-5)
    assert torch.equal(batch.hidden_states[:, 0], batch.hidden_states[:, 1])


def test_nothing_is_computed_that_no_baseline_asks_for(tmp_path, deep):
    trainer = trained(tmp_path, deep, "rloo", **SETTINGS["no old log-probabilities"])
    batch, *_, passes = trainer.kept
    assert (batch.hidden_states, batch.entropies, passes, trainer._scoring) == (None, None, 0, [])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layer_is_found_in_every_architecture(name):
    model = small_model(name)
    layer = PooledStates(model).module
    text = model.base_model.get_decoder()
    assert layer in [part[-1] for part in text.modules() if isinstance(part, torch.nn.ModuleList)]


def test_a_policy_without_a_list_of_layers_is_refused():
    model = small_model("Llama")
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no list of layers"):
        PooledStates(model)
