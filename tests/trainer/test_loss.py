"""The policy's loss against plain loops and TRL's code: own objectives, KL in the loss and in the reward."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig

from basis_rl.baselines import ReinforcePP
from basis_rl.functional.objectives import OF_LOSS_TYPE, kl_estimate
from basis_rl.objectives import OBJECTIVES, LossOutputs, TrlObjective, objective
from basis_rl.trainer import BasisTrainer
from tests.support.loss_run import FakeRun, micro_batch
from tests.support.tiny import tiny_trainer

GPG = OBJECTIVES["gpg"]


def build(cls, folder, model, baseline="dr_grpo", **given):
    return tiny_trainer(folder, baseline, cls, model=model, **given)


def same(found, expected, atol=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    assert expected[1].abs().max() > 1e-4, "zeros would prove nothing"


def kl_by_hand(run, inputs, estimator, ratio=None):
    """``(4, 6)``: the KL estimate of each token, by a plain loop."""
    ref, found = inputs["ref_per_token_logps"], torch.zeros(4, 6).double()
    for i in range(4):
        for t in range(6):
            d = run.log_probs[i, t] - ref[i, t]
            estimate = d * d / 2 if estimator == "k2" else (-d).exp() - 1 + d
            found[i, t] = estimate if ratio is None else estimate * ratio[i, t]
    return found


def token_mean_by_hand(run, per_token, inputs):
    """The loss of a micro-batch from the losses of its tokens, by a plain loop."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    tokens = float(inputs["num_items_in_batch"])
    if run.model.training:  # a generation batch is divided into this many micro-batches, a step takes some of them
        tokens = tokens / run.args.steps_per_generation * run.current_gradient_accumulation_steps
    return sum(per_token[i, t] for i in range(4) for t in range(6) if mask[i, t]) / tokens


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("estimator", [None, "k2", "k3"])
def test_gpg_is_the_plain_loop(estimator, tools, accumulation, training):
    settings = {} if estimator is None else {"beta": 0.3, "kl_estimator": estimator}
    run = FakeRun(GPG, training=training, accumulation=accumulation, **settings)
    inputs = micro_batch(tools=tools)
    ratio = (run.log_probs - run.log_probs.detach()).exp()
    per_token = -ratio * inputs["advantages"][:, None]
    if estimator is not None:  # k3 takes the ratio's gradient, as TRL's does (use_bias_correction_kl)
        per_token = per_token + 0.3 * kl_by_hand(run, inputs, estimator, ratio if estimator == "k3" else None)
    same(run.loss(inputs), run.with_gradients(token_mean_by_hand(run, per_token, inputs)))


def ppo(aggregation, **metrics):
    @objective(token_advantages=True)
    def loss(inputs):
        low, high = 1 - inputs.settings.epsilon_low, 1 + inputs.settings.epsilon_high
        ratio = inputs.ratio if inputs.settings.delta is None else inputs.ratio.clamp(max=inputs.settings.delta)
        losses = [r * inputs.token_advantages for r in (ratio, inputs.ratio.clamp(low, high))]
        named = {name: make(inputs).detach() for name, make in metrics.items()}
        return LossOutputs(per_token=-torch.minimum(*losses), aggregation=aggregation, metrics=named)

    return loss


@pytest.mark.parametrize(("vllm", "training"), [("token", True), ("sequence", False)])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("settings", [{}, {"beta": 0.3}, {"beta": 0.3, "kl_estimator": "k2"},
                                      {"beta": 0.3, "use_bias_correction_kl": False}, {"beta": 0.3, "delta": 1.5},
                                      {"entropy_coef": 0.1, "epsilon_high": 0.3, "off_policy_mask_threshold": 0.1},
                                      {"top_entropy_quantile": 0.4}])  # fmt: skip
def test_an_own_objective_is_trls_where_it_is_the_same(settings, loss_type, vllm, training):
    """PPO's clip as somebody's own function, with every aggregation that TRL has for it."""
    inputs, aux = micro_batch(tools=True, vllm=vllm), torch.tensor(0.7, dtype=torch.float64)
    kinds = ppo(OF_LOSS_TYPE[loss_type]), TrlObjective(loss_type)
    own, trls = (FakeRun(kind, accumulation=2, training=training, aux=aux, vllm=True, **settings) for kind in kinds)
    same(own.loss(inputs), trls.loss(inputs))
    for key in ("kl", "entropy", "policy_loss", "aux_loss"):
        assert own.metrics.get(key, []) == pytest.approx(trls.metrics.get(key, []), rel=1e-9), key
    assert not any(key.startswith("clip_ratio") for key in own.metrics)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("loss_type", OF_LOSS_TYPE)
def test_our_aggregation_of_the_kl_is_trls(loss_type, tools, training):
    """TRL's own KL term, k3, against the same estimate through ours, on ragged rollouts."""
    settings = {"beta": 0.3, "use_bias_correction_kl": False, "accumulation": 2, "training": training}
    run, ours = FakeRun(TrlObjective(loss_type), **settings), FakeRun(TrlObjective(loss_type), **settings)
    inputs = micro_batch(tools=tools)
    same(ours.with_gradients(ours._own_loss(ours.model, inputs)), run.loss(inputs))
    assert ours.metrics["kl"] == pytest.approx(run.metrics["kl"])
    assert run.metrics["kl"][0] > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_leaves_the_loss_alone(estimator):
    inputs = micro_batch()
    for kind in (OBJECTIVES["dapo"], GPG):
        found = FakeRun(kind, beta=0.3, kl_placement="reward", kl_estimator=estimator).loss(inputs)
        same(found, FakeRun(kind).loss(inputs))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("old", [True, False], ids=["old", "scored"])
def test_kl_in_the_reward_is_of_the_policy_that_sampled(old, estimator):
    run = FakeRun(GPG, beta=0.3, kl_placement="reward", kl_estimator=estimator)
    output = micro_batch(old=old, tools=True)
    d = (output["old_per_token_logps"] if old else run.log_probs.detach()) - output["ref_per_token_logps"]
    expected = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]
    torch.testing.assert_close(run._kl_in_reward(output).detach(), 0.3 * expected)
    mask = (output["completion_mask"] * output["tool_mask"]).bool()
    assert run.metrics["kl"] == [pytest.approx(expected[mask].mean().item())]


def test_metrics_of_an_own_objective():
    """Of tokens the mean over action tokens, of scalars as they are."""
    made = {"ratio": lambda given: given.ratio, "longest": lambda given: given.mask.sum(1).max()}
    run, inputs = FakeRun(ppo("rollout_mean", **made)), micro_batch(tools=True)
    run.loss(inputs)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    ratio = (run.log_probs - inputs["old_per_token_logps"]).exp().detach()[mask].mean().item()
    assert run.metrics["objective/ratio"] == [pytest.approx(ratio)]
    assert run.metrics["objective/longest"] == [4.0]  # rollouts of 6, 3, 5, 1 tokens, less the tools' 2, 0, 1, 0
    assert "policy_loss" not in run.metrics


def keeping(seen, **declared):
    @objective(token_advantages=True, **declared)
    def loss(inputs):
        seen.append(inputs)
        return LossOutputs(per_token=-inputs.ratio * inputs.token_advantages, aggregation="token_mean")

    return loss


def test_what_an_own_objective_is_given():
    seen, inputs = [], micro_batch(tools=True, vllm="sequence")
    settings = {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0}
    run = FakeRun(keeping(seen), **settings)
    run.loss(inputs)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    (given,) = seen
    assert torch.equal(given.mask, mask)
    assert torch.equal(given.advantages, inputs["advantages"])
    old = inputs["old_per_token_logps"]
    for name, value in (("log_probs", run.log_probs), ("old_log_probs", old), ("entropy", run.entropy)):
        assert torch.equal(getattr(given, name), torch.where(mask, value, 0.0)), name
    found = given.settings
    assert (found.epsilon_low, found.epsilon_high, found.delta, found.max_completion_length) == (0.1, 0.3, 4.0, 9)


def test_without_a_change_of_the_policy_the_ratio_is_1():
    seen, inputs = [], micro_batch(old=False)
    FakeRun(keeping(seen)).loss(inputs)
    assert (seen[0].ratio == 1).all()
    assert not seen[0].old_log_probs.requires_grad


def test_a_failed_scoring_pass_leaves_nothing_behind():
    run = FakeRun(GPG, beta=0.3)

    def fails(*args, **kwargs):
        raise RuntimeError("out of memory")

    run._get_per_token_logps_and_entropies = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        run.loss(micro_batch())
    assert run.beta == run.args.beta == 0.3
    assert run._scored is None


def test_kl_loss_of_a_lora_policy_is_against_the_model_without_its_adapter(tmp_path, tiny_path):
    class ByHand(BasisTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            difference = log_probs_of(self, inputs, reference=True) - log_probs_of(self, inputs, reference=False)
            per_token = difference.exp() - difference - 1
            self.expected.append(float(per_token[inputs["completion_mask"].bool()].mean()))
            return super().compute_loss(model, inputs, **kwargs)

    trainer = build(ByHand, tmp_path, tiny_path, peft_config=LORA, beta=0.3, max_steps=2, use_bias_correction_kl=False)
    trainer.expected = []
    trainer.train()
    logged = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    assert logged == pytest.approx(trainer.expected, rel=1e-3)
    assert min(logged) > 1e-4


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


@pytest.mark.parametrize(("accumulation", "peft_config"), [(1, None), (2, LORA)])
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


@pytest.mark.parametrize("objective", ["grpo", "dapo", "gpg"])
def test_the_default_kl_in_the_loss_has_k2s_gradient(objective):
    """TRL multiplies k3 by the ratio (use_bias_correction_kl, on); the papers' k3 needs it off."""
    inputs = micro_batch(tools=True)
    inputs.pop("old_per_token_logps")  # of the first update, where the ratio is 1

    def gradient(**settings):
        return FakeRun(OBJECTIVES[objective], beta=0.3, **settings).loss(inputs)[1]

    torch.testing.assert_close(gradient(), gradient(kl_estimator="k2"))
    assert not torch.allclose(gradient(use_bias_correction_kl=False), gradient(kl_estimator="k2"), rtol=1e-3)


@pytest.mark.parametrize("objective", ["gspo", "luspo", "gspo_token"])
def test_the_default_kl_with_ratios_of_a_rollout(objective):
    """k3's own gradient, and k3 times that of the rollout's ratio; the token form has k2's."""
    inputs = micro_batch()
    inputs.pop("old_per_token_logps")
    inputs["advantages"] = torch.zeros(4).double()

    def gradient(**settings):
        return FakeRun(OBJECTIVES[objective], beta=0.3, **settings).loss(inputs)[1]

    mask = inputs["completion_mask"].double()
    k3 = kl_estimate(FakeRun(OBJECTIVES[objective]).log_probs.detach(), inputs["ref_per_token_logps"], "k3") * mask
    lengths = mask.sum(dim=1, keepdim=True)
    shares = torch.ones_like(lengths) if objective == "luspo" else lengths
    of_ratio = 0.3 * (k3.sum(dim=1, keepdim=True) / shares) * mask / lengths / 4
    if objective == "gspo_token":
        torch.testing.assert_close(gradient(), gradient(kl_estimator="k2"))
        return
    torch.testing.assert_close(gradient(), gradient(use_bias_correction_kl=False) + of_ratio)
    assert not torch.allclose(gradient(), gradient(kl_estimator="k2"), rtol=1e-2)
