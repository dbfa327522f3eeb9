"""What the loss's own pass tells of each token's gradient, against a pass of the policy made for it alone."""

import pytest
import torch
from peft import LoraConfig

from basis_rl.baselines import BatchMean, build_baseline
from basis_rl.trainer import BasisTrainer
from examples.quickstart.warm_start import build_model
from tests.support.tiny import tiny_model, tiny_tokenizer, tiny_trainer

pytestmark = pytest.mark.gpu


class Kept(BatchMean):
    """Keeps the batches that it learns from."""

    def __init__(self, target="optimal"):
        super().__init__(target)
        self.batches = []

    def update(self, batch):
        self.batches.append(batch)
        super().update(batch)


class WithRows(BasisTrainer):
    """Keeps the rows of each generation batch as they were scored."""

    def __init__(self, *args, **kwargs):
        self.rows = []
        super().__init__(*args, **kwargs)

    def _advantages(self, inputs, output):
        local = super()._advantages(inputs, output)
        self.rows.append({**output, "advantages": local})
        return local


def expected_energies(trainer, rows, layer=None):
    """``|d log pi(y) / d x_t|^2``, ``(B, T)``, x_t what enters a layer or the final norm: one padded row at a time."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    tokens = rows["completion_ids"].shape[1]
    found = torch.zeros(rows["completion_ids"].shape)
    for row in range(len(found)):
        entered = []
        module = backbone.norm if layer is None else backbone.layers[layer]
        hook = module.register_forward_pre_hook(lambda module, args, kept=entered: kept.append(args[0]))
        ids, mask = (
            torch.cat([rows[f"prompt_{kind}"], rows[f"completion_{kind}"]], dim=1)[row : row + 1]
            for kind in ("ids", "mask")
        )
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1] / trainer.temperature
        hook.remove()
        log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0] * mask[0, 1:]
        (gradient,) = torch.autograd.grad(log_probs[-tokens:].sum(), entered[0])
        found[row] = gradient[0, :-1][-tokens:].square().sum(dim=-1) * rows["completion_mask"][row]
    return found


CASES = {
    "one step of a batch": {"gradient_accumulation_steps": 2, "objective": "dr_grpo"},
    "two steps of a batch": {"objective": "dr_grpo"},
    "two batches in a step": {"gradient_accumulation_steps": 4, "objective": "dr_grpo"},
    "two passes": {"num_iterations": 2, "objective": "dr_grpo", "max_steps": 4},
    "mean over each rollout's tokens": {"gradient_accumulation_steps": 2, "objective": "grpo"},
    "the same, each token its own ratio": {"gradient_accumulation_steps": 2, "objective": "gspo_token"},
    "own objective": {"gradient_accumulation_steps": 2, "objective": "gpg"},
    "padded": {"gradient_accumulation_steps": 2, "packing": "none", "objective": "dr_grpo"},
    "groups with equal rollouts": {
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "top_k": 2,
        "max_completion_length": 2,
        "allow_truncated_sampling": True,
        "objective": "dr_grpo",
    },
    "temperature": {"gradient_accumulation_steps": 2, "temperature": 0.7, "objective": "dr_grpo"},
    "checkpointing": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "objective": "dr_grpo"},
}


WITH_LORA = ("two passes", "checkpointing")


# A policy of many layers tells the energies of whole rollouts in an inner one.
@pytest.mark.parametrize(
    ("case", "lora", "layers", "layer"),
    [*((case, False, 11, 9) for case in CASES), *((case, True, 1, None) for case in WITH_LORA)],
)
def test_energies_are_the_squared_gradients_of_each_token(case, lora, layers, layer, tmp_path):
    settings = {"max_steps": 2, "num_generations": 1, "learning_rate": 1e-30, **CASES[case]}
    peft_config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False) if lora else None
    tokenizer = tiny_tokenizer()
    model = build_model(tokenizer, hidden_size=16, layers=layers)
    shape = {"model": model, "processing_class": tokenizer, "peft_config": peft_config}
    trainer = tiny_trainer(tmp_path, Kept(), WithRows, **shape, **settings)
    trainer.train()
    assert len(trainer.baseline.batches) == len(trainer.rows) >= 2 - ("two" in case)
    averaged = settings["objective"] in ("grpo", "gspo_token")
    for batch, rows in zip(trainer.baseline.batches, trainer.rows, strict=True):
        expected = expected_energies(trainer, rows, layer)
        if averaged:
            expected = expected / rows["completion_mask"].sum(dim=1, keepdim=True) ** 2
        found = batch.gradient_energies
        learnt = (rows["advantages"] != 0)[:, None] & batch.action_mask
        assert (found[~learnt] == 0).all()
        assert learnt.any()
        # Up to what the loss divides everything by.
        torch.testing.assert_close(found / found[learnt].mean(), expected * learnt / expected[learnt].mean())


@pytest.mark.parametrize("case", ["tokens have advantages of their own", "only the last layer is trained"])
def test_a_deep_policy_tells_its_last_layer_where(case, tmp_path):
    tokenizer = tiny_tokenizer()
    model = build_model(tokenizer, hidden_size=16, layers=11)
    baseline = Kept("optimal_token" if "tokens" in case else "optimal")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("tokens" in case or "layers.10." in name)
    shape = {"model": model, "processing_class": tokenizer, "max_steps": 2, "num_generations": 1}
    trainer = tiny_trainer(tmp_path, baseline, WithRows, objective="dr_grpo", learning_rate=1e-30, **shape)
    trainer.train()
    found = baseline.batches[0].gradient_energies
    model.requires_grad_(True)
    expected = expected_energies(trainer, trainer.rows[0]) * (found > 0)
    assert found.any()
    torch.testing.assert_close(found / found.mean(), expected / expected.mean())


def test_a_target_adds_no_pass_over_the_rollouts(tmp_path, tiny_path):
    class Counting(BasisTrainer):
        passes = 0

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.passes += 1
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    shape = {"model": tiny_path, "gradient_accumulation_steps": 2, "num_generations": 1, "max_steps": 2}
    passes = []
    for name, given in (("none", {}), ("basis_history", {"target": "optimal_token"})):
        trainer = tiny_trainer(tmp_path / name, build_baseline(name, **given), Counting, **shape)
        trainer.train()
        passes.append(trainer.passes)
    assert passes == [4, 4]
    assert trainer.state.log_history[-2]["baseline/learnt_from"] > 0


def test_a_policy_without_gradients_below_its_head_is_named_once(tmp_path, tiny_path, caplog):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    baseline = build_baseline("basis_history")
    shape = {"num_generations": 1, "max_steps": 4}
    tiny_trainer(tmp_path, baseline, model=model, processing_class=tokenizer, **shape).train()
    warned = [each for each in caplog.records if "cannot learn its target" in each.message]
    assert len(warned) == 1
    assert not baseline.optimal.moments.any()
