"""What does each fault cost? Injected at random moments into real runs.

    python -m benchmarks.faults [REPEATS] [FAULT ...]

A model of 0.4M parameters, two CPU cores, checkpoints every 3 steps. "Lost" are optimizer steps before the
last checkpoint that was due and yet had to be done again; "wrong" counts runs whose final weights are not those of the
uninterrupted run (transformers generation: to the bit), or that trained on samples of other weights than the policy's
(vLLM: ``rollout/kl`` above 1e-6, since its sampling is not repeatable).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from basis_rl.rollout.server import Server
from basis_rl.trainer import checkpoint
from benchmarks.common import RESULTS, save
from tests.support.served import save_model, server

STEPS, SAVE_EVERY = 24, 3
Outcome = dict[str, Any]


class Run:
    """One `benchmarks.faults_run` process, or several ranks of it, and how far it has come."""

    def __init__(self, folder: Path, model: Path, url: str | None = None, ranks: int = 1, **settings: Any) -> None:
        self.folder = folder
        launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
        given = json.dumps({"url": url, "steps": STEPS, "save_every": SAVE_EVERY, **settings})
        command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "benchmarks.faults_run"]
        self.log = open(folder.with_suffix(".log"), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, str(folder), str(model), given], stdout=self.log, stderr=self.log, start_new_session=True
        )

    def step(self) -> int:
        """The last whole optimizer step."""
        path = self.folder / "step"
        return int(path.read_text() or 0) if path.is_file() else 0

    def until(self, step: float) -> None:
        """Wait for a moment between two steps: 7.3 is some time after step 7."""
        while self.step() < int(step) and self.process.poll() is None:
            time.sleep(0.005)
        time.sleep((step % 1) * 0.2)

    def newest(self) -> int:
        found = checkpoint.newest(self.folder)
        return int(found.name.split("-")[1]) if found else 0

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def done(self, timeout: float = 300.0) -> int:
        code = self.process.wait(timeout)
        self.log.close()
        return code

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "final" / "model.safetensors")

    def log_of(self, key: str) -> list[float]:
        history = json.loads((self.folder / "history.json").read_text())
        return [row[key] for row in history if key in row]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all weights agree to the bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


def resumed(folder: Path, model: Path, expected: dict[str, torch.Tensor], ranks: int = 1) -> Outcome:
    """Go on from the newest whole checkpoint and compare with the uninterrupted run."""
    again = Run(folder, model, ranks=ranks)
    code = again.done()
    return {"resumed": code == 0, "wrong": code != 0 or not same(expected, again.weights())}


def trainer_killed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL at step `moment`, at any point within it."""
    run = Run(folder, model)
    run.until(moment)
    run.kill()
    whole, at = run.newest(), run.step()
    return {"lost": max(0, at - whole - SAVE_EVERY), "since checkpoint": at - whole, **resumed(folder, model, expected)}


def killed_while_saving(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL as soon as the next checkpoint is begun, some milliseconds in."""
    run = Run(folder, model)
    run.until(int(moment))
    before = set(checkpoint.checkpoints(folder))
    while not set(checkpoint.checkpoints(folder)) - before and run.process.poll() is None:
        time.sleep(0.0005)
    time.sleep((moment % 1) * 0.03)
    run.kill()
    cut = [path for path in checkpoint.checkpoints(folder) if not checkpoint.is_complete(path)]
    return {
        "cut off": len(cut),
        "lost": max(0, run.step() - run.newest() - SAVE_EVERY),
        **resumed(folder, model, expected),
    }


def stop_signal(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGTERM at step `moment`: the trainer is to end in order, with a checkpoint."""
    run = Run(folder, model)
    run.until(moment)
    run.process.send_signal(signal.SIGTERM)
    code = run.done()
    return {"exit code": code, "lost": run.step() - run.newest(), **resumed(folder, model, expected)}


def rank_killed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL of one of two ranks: the other is to end too."""
    run = Run(folder, model, ranks=2)
    run.until(moment)
    victim = int((folder / "pid1").read_text())
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    code = run.done()
    ended = time.monotonic() - start
    whole, at = run.newest(), run.step()
    outcome = {"others ended after": round(ended, 1), "exit code": code, "lost": max(0, at - whole - SAVE_EVERY)}
    return {**outcome, **resumed(folder, model, expected, ranks=2)}


def gradients_spoilt(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """A NaN in the gradient of step `moment`: its update is to be left out."""
    run = Run(folder, model, spoil=int(moment))
    code = run.done()
    finite = all(bool(value.isfinite().all()) for value in run.weights().values())
    return {"skipped": run.log_of("gradient/skipped_steps"), "lost": 0, "wrong": code != 0 or not finite}


def _served(run: Run, code: int) -> Outcome:
    errors, kl = run.log_of("rollout/sync_error"), run.log_of("rollout/kl")
    wrong = code != 0 or len(kl) != STEPS or max(kl) > 1e-6 or max(errors) > 1e-3
    return {"lost": 0, "wrong": wrong, "largest sync error": max(errors), "largest kl": max(kl)}


def server_killed(folder: Path, model: Path, moment: float, running: list[Server]) -> Outcome:
    """The generation server dies and is back some seconds later: the run is to go on."""
    run = Run(folder, model, running[-1].url)
    run.until(moment)
    os.killpg(running[-1].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    running[-1].stop()
    start = time.monotonic()
    running.append(server(model, folder.with_suffix(".server.log"), running[-1].port).start())
    seconds = time.monotonic() - start
    return {"server back after": round(seconds, 1), **_served(run, run.done())}


def server_frozen(folder: Path, model: Path, moment: float, running: list[Server]) -> Outcome:
    """The generation server stands still for longer than a request may take."""
    run = Run(folder, model, running[-1].url, request_timeout=3.0)
    run.until(moment)
    group = running[-1].process.pid  # type: ignore[union-attr]
    os.killpg(group, signal.SIGSTOP)
    time.sleep(6.0)
    os.killpg(group, signal.SIGCONT)
    return _served(run, run.done())


def server_gone(folder: Path, model: Path, moment: float, running: list[Server]) -> Outcome:
    """The generation server stays away: the run is to end in order, and to go on when started again."""
    run = Run(folder, model, running[-1].url, recovery_timeout=3.0)
    run.until(moment)
    os.killpg(running[-1].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    running[-1].stop()
    code = run.done()
    lost = run.step() - run.newest()
    running.append(server(model, folder.with_suffix(".server.log"), running[-1].port).start())
    again = Run(folder, model, running[-1].url)
    return {"exit code": code, **_served(again, again.done()), "lost": lost}


ALONE = (trainer_killed, killed_while_saving, stop_signal, gradients_spoilt)
SERVED = (server_killed, server_frozen, server_gone)


def main() -> None:
    """Measure, print and save."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    chosen = sys.argv[2:] or [fault.__name__ for fault in (*ALONE, rank_killed, *SERVED)]
    os.environ["OMP_NUM_THREADS"] = "1"
    draw = random.Random(0)
    results: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        model = save_model(root / "model", tied=True)

        def whole(ranks: int) -> dict[str, torch.Tensor]:
            run = Run(root / f"whole{ranks}", model, ranks=ranks)
            assert run.done() == 0, run.folder.with_suffix(".log").read_text()[-3000:]
            return run.weights()

        def inject(faults: Sequence[Callable[..., Outcome]], prepare: Callable[[], Any]) -> None:
            faults = [fault for fault in faults if fault.__name__ in chosen]
            state = prepare() if faults else None
            for fault in faults:
                name = fault.__name__.replace("_", " ")
                results[name] = []
                for i in range(repeats):
                    moment = draw.uniform(2, STEPS - 4)
                    outcome = {"moment": round(moment, 2), **fault(root / f"{fault.__name__}{i}", model, moment, state)}
                    results[name].append(outcome)
                    print(f"{name}: {outcome}", flush=True)

        running: list[Server] = []

        def first_server() -> list[Server]:
            running.append(server(model, root / "server.log").start())
            return running

        inject(ALONE, lambda: whole(1))
        inject((rank_killed,), lambda: whole(2))
        try:
            inject(SERVED, first_server)
        finally:
            for one in running:
                one.stop()
    report(results)


def report(results: dict[str, list[Outcome]]) -> None:
    """Print the table and save it, beside the outcomes of other faults that were measured before."""
    path = RESULTS / "faults.json"
    before = json.loads(path.read_text())["results"] if path.is_file() else {}
    for name, outcomes in results.items():
        lost, wrong = sum(o["lost"] for o in outcomes), sum(o["wrong"] for o in outcomes)
        print(f"{name:20} {len(outcomes)} times, lost before the last checkpoint: {lost}, wrong: {wrong}")
    save("faults", {"results": {**before, **results}})


if __name__ == "__main__":
    main()
