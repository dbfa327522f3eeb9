"""Energies in training: against a float64 softmax of the policy, in every way in which TRL scores a batch."""

import pytest
import torch
from peft import LoraConfig

from basis_rl.functional.energy import logit_gradient_energy
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.scoring import ScoringPass
from tests.support.tiny import tiny_trainer

pytestmark = pytest.mark.gpu


class Keep(BasisTrainer):
    kept = None

    def _advantages(self, inputs, output):
        logits = []
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1].double() / self.temperature
        tokens = output["completion_ids"].shape[1]
        probs = logits.softmax(-1)[:, -tokens:]
        chosen = probs.gather(-1, output["completion_ids"][..., None])[..., 0]
        local = super()._advantages(inputs, output)
        squares = (probs**2).sum(-1)
        self.kept = (self._pending.newest, (1 - 2 * chosen + squares).cpu(), squares.cpu())
        return local


SETTINGS = {
    "no old log-probabilities": {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "old log-probabilities": {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "reference model": {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "beta": 0.1},
    "both": {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "beta": 0.1},
    "temperature": {"temperature": 0.7},
}


CASES = [*((case, False) for case in SETTINGS), ("no old log-probabilities", True), ("both", True)]


@pytest.mark.parametrize(("case", "lora"), CASES)
def test_energies_equal_a_float64_softmax(case, lora, tmp_path, tiny_path):
    peft_config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False) if lora else None
    own = {"model": tiny_path, "peft_config": peft_config}
    trainer = tiny_trainer(tmp_path, "otb", Keep, max_steps=1, **own, **SETTINGS[case])
    trainer.train()
    batch, expected, sum_squared = trainer.kept
    assert batch.energies.shape == batch.action_mask.shape
    difference = (batch.energies - expected)[batch.action_mask]
    assert difference.abs().max() < 1e-5
    assert (batch.energies[~batch.action_mask] == 0).all()
    assert ((sum_squared > 0) & (sum_squared <= 1)).all()
    assert batch.energies[batch.action_mask].std() > 0


class Passes(ScoringPass):
    def _record(self, model, scorer, inputs):
        self._chunks.append(model(**inputs))
        return self._chunks[-1]


def test_the_first_pass_of_a_recording_is_kept_and_no_other():
    scoring, model = Passes(), torch.nn.Identity()
    assert scoring.listen(model, model) is model
    for number in (1.0, 2.0):
        with scoring.recording():
            assert float(scoring.listen(model, model)(input=torch.tensor(number))) == number
            assert scoring.listen(model, model) is model, "the reference model's pass comes second"
        assert scoring._chunks == [torch.tensor(number)]
    with scoring.recording():
        pass
    assert scoring.listen(model, model) is model, "the recording is over, though nothing was scored in it"


BFLOAT16 = {
    "weights": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "weights, float32 head": {"model_init_kwargs": {"dtype": "bfloat16"}, "cast_lm_head_to_fp32": True},
    "autocast": {"bf16": True},
}


@pytest.mark.parametrize(
    ("case", "spread"), [*((case, 100.0) for case in BFLOAT16), ("weights", 1.0), ("autocast", 10_000.0)]
)
def test_sums_of_squares_are_in_their_bounds_in_bfloat16(case, spread, tmp_path, tiny_path, monkeypatch):
    # Exactly, not within a tolerance. From nearly flat to certain of every token.
    seen = []

    def keep(log_probs, sum_squared_probs):
        seen.append((log_probs, sum_squared_probs))
        return logit_gradient_energy(log_probs, sum_squared_probs)

    monkeypatch.setattr("basis_rl.trainer.scoring.logit_gradient_energy", keep)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)  # several tiles, as in a large vocabulary
    trainer = tiny_trainer(tmp_path, "otb", model=tiny_path, max_steps=1, **BFLOAT16[case])
    trainer.model.lm_head.weight.data.mul_(spread)
    trainer.train()
    log_probs, squared = (torch.cat([chunk[k].flatten() for chunk in seen]) for k in (0, 1))
    assert ((squared > 0) & (squared <= 1)).all()
    assert (squared >= log_probs.exp() ** 2 * (1 - 1e-4)).all()
