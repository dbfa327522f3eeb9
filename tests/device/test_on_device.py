"""What must hold on a GPU as on a CPU, with tiny models: energies, the critic, samplers."""

import copy

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from basis_rl.baselines import OptimalTokenBaseline, Ppo
from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.samplers import Frontier
from basis_rl.trainer import BasisTrainer
from benchmarks.energy_precision import exact, spread_model
from tests.support.tiny import DEVICE, tiny_trainer
from tests.trainer.test_energies import Keep

pytestmark = pytest.mark.gpu
# Tolerances of energies: float32 sums of 40,000 terms; a bfloat16 head's logits are coarse, by 2^-8 of up to 16.
VOCABULARY = 40_000 if DEVICE == "cpu" else 151_936  # more than one tile of the head
HEADS = {
    "float32": (torch.float32, False, 1e-4),
    "bfloat16, float32 head": (torch.bfloat16, True, 1e-4),
    "bfloat16": (torch.bfloat16, False, 0.1),
}


@pytest.mark.parametrize("case", HEADS)
def test_energies_of_the_fused_head_are_those_of_a_float64_softmax(case):
    dtype, cast, tolerance = HEADS[case]
    torch.manual_seed(0)
    model = spread_model(VOCABULARY, 4.0).to(DEVICE, dtype)
    ids = torch.randint(3, VOCABULARY, (2, 48), device=DEVICE)
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state.flatten(0, 1)
        tokens, expected, squares = exact(hidden.float().cpu(), model.lm_head.weight.float().cpu())
        add_fused_lm_head(model, cast_lm_head_to_fp32=cast, outputs=("log_probs", "entropy", "log_sum_sq_probs"))
        output = model(input_ids=ids, shift_labels=tokens.view(ids.shape).to(DEVICE), fused_lm_head=True)
    found = output.log_sum_sq_probs.exp()
    assert output.log_probs.device.type == DEVICE
    assert ((found > 0) & (found <= 1)).all()
    assert (found >= output.log_probs.exp() ** 2 * (1 - 1e-4)).all()
    energies = logit_gradient_energy(output.log_probs, found).flatten().double().cpu()
    assert (energies - expected).abs().max() < tolerance
    assert squares.max() > 10 * squares.min(), "flat policies would prove little"


def trained(folder, baseline, cls=BasisTrainer, **settings):
    trainer = tiny_trainer(folder, baseline, cls, **settings)
    assert trainer.accelerator.device.type == DEVICE
    trainer.train()
    return trainer


def test_energies_that_a_baseline_is_given_are_the_policys_in_bf16_too(tmp_path):
    """In float32, see tests/trainer/test_energies.py."""
    batch, expected, _ = trained(tmp_path, OptimalTokenBaseline(), Keep, bf16=True, max_steps=1).kept
    assert (batch.energies - expected.cpu())[batch.action_mask].abs().max() < 0.02
    assert batch.energies[batch.action_mask].std() > 0


class Watched(BasisTrainer):
    """Keeps the critic and the newest batch, as they were when the critic's values of it were asked for."""

    def _learn(self):
        batch = self._pending.newest
        if batch is not None and batch.step in self._critic._kept:
            kept = {key: value.clone() for key, value in self._critic._kept[batch.step].items()}
            self.seen = (batch, kept, copy.deepcopy(self._critic.module).cpu())
        super()._learn()


@pytest.mark.parametrize("kind", ["head", "value_model"])
def test_a_critic_is_on_the_device_and_its_values_are_those_of_a_cpu(kind, tmp_path, tiny_path):
    baseline = Ppo(critic_model=str(tiny_path), critic_learning_rate=1e-2) if kind == "value_model" else Ppo()
    trainer = trained(tmp_path, baseline, Watched, max_steps=4)
    assert {p.device.type for p in trainer._critic.parameters} == {DEVICE}
    batch, inputs, module = trainer.seen
    tokens = int(inputs.pop("tokens"))
    with torch.no_grad():
        expected = module(**inputs, **({} if "hidden_states" in inputs else {"tokens": tokens}))
    mask = batch.action_mask[:, :tokens]
    assert batch.step == 1, "of the first batch they are all 0"
    assert expected[mask].abs().max() > 1e-3
    assert (batch.values[:, :tokens] - expected)[mask].abs().max() < 1e-4


@pytest.mark.parametrize(("sampler", "baseline"), [("frontier", "basis_history"), ("dynamic", "rloo")])
def test_a_sampler_draws_whole_groups_by_the_seed_whatever_the_device(sampler, baseline, tmp_path):
    class Noted(BasisTrainer):
        drawn = ()

        def _advantages(self, inputs, output):
            self.drawn = (*self.drawn, tuple(row["prompt_id"] for row in inputs))
            return super()._advantages(inputs, output)

    runs = []
    for k in range(2):
        drawn_by = Frontier(correct=True) if sampler == "frontier" else sampler
        runs.append(trained(tmp_path / str(k), baseline, Noted, prompt_sampler=drawn_by, max_steps=4))
    first, second = (run.drawn for run in runs)
    assert [len(set(prompts)) for prompts in first] == [4] * 2, "whole groups of four"
    assert first[0] == second[0]
    assert any("sampler/" in key for row in runs[0].state.log_history for key in row)
