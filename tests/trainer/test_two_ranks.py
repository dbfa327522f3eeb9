"""Two ranks on CPU under `accelerate launch`, a group across both: the advantages are one rank's to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from basis_rl.baselines import BASELINES, LearnedBaseline

ROOT = Path(__file__).resolve().parents[2]


def launch(ranks: int, output: Path, model: Path) -> list[dict]:
    output.mkdir()
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
    script = ["-m", "tests.trainer.straddling", str(output), str(model), str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), *script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CI": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.mark.slow
def test_advantages_do_not_depend_on_the_number_of_ranks(tmp_path, tiny_path):
    (one,) = launch(1, tmp_path / "one", tiny_path)
    two = launch(2, tmp_path / "two", tiny_path)
    assert set(one) == {*BASELINES, "tokenwise"}
    for name, batches in one.items():
        assert len(batches) == 2
        for step, expected in enumerate(batches):
            assert expected["group_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
            assert expected["rewards"].isnan().any()
            assert (expected["advantages"] != 0).any(), f"{name}: zeros would prove nothing"
            for rank in two:
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
