"""Signals that end a run in order, gradients that are not finite, a rank that dies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basis_rl.trainer import BasisTrainer, checkpoint
from basis_rl.trainer.errors import NonFiniteGradients, RequestRefused, RolloutError
from basis_rl.trainer.rollouts.client import Client, as_error
from tests.support.tiny import config, parity_reward, sums, tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("status", [400, 404, 408, 413, 429, 500, 503])
def test_only_what_would_fail_each_time_is_the_requests_fault(status):
    error = as_error(Exception(f"Request failed: {status}, of some reason"))
    assert isinstance(error, RequestRefused if status in (400, 404, 413) else RolloutError)


@pytest.mark.parametrize(("said", "unknown"), [("Request failed: 404, Not Found", True), ("port=10404 refused", False)])
def test_a_server_without_our_extension_is_told_from_one_that_is_away(said, unknown):
    client = object.__new__(Client)
    client.base_url, client.settings = "http://127.0.0.1:10404", SimpleNamespace(request_timeout=1.0)

    def post(*args, **kwargs):
        raise ConnectionError(said)

    client._post = post
    with pytest.raises(RolloutError if unknown else ConnectionError, match="does not know" if unknown else "refused"):
        client.rpc("basis_identity")


class Sabotaged(BasisTrainer):
    """Something happens after the backward pass of given steps; keeps the weights before and after each step."""

    def __init__(self, *args, sabotage=None, **kwargs):
        self.sabotage, self.weights = sabotage or {}, []
        super().__init__(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        if self.state.global_step == len(self.weights):
            self.weights.append([p.detach().clone() for p in self.model.parameters()])
        loss = super().training_step(*args, **kwargs)
        act = self.sabotage.get(self.state.global_step)
        if act is not None:
            act(self)
        return loss


def spoil(trainer):
    next(trainer.model.parameters()).grad[0, 0] = torch.nan


def build(folder, sabotage, **settings):
    tokenizer = tiny_tokenizer()
    return Sabotaged(
        model=tiny_model(tokenizer),
        reward_funcs=parity_reward,
        args=config(folder, **{"max_steps": 6, **settings}),
        train_dataset=sums(),
        processing_class=tokenizer,
        baseline="rloo",
        sabotage=sabotage,
    )


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(clip, tmp_path):
    trainer = build(tmp_path, {1: spoil, 3: spoil}, max_grad_norm=clip, weight_decay=0.1)
    trainer.train()
    same = [
        all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
        for a, b in zip(trainer.weights, trainer.weights[1:], strict=False)
    ]
    assert same == [False, True, False, True, False]
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert [row["gradient/skipped_steps"] for row in trainer.state.log_history if "gradient/skipped_steps" in row] == [
        1,
        2,
    ]


def test_many_in_a_row_end_the_run_and_leave_good_weights(tmp_path):
    trainer = build(tmp_path, dict.fromkeys(range(2, 9), spoil), max_nonfinite_steps=3, max_steps=9)
    with pytest.raises(NonFiniteGradients, match=r"3 steps in a row \(step 5 is the last\)"):
        trainer.train()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_a_checkpoint(number, tmp_path):
    before = signal.getsignal(number)
    settings = {"save_strategy": "steps", "save_steps": 100}
    trainer = build(tmp_path, {2: lambda t: os.kill(os.getpid(), number)}, **settings)
    trainer.train()
    assert trainer.stop_on_signal.stopped
    assert trainer.state.global_step == 3
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"
    assert signal.getsignal(number) is before
    again = build(tmp_path, None, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert not again.stop_on_signal.stopped


def test_a_signal_that_comes_twice_at_once_counts_once_and_an_old_stop_file_not_at_all(tmp_path):
    def twice(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "STOP").touch()
    trainer = build(tmp_path, {2: twice}, save_strategy="steps", save_steps=100)
    trainer.train()
    assert trainer.state.global_step == 3
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"


def test_a_file_ends_the_run_with_a_checkpoint_and_is_removed(tmp_path):
    stop = tmp_path / "STOP"
    trainer = build(tmp_path, {2: lambda t: stop.touch()}, save_strategy="steps", save_steps=100)
    trainer.train()
    assert trainer.stop_on_signal.stopped
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"
    assert not stop.exists()


def launch(output, model, who, what):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    launcher += ["--num_processes", "2", "--main_process_port", "0", "-m", "tests.trainer.ill_fated"]
    return subprocess.Popen(
        [*launcher, str(output), str(model), str(who), what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_ranks_agree_on_a_signal_that_one_of_them_got(tmp_path, tiny_path):
    process = launch(tmp_path, tiny_path, 1, "SIGUSR1")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    assert "rank 0 stopped at 4" in output
    assert "rank 1 stopped at 4" in output
    assert checkpoint.newest(tmp_path).name == "checkpoint-4"
    assert {"rng_state_0.pth", "rng_state_1.pth", "phase_0.pt", "phase_1.pt"} <= {
        path.name for path in (tmp_path / "checkpoint-4").iterdir()
    }

    again = launch(tmp_path, tiny_path, 1, "SIGUSR1")  # goes on in the middle of a generation batch
    output, _ = again.communicate(timeout=600)
    assert again.returncode == 0, output[-3000:]
    assert "rank 0 stopped at 8" in output
    assert "rank 1 stopped at 8" in output


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path, tiny_path):
    process = launch(tmp_path, tiny_path, 1, "SIGKILL")
    output, _ = process.communicate(timeout=600)
    ended = time.monotonic()
    assert process.returncode != 0
    assert "rank 0 stopped" not in output
    killed = re.search(r"SIGKILL at (\d+\.\d+)", output)
    assert killed is not None, output[-3000:]
    assert ended - float(killed[1]) < 90
    left = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "a process was left behind"
