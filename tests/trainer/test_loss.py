"""What the trainer adds to TRL's loss: GPG is plain REINFORCE; KL in the loss and in the reward."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig

from basis_rl.baselines import ReinforcePP, build_baseline
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.loss import kl_loss, no_kl
from tests.support.tiny import config, parity_reward, sums

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]


def build(cls, tmp_path, model, baseline="dr_grpo", objective=None, peft_config=None, **settings):
    return cls(
        model=str(model),
        reward_funcs=parity_reward,
        args=config(tmp_path, **settings),
        train_dataset=sums(),
        baseline=build_baseline(baseline) if isinstance(baseline, str) else baseline,
        objective=objective,
        peft_config=peft_config,
    )


class Checked(BasisTrainer):
    """Beside each loss, another one computed by `other`; both with their gradients."""

    seen: list

    def other(self, model, inputs):
        raise AssertionError("each test gives its own")

    def _compute_loss(self, model, inputs):
        parameters = list(model.parameters())
        loss = super()._compute_loss(model, inputs)
        expected = self.other(model, inputs)
        gradients = [torch.autograd.grad(x, parameters, retain_graph=True) for x in (loss, expected)]
        self.seen.append((loss.detach(), expected.detach(), *gradients))
        return loss


def assert_same(seen, count, atol):
    assert len(seen) == count
    for loss, expected, gradients, others in seen:
        torch.testing.assert_close(loss, expected, rtol=0, atol=atol)
        assert max(g.abs().max() for g in others) > 0
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_gpg_is_plain_reinforce(tmp_path, tiny_path):
    class Reinforce(Checked):
        def other(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
            tokens = inputs["completion_ids"].shape[1]
            log_probs = logits.gather(-1, ids[:, 1:, None])[:, -tokens:, 0] * inputs["completion_mask"]
            share = inputs["num_items_in_batch"] / self.args.steps_per_generation
            return -(inputs["advantages"][:, None] * log_probs).sum() / share

    trainer = build(Reinforce, tmp_path, tiny_path, objective="gpg", max_steps=4, num_iterations=2)
    trainer.seen = []
    trainer.train()
    gradients = [(0.0 * loss, 0.0 * expected, ours, theirs) for loss, expected, ours, theirs in trainer.seen]
    assert_same(gradients, 4, atol=1e-6)  # the value differs (a ratio of 1 has no log), the gradient is the point


@pytest.mark.parametrize("loss_type", LOSSES)
def test_our_aggregation_of_the_kl_is_trls(loss_type, tmp_path, tiny_path):
    class OwnK3(Checked):
        def other(self, model, inputs):
            self._scored = []
            with no_kl(self):
                loss = super(Checked, self)._compute_loss(model, inputs)
            (log_probs,), self._scored = self._scored, None
            return loss + kl_loss(self, inputs, log_probs)

    settings = {"loss_type": loss_type, "beta": 0.3, "use_bias_correction_kl": False, "max_steps": 3}
    trainer = build(OwnK3, tmp_path, tiny_path, **settings, gradient_accumulation_steps=2, steps_per_generation=4)
    trainer.seen = []
    trainer.train()
    assert_same(trainer.seen, 6, atol=1e-5)
    assert any(row.get("kl", 0) > 0 for row in trainer.state.log_history)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_of_a_lora_policy_is_against_the_model_without_its_adapter(estimator, tmp_path, tiny_path):
    class ByHand(BasisTrainer):
        def _compute_loss(self, model, inputs):
            difference = log_probs_of(self, inputs, reference=True) - log_probs_of(self, inputs, reference=False)
            mask = inputs["completion_mask"].bool()
            per_token = 0.5 * difference**2 if estimator == "k2" else difference.exp() - difference - 1
            self.expected.append(float(per_token[mask].mean()))
            return super()._compute_loss(model, inputs)

    settings = {"beta": 0.3, "kl_estimator": estimator, "max_steps": 2, "use_bias_correction_kl": False}
    trainer = build(ByHand, tmp_path, tiny_path, peft_config=LORA, **settings)
    trainer.expected = []
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logged = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert logged == pytest.approx(trainer.expected, rel=1e-3)
    assert min(logged) > 1e-4
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora" in name for name in moved)


def test_k2_pulls_towards_the_reference(tmp_path, tiny_path):
    kls = {}
    for beta in (0.0, 5.0):
        settings = {"beta": beta or 1e-12, "kl_estimator": "k2", "max_steps": 12, "learning_rate": 3e-2}
        trainer = build(BasisTrainer, tmp_path / str(beta), tiny_path, **settings)
        trainer.train()
        kls[beta] = [row["kl"] for row in trainer.state.log_history if "kl" in row][-1]
    assert kls[5.0] < 0.5 * kls[0.0]


class Keep(ReinforcePP):
    def __init__(self):
        super().__init__()
        self.batches = []

    def advantages(self, batch):
        self.batches.append(batch)
        return super().advantages(batch)


LORA = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def log_probs_of(trainer, output, *, reference):
    """Policy or reference scored by hand: for LoRA the reference is the model without its adapter."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    model = trainer.ref_model if reference and trainer.ref_model is not None else trainer.model
    off = model.disable_adapter() if reference and trainer.ref_model is None else nullcontext()
    with torch.no_grad(), off:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None])[:, -output["completion_ids"].shape[1] :, 0]


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_kl_in_the_reward_is_k1_against_the_reference(accumulation, peft_config, tmp_path, tiny_path):
    class Scoring(BasisTrainer):
        expected: list

        def _advantages(self, inputs, output):
            scores = [log_probs_of(self, output, reference=reference) for reference in (False, True)]
            self.expected.append(0.2 * (scores[0] - scores[1]) * output["completion_mask"])
            return super()._advantages(inputs, output)

    baseline = Keep()
    settings = {"beta": 0.2, "kl_placement": "reward", "max_steps": 4, "gradient_accumulation_steps": accumulation}
    trainer = build(Scoring, tmp_path, tiny_path, baseline, peft_config=peft_config, **settings)
    trainer.expected = []
    trainer.train()
    assert trainer.args.kl_estimator == "k1"
    for batch, expected in zip(baseline.batches, trainer.expected, strict=True):
        torch.testing.assert_close(batch.kl, expected, rtol=0, atol=1e-5)
    assert (trainer.ref_model is None) == (peft_config is not None)
    if peft_config is None:  # the adapter of the test is not the identity
        assert baseline.batches[0].kl.abs().max() < 1e-5
    assert baseline.batches[1].kl.abs().max() > 1e-3
    assert any("kl" in row for row in trainer.state.log_history)
