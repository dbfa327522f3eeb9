"""Signals that end a run in order, gradients that are not finite, a rank that dies."""

import fcntl
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from basis_rl.run import checkpoint
from basis_rl.run.errors import NonFiniteGradients, StopAsked, WeightsLost
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.faults import FiniteGradients, StopOnSignal, check_weights
from tests.support.ranks import ROOT, Launched, launch, output_of
from tests.support.tiny import tiny_trainer


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
    return tiny_trainer(folder, cls=Sabotaged, sabotage=sabotage, **{"max_steps": 6, **settings})


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(clip, tmp_path):
    """A finite step between two of them starts the count of those in a row anew."""
    trainer = build(tmp_path, {1: spoil, 3: spoil}, max_grad_norm=clip, weight_decay=0.1, max_nonfinite_steps=2)
    trainer.train()
    same = [
        all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
        for a, b in zip(trainer.weights, trainer.weights[1:], strict=False)
    ]
    assert same == [False, True, False, True, False]
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    logged = [row["gradient/skipped_steps"] for row in trainer.state.log_history if "gradient/skipped_steps" in row]
    assert logged == [1, 2]


def test_skipped_steps_are_counted_across_a_resume(tmp_path):
    """Both counts: a run that is resumed after two bad steps ends at the third, as the uninterrupted one would."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_nonfinite_steps": 3}
    build(tmp_path / "whole", dict.fromkeys((1, 2), spoil), max_steps=3, **settings).train()
    start = str(tmp_path / "whole" / "checkpoint-3")
    again = build(tmp_path / "again", {3: spoil}, **settings)
    with pytest.raises(NonFiniteGradients, match=r"3 steps in a row \(step 4 is the last\)"):
        again.train(resume_from_checkpoint=start)
    assert again._finite.skipped == 3
    assert all(bool(p.isfinite().all()) for p in again.model.parameters())


@pytest.mark.parametrize("rate", [1e30, 1e12])
def test_a_step_that_ruins_the_weights_is_named(rate, tmp_path):
    """By a schedule, which no check before the training can see; at that step, and not where the policy acts next."""

    def raise_rate(trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate

    trainer = build(tmp_path, {2: raise_rate}, save_strategy="steps", save_steps=1)
    with pytest.raises(
        WeightsLost, match=r"After step 3 the weights have a root mean square of (nan|inf|\d.*e\+\d\d)\. "
    ):
        trainer.train()
    assert checkpoint.newest(str(tmp_path)).name == "checkpoint-2", "the newest has the weights from before"


class Engine:
    """As DeepSpeed's: it has stepped before it tells the norm, or has left the step out."""

    def __init__(self, applied):
        self.parameter, self.applied = torch.nn.Parameter(torch.ones(2)), applied
        self.parameter.grad = torch.ones(2)

    def parameters(self):
        return [self.parameter]

    def was_step_applied(self):
        return self.applied


def test_what_deepspeed_tells_decides():
    for norm in (-1.0, 0.5, None):  # of a step that it left out; -1 as a rule
        counted = FiniteGradients(2)
        assert counted.keeps(Engine(applied=True), 1.0, 8)
        assert (counted.skipped, counted.in_a_row) == (0, 0)
        assert not counted.keeps(Engine(applied=False), norm, 8)
        assert (counted.skipped, counted.in_a_row) == (1, 1)
    engine = Engine(applied=True)
    assert counted.keeps(engine, math.nan, 8)
    engine.parameter.data[0] = math.nan  # as by gradients that are not finite, where it has applied them
    with pytest.raises(WeightsLost, match="After step 8"):
        check_weights(Accelerator(cpu=True), engine, 8)


@pytest.mark.parametrize("part", [[0.02, math.nan], [math.nan, 0.02]])
def test_of_a_weight_that_is_divided_the_padding_does_not_count(part, monkeypatch):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 1, bias=False)
    # Of three numbers the second rank of two has one, and a place that nothing is ever written to.
    vars(model.weight).update(ds_tensor=torch.tensor(part), ds_numel=3, ds_process_group=None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 1)
    with pytest.raises(WeightsLost) if math.isnan(part[0]) else nullcontext():
        check_weights(accelerator, model, 8)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_not_finite_drops_the_gradients(norm):
    counted = FiniteGradients(2)
    module = torch.nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    assert not counted.keeps(module, norm, 8)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert counted.keeps(module, None, 8)  # no clipping: nothing is known
    assert not counted.keeps(module, norm, 8)
    with pytest.raises(NonFiniteGradients, match="2 steps in a row"):
        counted.keeps(module, norm, 8)


def test_a_second_signal_kills_at_once_but_not_the_one_that_comes_twice(monkeypatch):
    stopping = StopOnSignal(SimpleNamespace())
    clock, killed = [100.0], []
    monkeypatch.setattr("basis_rl.trainer.faults.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("basis_rl.trainer.faults.os.kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr("basis_rl.trainer.faults.signal.signal", lambda number, handler: None)
    for clock[0] in (100.0, 101.0, 104.0):
        stopping._ask(signal.SIGTERM, None)
    assert killed == []
    clock[0] = 106.0
    stopping._ask(signal.SIGTERM, None)
    assert killed == [signal.SIGTERM]


def test_a_wait_is_interrupted_and_nothing_else(monkeypatch):
    stopping = StopOnSignal(SimpleNamespace())
    with stopping.interrupting():
        pass
    stopping._ask(signal.SIGTERM, None)  # outside of a wait it is remembered
    with pytest.raises(StopAsked), stopping.interrupting():
        raise AssertionError("waits although it was asked to stop")
    stopping.asked = None
    with pytest.raises(StopAsked), stopping.interrupting(), stopping.interrupting():
        stopping._ask(signal.SIGTERM, None)
    assert not stopping._interrupts
    stopping.asked = 1.0
    elsewhere = threading.Thread(target=lambda: stopping.interrupting().__enter__())
    elsewhere.start()
    elsewhere.join()
    assert not stopping._interrupts


@pytest.mark.parametrize("numbers", [[signal.SIGHUP], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM], []])
def test_a_signal_or_a_file_ends_the_run_with_a_checkpoint_and_the_script(numbers, tmp_path):
    """A signal that comes twice at once counts once, and a STOP file from before the run not at all."""
    stop, before = tmp_path / "STOP", list(map(signal.getsignal, numbers))

    def ask(trainer):
        for number in numbers:
            os.kill(os.getpid(), number)
        if not numbers:
            stop.touch()

    stop.touch()
    settings = {"save_strategy": "steps", "save_steps": 100}
    trainer = build(tmp_path, {2: ask}, **settings)
    raised = SystemExit if numbers and numbers[0] != signal.SIGINT else KeyboardInterrupt
    with pytest.raises(raised) as ended:
        trainer.train()
    assert ended.value.args == ((128 + numbers[0],) if raised is SystemExit else ())
    assert trainer.stop_on_signal.stopped
    assert trainer.state.global_step == 3
    assert checkpoint.newest(tmp_path).name == "checkpoint-3"
    assert not stop.exists()
    assert list(map(signal.getsignal, numbers)) == before
    again = build(tmp_path, None, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert not again.stop_on_signal.stopped


@pytest.mark.long
def test_a_closed_terminal_stops_a_run_with_a_checkpoint_and_nohup_outlasts_it(tmp_path, tiny_path):
    """The kernel sends SIGHUP, and each further output is an error (EIO)."""
    stopped, outlasting = tmp_path / "stopped", tmp_path / "outlasting"
    runs = [in_terminal([], stopped, tiny_path), in_terminal(["env", "--ignore-signal=HUP"], outlasting, tiny_path)]
    for terminal, _ in runs:
        said = b""
        while b"0 at" not in said:
            said += os.read(terminal, 4096)
        os.close(terminal)
    assert [process.wait(timeout=300) for _, process in runs] == [0, 0]
    # At the fourth step of forty it was closed.
    assert 4 <= int(checkpoint.newest(stopped).name.removeprefix("checkpoint-")) < 40
    assert checkpoint.newest(outlasting).name == "checkpoint-40"


def in_terminal(prefix, *arguments):
    """A run as the leader of a session in a terminal of its own, of which our end is returned."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.trainer.ill_fated", *map(str, arguments), "0", "0"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=partial(fcntl.ioctl, theirs, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    return ours, process


@pytest.mark.long
def test_ranks_agree_on_a_signal_that_one_of_them_got(tmp_path, tiny_path):
    """The second time the run goes on, in the middle of a generation batch, to its end."""
    for step in (4, 8):
        given = (tmp_path / "run", tiny_path, 1, "SIGUSR1")
        launched = Launched(tmp_path / f"log{step}", "tests.trainer.ill_fated", *given)
        launched.wait()
        assert f"rank 0 stopped at {step}" in launched.output()
        assert f"rank 1 stopped at {step}" in launched.output()
        assert checkpoint.newest(tmp_path / "run").name == f"checkpoint-{step}"
    assert {"rng_state_0.pth", "rng_state_1.pth", "phase_0.pt", "phase_1.pt"} <= {
        path.name for path in (tmp_path / "run" / "checkpoint-4").iterdir()
    }


@pytest.mark.long
def test_a_rank_that_dies_ends_the_others(tmp_path, tiny_path):
    output = output_of(launch("tests.trainer.ill_fated", tmp_path, tiny_path, 1, "SIGKILL"), fails=True)
    ended = time.monotonic()
    assert "rank 0 stopped" not in output
    killed = re.search(r"SIGKILL at (\d+\.\d+)", output)
    assert killed is not None, output[-3000:]
    assert ended - float(killed[1]) < 90
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "a process was left behind"  # each rank has a session of its own
