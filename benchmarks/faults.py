"""What does each fault cost a run?

    python -m benchmarks.faults [REPEATS [FAULT ...]] [--soak KILLS] [--quick]

Faults are injected at random moments into real runs of a model of 0.4M parameters on two CPU cores, with a checkpoint
every 3 steps. "Lost" is the number of optimizer steps before the last due checkpoint that had to be repeated. "Wrong"
is the number of runs whose final weights are not bit-identical to those of the uninterrupted run (transformers
generation), or that trained on rollouts sampled with other weights than the policy's (vLLM: ``rollout/kl`` above 1e-6,
since its sampling is not repeatable).

With ``--soak`` only this: so many kills at random moments, in turn over nineteen configurations of a smaller model
(baselines with state, a critic, prompt samplers, several passes, accumulation, ``async_prefetch``, pushes to an
endpoint of our own, two ranks, FSDP2), each run forked from one warm process. "Wrong" is there also a repository that
lacks something in the end, or had a checkpoint by halves.

Results: ``benchmarks/results/faults.json``.
"""

from __future__ import annotations

import argparse
import datetime
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

from basis_rl.engine.server import Server
from basis_rl.run import checkpoint
from basis_rl.run.errors import ServerLost
from basis_rl.trainer import BasisTrainer
from benchmarks.common import RESULTS, one_thread, parser_of, save
from benchmarks.fault_soak import CONFIGURATIONS, Told, soak
from tests.support.served import save_model, server, trainer
from tests.trainer.test_state import RunningMean

STEPS, SAVE_EVERY = 24, 3
Outcome = dict[str, Any]


class Spoilt(BasisTrainer):
    """A trainer that makes the gradient of one step non-finite."""

    at = -1

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == self.at:
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
        return loss


def disturbed(folder: Path, model: Path, given: dict[str, Any]) -> int:
    """Train in the process that receives the fault, with the settings `given`, and return its exit code.

    It resumes if there is a checkpoint, and writes step, log and weights into `folder`.
    """
    one_thread()
    folder.mkdir(parents=True, exist_ok=True)
    served = {
        "use_vllm": given["url"] is not None,
        "vllm_request_timeout": given.get("request_timeout", 60.0),
        "vllm_recovery_timeout": given.get("recovery_timeout", 200.0),
    }
    trained = trainer(
        folder,
        model,
        given["url"],
        RunningMean(),
        Spoilt,
        num_generations=2,
        steps_per_generation=2 if given["url"] is None else 1,
        max_completion_length=48,
        max_steps=given["steps"],
        save_strategy="steps",
        save_steps=given["save_every"],
        save_total_limit=2,
        **served,
    )
    trained.at = given.get("spoil", -1)
    trained.add_callback(Told())
    (folder / f"pid{trained.accelerator.process_index}").write_text(str(os.getpid()))
    try:
        trained.train(resume_from_checkpoint="auto")
    except ServerLost:
        return 69
    if trained.stop_on_signal.stopped:
        return 75
    trained.save_model(str(folder / "final"))
    if trained.accelerator.is_main_process:
        (folder / "history.json").write_text(json.dumps(trained.state.log_history))
    return 0


class Run:
    """One process or several ranks of `disturbed`, and its progress."""

    def __init__(self, folder: Path, model: Path, url: str | None = None, ranks: int = 1, **settings: Any) -> None:
        self.folder = folder
        launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
        given = json.dumps({"url": url, "steps": STEPS, "save_every": SAVE_EVERY, **settings})
        command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "benchmarks.faults", "--run"]
        self.log = open(folder.with_suffix(".log"), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, str(folder), str(model), given], stdout=self.log, stderr=self.log, start_new_session=True
        )

    def step(self) -> int:
        """The last completed optimizer step."""
        path = self.folder / "step"
        return int(path.read_text() or 0) if path.is_file() else 0

    def until(self, step: float) -> None:
        """Wait for a moment between two steps; 7.3 is shortly after step 7."""
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
    """Resume from the newest complete checkpoint and compare with the uninterrupted run."""
    again = Run(folder, model, ranks=ranks)
    code = again.done()
    return {"resumed": code == 0, "wrong": code != 0 or not same(expected, again.weights())}


def trainer_killed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL at `moment`, at any point within a step."""
    run = Run(folder, model)
    run.until(moment)
    run.kill()
    whole, at = run.newest(), run.step()
    return {"lost": max(0, at - whole - SAVE_EVERY), "since checkpoint": at - whole, **resumed(folder, model, expected)}


def killed_while_saving(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL some milliseconds after the next checkpoint was begun."""
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
    """SIGTERM at `moment`: the trainer must end normally, with a checkpoint."""
    run = Run(folder, model)
    run.until(moment)
    run.process.send_signal(signal.SIGTERM)
    code = run.done()
    return {"exit code": code, "lost": run.step() - run.newest(), **resumed(folder, model, expected)}


def rank_killed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL of one of two ranks: the other must end as well."""
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
    """A NaN in the gradient of step `moment`: its update must be skipped."""
    run = Run(folder, model, spoil=int(moment))
    code = run.done()
    finite = all(bool(value.isfinite().all()) for value in run.weights().values())
    return {"skipped": run.log_of("gradient/skipped_steps"), "lost": 0, "wrong": code != 0 or not finite}


def _served(run: Run, code: int) -> Outcome:
    errors, kl = run.log_of("rollout/sync_error"), run.log_of("rollout/kl")
    wrong = code != 0 or len(kl) != STEPS or max(kl) > 1e-6 or max(errors) > 1e-3
    return {"lost": 0, "wrong": wrong, "largest sync error": max(errors), "largest kl": max(kl)}


def server_killed(folder: Path, model: Path, moment: float, running: list[Server]) -> Outcome:
    """The generation server dies and is restarted some seconds later: the run must continue."""
    run = Run(folder, model, running[-1].url)
    run.until(moment)
    os.killpg(running[-1].process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    running[-1].stop()
    start = time.monotonic()
    running.append(server(model, folder.with_suffix(".server.log"), running[-1].port).start())
    seconds = time.monotonic() - start
    return {"server back after": round(seconds, 1), **_served(run, run.done())}


def server_frozen(folder: Path, model: Path, moment: float, running: list[Server]) -> Outcome:
    """The generation server is frozen for longer than a request may take."""
    run = Run(folder, model, running[-1].url, request_timeout=3.0)
    run.until(moment)
    group = running[-1].process.pid  # type: ignore[union-attr]
    os.killpg(group, signal.SIGSTOP)
    time.sleep(6.0)
    os.killpg(group, signal.SIGCONT)
    return _served(run, run.done())


def server_gone(folder: Path, model: Path, moment: float, running: list[Server]) -> Outcome:
    """The generation server does not return: the run must end normally, and resume when it is started again."""
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
FAULTS = (*ALONE, rank_killed, *SERVED)


def main(argv: list[str] | None = None) -> dict[str, list[Outcome]]:
    """Run the benchmark; returns the outcomes of each fault."""
    parser = parser_of(__doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=5, help="of each fault (5)")
    parser.add_argument("faults", nargs="*", default=[fault.__name__ for fault in FAULTS], help="all by default")
    parser.add_argument("--soak", type=int, metavar="KILLS", help="kills over many configurations, and nothing else")
    parser.add_argument("--configurations", nargs="+", choices=list(CONFIGURATIONS), help="of the soak; all by default")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)  # of `Run`: folder, model, settings
    options = parser.parse_args(argv)
    if options.run:
        sys.exit(disturbed(Path(options.run[0]), Path(options.run[1]), json.loads(options.run[2])))
    if options.quick:
        options.repeats, options.faults = 1, ["stop_signal"]
    results: dict[str, list[Outcome]] = {}
    if options.soak:
        one_thread()
        with tempfile.TemporaryDirectory() as temporary:
            for soaked in soak(options.soak, Path(temporary), names=options.configurations):
                results = {f"soak: {name}": outcomes for name, outcomes in soaked.items()}
                if not options.quick:
                    keep(results)
    else:
        results = measure(options.repeats, options.faults)
        if not options.quick:
            keep(results)
    for name, outcomes in results.items():
        lost, wrong = sum(o["lost"] for o in outcomes), sum(o["wrong"] for o in outcomes)
        print(f"{name:20} {len(outcomes)} times, lost before the last checkpoint: {lost}, wrong: {wrong}")
    return results


def keep(results: dict[str, list[Outcome]]) -> None:
    """Write them beside the outcomes of other faults that were measured before."""
    path = RESULTS / "faults.json"
    before = json.loads(path.read_text()) if path.is_file() else {"results": {}, "date": None}
    measured = before.get("measured", dict.fromkeys(before["results"], before["date"]))
    measured |= dict.fromkeys(results, datetime.date.today().isoformat())
    save("faults", {"measured": measured, "results": {**before["results"], **results}})


def measure(repeats: int, chosen: Sequence[str]) -> dict[str, list[Outcome]]:
    """Inject each of the `chosen` faults `repeats` times at random moments."""
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
    return results


if __name__ == "__main__":
    main()
