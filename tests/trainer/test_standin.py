"""The tests of trainers on a stand-in for an accelerator, where a tensor on the wrong device is an error, as on CUDA.

By hand: ``python -m pytest -p tests.support.standin.plugin tests/trainer/test_training.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.standin.device import compiler

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(compiler() is None, reason="the stand-in accelerator needs a C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the stand-in accelerator is built for Linux"),
]
# Mixed precision is in the last two.
CHOSEN = {
    "trainer": ["tests/trainer/test_training.py"],
    "selection": ["tests/trainer/test_selection.py"],
    "resume": ["tests/trainer/test_resume.py"],
    "tools": ["tests/trainer/test_tools.py"],
    "critic and evaluation": ["tests/trainer/test_critic.py", "tests/trainer/test_evaluating.py"],
    "packing": ["tests/trainer/test_packed_rows.py"],
    "calls of a GPU's kernels": ["tests/trainer/test_kernel_calls.py", "tests/engine/test_nccl_calls.py"],
    "energies": ["tests/trainer/test_energies.py", "tests/device/test_on_device.py"],
}


def on_standin(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: torch cannot give a device type back."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "BASIS_TEST_"))}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("what", CHOSEN)
def test_trainers_on_an_accelerator(what: str) -> None:
    options = ["-q", "-p", "tests.support.standin.plugin", "-p", "no:cacheprovider", "-m", "not long and not nightly"]
    done = on_standin("-m", "pytest", *options, *CHOSEN[what])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


def test_an_operator_of_a_trainer_on_two_devices_fails_its_test(tmp_path: Path) -> None:
    """Else the tests above would prove nothing: a baseline that puts the advantages on the CPU."""
    (tmp_path / "test_broken.py").write_text(BROKEN)
    options = ["-q", "-p", "tests.support.standin.plugin", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    done = on_standin("-m", "pytest", *options, "-c", str(ROOT / "pyproject.toml"), str(tmp_path))
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    assert "Expected all tensors to be on the same device" in done.stdout


BROKEN = """
from basis_rl.trainer import BasisTrainer
from tests.support.tiny import tiny_trainer


class Broken(BasisTrainer):
    def _advantages(self, inputs, output):
        return super()._advantages(inputs, output).cpu()


def test_broken(tmp_path):
    tiny_trainer(tmp_path, "rloo", Broken, max_steps=1).train()
"""
