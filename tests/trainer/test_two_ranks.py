"""Two ranks on CPU under `accelerate launch`, a group across both: advantages are one rank's to the bit, losses too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from basis_rl.baselines import BASELINES, LearnedBaseline

ROOT = Path(__file__).resolve().parents[2]


def launch(ranks: int, output: Path, model: Path) -> list[tuple[dict, dict]]:
    output.mkdir()
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
    script = ["-m", "tests.trainer.straddling", str(output), str(model), str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), *script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CI": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_path):
    """What one rank found, and each of two: batches by baseline, and log and policy by loss."""
    folder = tmp_path_factory.mktemp("ranks")
    return launch(1, folder / "one", tiny_path)[0], launch(2, folder / "two", tiny_path)


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_ranks(runs):
    """What each loss logs, and where it leads: the mean over two ranks' tokens, not the mean of their means."""
    (_, one), two = runs
    assert len(one) == 4
    for name, expected in one.items():
        keys = {"k2": ["kl"], "k2 over all tokens": ["kl"], "gpg": ["kl"], "own": ["kl", "objective/outside"]}[name]
        for key in keys:
            logged = [row[key] for row in expected["log"] if key in row]
            assert len(logged) == 4
            assert max(logged) > 1e-3
            for _, rank in two:
                assert [row[key] for row in rank[name]["log"] if key in row] == pytest.approx(logged, rel=1e-3, abs=1e-5)
        for _, rank in two:
            for key, value in expected["policy"].items():
                torch.testing.assert_close(rank[name]["policy"][key], value, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_advantages_do_not_depend_on_the_number_of_ranks(runs):
    (one, _), two = runs
    assert set(one) == {*BASELINES, "tokenwise"}
    for name, batches in one.items():
        assert len(batches) == 2
        for step, expected in enumerate(batches):
            assert expected["group_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
            assert expected["rewards"].isnan().any()
            assert (expected["advantages"] != 0).any(), f"{name}: zeros would prove nothing"
            for rank, _ in two:
                for key, value in expected.items():
                    got = rank[name][step][key]
                    exact = not issubclass(BASELINES.get(name, object), LearnedBaseline)
                    if isinstance(value, list):
                        same = got == value
                    elif exact or key != "advantages":
                        same = torch.equal(got.nan_to_num(7), value.nan_to_num(7))
                    else:  # a module learns from gradients that are summed in another order
                        same = torch.allclose(got, value, rtol=0, atol=1e-4)
                    assert same, f"{name}, batch {step}: {key} differs between one rank and two"
