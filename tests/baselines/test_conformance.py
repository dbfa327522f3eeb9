"""The conformance matrix: every registered baseline keeps the contract, with its parameters in many combinations."""

from types import SimpleNamespace

import pytest
import torch

from basis_rl.baselines import BASELINES, Basis, build_baseline
from basis_rl.conformance import check_baseline
from basis_rl.conformance.baselines import example_batch
from basis_rl.conformance.promises import saved
from basis_rl.values import ValueTable

IDS = [f"prompt-{i}" for i in range(8)]


TABLE = ValueTable.from_rewards({p: [1.0] * i + [0.0] * (7 - i) for i, p in enumerate(IDS)})
GRADED = ValueTable.from_rewards({p: [0.1 * i, 0.5, 2.0, -1.0] for i, p in enumerate(IDS)})

CLUSTERS = {p: i % 3 for i, p in enumerate(IDS)}
VARIANTS = [(name, {}) for name in BASELINES if name not in ("basis", "bv_blend", "a_star_po")]
VARIANTS += [("a_star_po", {"values": TABLE}), ("a_star_po", {"values": GRADED, "beta1": 0.01})]
VARIANTS += [("bv_blend", {"clusters": CLUSTERS}), ("bv_blend", {"clusters": CLUSTERS, "confidence": 0.5})]
VARIANTS += [("reinforce_pp", {"over": "tokens"}), ("reinforce_pp_baseline", {"over": "tokens"})]
VARIANTS += [("ppo", {"lam": 0.9, "gamma": 0.99, "whiten_advantages": False}), ("ppo", {"critic_lam": 1.0, "lam": 0.0})]
VARIANTS += [("sao", {"lam_alpha": 0.05, "gamma": 0.9}), ("ppo", {"lam_alpha": 1.5, "whiten_advantages": False})]
VARIANTS += [("otb", {"tail": "return"}), ("reinforce_pp", {"reward_clip": (0.0, 0.5)}), ("dr_grpo", {"alpha": True})]
TARGETS = ("optimal", "optimal_token")
VARIANTS += [("batch_mean", {"target": each}) for each in TARGETS]
VARIANTS += [("basis_history", {"target": each, "lcb": 1.0, "prior": "text"}) for each in TARGETS]
VARIANTS += [("basis_history", {"target": each, "values": GRADED}) for each in TARGETS]
VARIANTS += [("spo", {"target": each, "normalize": each == "optimal"}) for each in TARGETS]
VARIANTS += [("bv_blend", {"target": each, "clusters": CLUSTERS}) for each in TARGETS]
VARIANTS += [("basis", {"target": each, "values": GRADED, "smoothing": 0.0}) for each in TARGETS]
GATED = [("ppo", {"lam": 0.9}), ("sao", {}), ("basis_history", {}), ("basis_history", {"target": "optimal_token"})]
GATED += [("spo", {}), ("spo", {"normalize": False}), ("basis", {"values": GRADED})]
VARIANTS += [(name, {**kwargs, "ev_gate": True}) for name, kwargs in GATED]
VARIANTS += [("pass_at_k", {"form": "leave_one_out"}), ("pass_at_k", {"k": 3})]
VARIANTS += [("spo", {"values": TABLE}), ("spo", {"normalize": False}), ("spo", {"values": GRADED, "forgetting": "kl"})]
VARIANTS += [("basis", {"values": TABLE, "weighting": "none", "calibration": each}) for each in ("none", "common")]
VARIANTS += [("otb", {"tail": "last"}), ("otb", {"max_rollout_weight": 1.5}), ("opo", {"form": "token"})]
VARIANTS += [("basis_history", {"values": values}) for values in (TABLE, GRADED)]
VARIANTS += [
    ("basis_history", {"belief": "beta", "lcb": 1.0}),
    ("basis_history", {"prior": "text"}),
    ("basis_history", {"belief": "gaussian"}),
    ("basis_history", {"belief": "gaussian", "values": GRADED}),
]
WEIGHTINGS = ("unb", "vop", "rvg")
CALIBRATIONS = ("common", "likelihood", "literal")
# Each two of the values of these four parameters meet.
VARIANTS += [
    ("basis", {"values": TABLE, "weighting": weighting, "calibration": calibration, "smoothing": 0.5})
    for weighting in WEIGHTINGS
    for calibration in CALIBRATIONS
]
VARIANTS += [
    ("basis", {"values": values, "weighting": weighting, "calibration": calibration, "smoothing": smoothing})
    for weighting, calibration in zip(WEIGHTINGS, CALIBRATIONS, strict=True)
    for values, smoothing in ((TABLE, 0.0), (GRADED, 0.5), (GRADED, 0.0))
]


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS, ids=lambda v: v if isinstance(v, str) else None)
def test_registered_baselines_conform(name, kwargs):
    def build():
        baseline = build_baseline(name, **kwargs)
        if isinstance(baseline, Basis):  # what is checked holds for any grid, and the whole one takes ten seconds
            baseline.betas = baseline.betas[::25]
            baseline.curve = torch.zeros_like(baseline.betas)
        return baseline

    assert len(check_baseline(build, IDS)) == 19


WITH_STATE = {"basis": {"values": TABLE, "target": "optimal"}, "bv_blend": {"clusters": CLUSTERS, "target": "optimal"}}
WITH_STATE |= {name: {"target": "optimal"} for name in ("basis_history", "spo", "batch_mean")}
WITH_STATE |= {"ebpo": {}}


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_state_does_not_change_with_the_objects_that_it_came_from_and_went_to(name):
    first, again = (build_baseline(name, **WITH_STATE[name]) for _ in range(2))
    batches = [example_batch(first, IDS, seed=step, step=step) for step in range(2)]
    first.update(batches[0])
    state = first.state_dict()
    kept = saved(first)
    again.load_state_dict(state)
    for baseline in (first, again):
        baseline.update(batches[1])
    assert saved(SimpleNamespace(state_dict=lambda: state)) == kept
    assert saved(first) == saved(again) != kept
