"""Rollouts of an engine, weighed by log-probabilities of the loss's own pass, as if there were a pass before it."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from basis_rl.baselines import Spo
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.correction import RolloutCorrection
from tests.support.tiny import flat, sums, tiny_model, tiny_tokenizer, tiny_trainer

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}
ALIGNED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}


class Canned(BasisTrainer):
    """Has rollouts and their log-probabilities in vLLM's place, and counts the calls of the policy in training."""

    def __init__(self, *args, mode=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_vllm = True
        # Refused where the settings name no vLLM.
        self.args.vllm_importance_sampling_mode = mode or self.args.vllm_importance_sampling_mode
        self.vllm_generation = SimpleNamespace(sync_error=0.0, held=lambda *given: nullcontext())
        self._correction = RolloutCorrection(self.args) if self._loss_scores_rollouts() else None
        self.calls = 0
        self.bias = 0.0
        self.trl_own = []
        self.model.register_forward_pre_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        generator = torch.Generator().manual_seed(self._generation_batch)
        lengths = torch.randint(1, 7, (len(prompt_ids),), generator=generator).tolist()
        ids = [torch.randint(5, 200, (length,), generator=generator).tolist() for length in lengths]
        uniform = -math.log(self.model.config.vocab_size)
        log_probs = [(uniform + 0.2 * torch.randn(length, generator=generator)).tolist() for length in lengths]
        log_probs[1][0] = math.nan
        return ids, [[each + self.bias for each in row] for row in log_probs]

    def _log_mismatch(self, output):
        own = {name: values[-1] for name, values in self._metrics["train"].items() if name.startswith("sampling/")}
        super()._log_mismatch(output)
        if self._correction is None:
            self.trl_own.append(({name: self._metrics["train"][name][-1] for name in own}, own))


def run(folder, packing, **given):
    trained = tiny_trainer(folder, given.pop("baseline", "grpo"), Canned, packing=packing, **{**ALIGNED, **given})
    trained.train()
    return trained


def logged(trained):
    rows = [row for row in trained.state.log_history if "loss" in row]
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "tokens_"))} for row in rows]


def assert_same_logs(packed, padded):
    for found, expected in zip(logged(packed), logged(padded), strict=True):
        assert found.keys() == expected.keys()
        for name in [name for name in expected if name.startswith(COMPARED)]:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


COMPARED = ("loss", "grad_norm", "entropy", "reward", "sampling/", "rollout/")
CASES = [("dapo", mode) for mode in (*MODES, "seq_mean_k1")]
CASES += [("gpg", "token_truncate"), ("gpg", "seq_mask_tis"), ("vespo", "token_mask")]


@pytest.mark.parametrize(("objective", "mode"), CASES)
def test_without_a_scoring_pass_all_is_as_with_it(objective, mode, tmp_path):
    settings = {"objective": objective, "vllm_importance_sampling_mode": mode, "max_steps": 3, **BOUNDS}
    packed, padded = (run(tmp_path / packing, packing, **settings) for packing in ("auto", "none"))
    assert packed._correction is not None
    assert padded._correction is None
    assert packed.calls == 3 * 2
    assert padded.calls == 3 * 2 * 2, "one more for each micro-batch"
    assert_same_logs(packed, padded)
    for expected in logged(padded):
        assert {"sampling/importance_sampling_ratio/mean", "rollout/kl", "rollout/masked"} <= set(expected)
        assert 0 < expected["rollout/masked"] < 1 or not mode.startswith("seq_")
        assert expected["sampling/importance_sampling_ratio/min"] < expected["sampling/importance_sampling_ratio/max"]
    assert len(padded.trl_own) == 3
    for found, expected in padded.trl_own:
        assert len(found) == 5
        assert mode.startswith("seq_") or found == pytest.approx(expected, rel=1e-5), "as TRL's"
    weights = [flat(trained.model.parameters()) for trained in (packed, padded)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 2, 1), (4, 2, 2), (2, 1, 1)])
def test_a_step_of_several_generation_batches_or_passes_weighs_each(shape, tmp_path):
    accumulated, generated, passes = shape
    settings = {"gradient_accumulation_steps": accumulated, "steps_per_generation": generated, "max_steps": 2}
    settings |= {"num_iterations": passes, "vllm_importance_sampling_mode": "token_truncate", **BOUNDS}
    packed, padded = (run(tmp_path / packing, packing, **settings) for packing in ("auto", "none"))
    assert packed.calls == 2 * accumulated
    assert padded.calls == 2 * (accumulated + accumulated // passes)
    assert_same_logs(packed, padded)


def with_dropout():
    model = tiny_model(tiny_tokenizer())
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model


# What needs log-probabilities before the loss, or another policy's than the loss's.
KEPT = {
    "no packing": {"packing": "none"},
    "energies": {"baseline": "otb"},
    "values": {"baseline": "ppo"},
    "log-probabilities": {"baseline": Spo(forgetting="kl"), "num_generations": 1},
    "KL in the reward": {"baseline": "reinforce_pp", "beta": 0.1, "kl_placement": "reward"},
    "two steps of a batch": {"gradient_accumulation_steps": 1},
    "two passes": {"num_iterations": 2},
    "dropout": {"model": with_dropout},
}


@pytest.mark.parametrize("case", KEPT)
def test_the_scoring_pass_stays_where_something_needs_it(case, tmp_path, tiny_path):
    given = {"packing": "auto", "model": tiny_path, "max_steps": 2, **KEPT[case]}
    if callable(given["model"]):
        given["model"] = given["model"]()
    trained = run(tmp_path, **given)
    assert trained._correction is None
    micro_batches = 2 * trained.args.gradient_accumulation_steps
    scored = 2 if "two" in case else micro_batches
    assert trained.calls == micro_batches + scored
    assert all("sampling/importance_sampling_ratio/mean" in row for row in logged(trained) if "reward" in row)


def test_the_scoring_pass_stays_for_a_baseline_that_reads_the_weights(tmp_path):
    trained = tiny_trainer(tmp_path, "opo", Canned, **ALIGNED)
    assert trained._loss_scores_rollouts()
    trained.baseline.requires = frozenset({"rollout_weights"})
    assert not trained._loss_scores_rollouts()


def test_an_evaluation_is_scored_apart(tmp_path):
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": sums(4)}
    trained = run(tmp_path, "auto", max_steps=2, **evaluating)
    assert trained._correction is not None
    evaluated = [row for row in trained.state.log_history if "eval_loss" in row]
    assert len(evaluated) == 2
    assert all(math.isfinite(row["eval_sampling/importance_sampling_ratio/mean"]) for row in evaluated)
    assert len([row for row in logged(trained) if "sampling/importance_sampling_ratio/mean" in row]) == 2


ENGINES = [("auto", 0.0, 1.0), ("auto", -1.5, "above 2"), ("auto", 2.0, "below 0.5"), ("auto", math.nan, None)]
ENGINES += [("none", 2.0, "below 0.5"), ("none", math.nan, None)]


@pytest.mark.parametrize(("packing", "bias", "shown"), ENGINES)
def test_an_engine_of_other_probabilities_is_shown_and_warned_of_once(packing, bias, shown, tmp_path, caplog):
    """Also one that tells none: TRL's metrics would be perfect."""
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 9.0}
    trained = tiny_trainer(tmp_path, "grpo", Canned, packing=packing, max_steps=3, **ALIGNED, **settings)
    trained.bias = bias
    trained.train()
    rows = logged(trained)
    means = [row["sampling/importance_sampling_ratio/mean"] for row in rows]
    warned = [record for record in caplog.records if "The mean weight of the rollouts" in record.message]
    assert len(warned) == (bias != 0.0)
    if bias != bias:
        names = [name for name in rows[0] if name.startswith(("sampling/", "rollout/"))]
        without = {"rollout/kl", "rollout/log_ppl_gap", "rollout/ess"}
        without |= {name for name in names if name.startswith("sampling/")}
        assert without == {name for name in names if rows[0][name] is None}
        return
    assert all({1.0: 0.5 < mean < 2, "above 2": mean > 2, "below 0.5": mean < 0.5}[shown] for mean in means)


class Bypassing(Canned):
    """The engine's policy is the old one. Of each micro-batch log-probabilities, gradient and inputs are kept."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, mode="bypass", **kwargs)
        self.found = []

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.log_probs = result[0]
        return result

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        if self.model.training:
            (gradient,) = torch.autograd.grad(loss, self.log_probs, retain_graph=True)
            self.found.append((self.log_probs.detach().double(), gradient.double(), inputs))
        return loss


def expected_gradient(objective, log_probs, old, inputs, trained):
    """By a loop over tokens: rollouts' means for ``grpo``, rollouts' ratios for ``gspo``, a band for ``dis``."""
    mask = inputs["completion_mask"].bool().tolist()
    found = torch.zeros_like(log_probs)
    steps = trained.current_gradient_accumulation_steps
    tokens = int(inputs["num_items_in_batch"]) * steps / trained.args.steps_per_generation
    for row, advantage in enumerate(inputs["advantages"].tolist()):
        places = [t for t in range(len(mask[row])) if mask[row][t]]
        logs = {t: float(log_probs[row, t] - old[row, t]) for t in places}
        mean = sum(logs.values()) / max(1, len(logs))
        for t in places:
            ratio = math.exp(mean if objective.startswith("gspo") else logs[t])
            clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
            if objective == "dis":
                clipped = not 0.8 <= ratio <= 1.2
            count = tokens if objective == "dis" else len(places) * len(mask) * steps
            found[row, t] = 0.0 if clipped else -ratio * advantage / count
    return found


SHAPES = [(2, 1), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("objective", "accumulated", "passes"),
    [*(("grpo", *shape) for shape in SHAPES), *((name, 2, 2) for name in ("gspo", "gspo_token", "dis"))],
)
def test_the_engines_policy_is_the_old_one_and_nothing_is_scored_before_the_loss(
    objective, accumulated, passes, tmp_path
):
    settings = {"objective": objective, "gradient_accumulation_steps": accumulated, "num_iterations": passes}
    settings |= {"max_steps": 4 * passes // accumulated, "learning_rate": 1e-2, "packing": "none"}
    trained = tiny_trainer(tmp_path, "grpo", Bypassing, **{**ALIGNED, **settings})
    trained.train()
    assert trained.calls == len(trained.found) == 4 * passes
    first: dict[int, torch.Tensor] = {}
    clipped = 0
    for log_probs, gradient, inputs in trained.found:
        sampled = inputs["sampling_per_token_logps"].double()
        mask = inputs["completion_mask"].bool()
        # What the engine does not tell has the probability of its first loss.
        known = first.setdefault(id(inputs), torch.where(sampled.isnan(), log_probs, sampled))
        expected = expected_gradient(objective, log_probs, known, inputs, trained)
        torch.testing.assert_close(gradient * mask, expected, rtol=1e-4, atol=1e-7)
        learns = (inputs["advantages"] != 0)[:, None] & mask
        clipped += int((learns & (expected == 0)).sum())
        assert bool(expected.any()) or not learns.any()
        assert inputs["importance_sampling_ratio"].tolist() == [[1.0]] * len(mask)
    assert clipped > 0
    rows = logged(trained)
    batches = [row for row in rows if "rollout/kl" in row]
    assert len(batches) == 2
    assert all(row["rollout/kl"] > 0.01 and 0 < row["rollout/ess"] < 1 for row in batches)
    assert all(row["sampling/importance_sampling_ratio/max"] == 1.0 for row in batches)


def test_a_baseline_of_energies_still_has_its_pass(tmp_path):
    trained = tiny_trainer(tmp_path, "otb", Bypassing, packing="none", max_steps=2, **ALIGNED)
    trained.train()
    assert len(trained.found) == 4
    assert trained.calls == 4 + 4


def test_a_run_that_is_resumed_within_a_generation_batch_goes_on_as_it_was(tmp_path):
    settings = {**ALIGNED, "gradient_accumulation_steps": 1, "max_steps": 4, "save_steps": 1, "save_strategy": "steps"}
    settings |= {"learning_rate": 1e-2, "packing": "auto"}
    whole = tiny_trainer(tmp_path, "grpo", Bypassing, **settings)
    whole.train()
    again = tiny_trainer(tmp_path, "grpo", Bypassing, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_logs(again, whole)
    assert torch.equal(flat(again.model.parameters()), flat(whole.model.parameters()))


def test_an_evaluation_needs_no_engine_of_another_policy(tmp_path):
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": sums(4)}
    trained = tiny_trainer(tmp_path, "grpo", Bypassing, max_steps=1, **ALIGNED, **evaluating)
    trained.train()
    assert [math.isfinite(row["eval_loss"]) for row in trained.state.log_history if "eval_loss" in row] == [True]
