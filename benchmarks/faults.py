"""What does each fault cost a run?

    python -m benchmarks.faults [REPEATS [FAULT ...]] [--soak KILLS] [--quick]

Faults are injected at random moments into real runs of a model of 0.4M parameters on two CPU cores, with a checkpoint
every 3 steps. "Lost" is the number of optimizer steps before the last due checkpoint that had to be repeated. "Wrong"
is the number of runs whose final weights are not bit-identical to those of the uninterrupted run (transformers
generation), or that trained on rollouts sampled with other weights than the policy's (vLLM: ``rollout/kl`` above 1e-6,
since its sampling is not repeatable).

With ``--soak`` it kills runs of a smaller model instead, so many times, at random moments and in turn over
configurations: baselines with state, a critic, prompt samplers, several passes, accumulation, ``rollouts: stream``,
pushes to an endpoint of our own, two ranks, FSDP2. All runs are forked from one process that has imported everything.
"Wrong" is then also a repository that lacks something in the end, or that had an incomplete checkpoint. Which rollouts
of a stream end first depends on the moment, so its end is not compared to the bit: there "wrong" is a run that does not
train on each place of each block of prompts exactly once, or on a rollout that is older than `max_staleness`.

Results: ``benchmarks/results/faults.json``.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import TrainerCallback

from basis_rl.baselines import Ppo
from basis_rl.engine.server import Server, free_port
from basis_rl.run import checkpoint
from basis_rl.run.errors import DiskFull, ServerLost
from basis_rl.tools import calculator
from basis_rl.trainer import BasisTrainer, turns
from basis_rl.trainer.critic import whole_tensor
from benchmarks.common import RESULTS, one_thread, parser_of, save
from examples.quickstart.warm_start import save as save_tiny_model
from tests.support.fake_vllm import ModelServer
from tests.support.hub_endpoint import HubEndpoint
from tests.support.served import save_model, server, trainer
from tests.support.tiny import config, named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer
from tests.support.tooled import by_rule, few_tokens
from tests.support.tooled import tokenizer as tool_tokenizer
from tests.trainer.sharded import OnCpus
from tests.trainer.test_state import RunningMean

STEPS, SAVE_EVERY = 24, 3
Outcome = dict[str, Any]


class StepFile(TrainerCallback):
    """Writes the number of the last completed step to a file, which the process that injects the fault reads."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            part = Path(args.output_dir) / "step.part"
            with suppress(FileNotFoundError):  # of a folder that is removed
                part.write_text(str(state.global_step))
                part.rename(part.with_name("step"))


def step_of(folder: Path) -> int:
    """The last completed optimizer step of a run."""
    return int((folder / "step").read_text()) if (folder / "step").is_file() else 0


def saved_step_of(folder: Path) -> int:
    """The step of the newest complete checkpoint of a run."""
    newest = checkpoint.newest(folder)
    return int(newest.name.split("-")[1]) if newest else 0


class Spoilt(BasisTrainer):
    """A trainer that makes the gradient of one step non-finite."""

    at = -1

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == self.at:
            next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.nan
        return loss


def disturbed(folder: Path, model: Path, url: Any, spoil: int = -1, **settings: Any) -> int:
    """Train in the process that receives the fault, and return its exit code.

    It resumes if there is a checkpoint, and writes step, log and weights into `folder`.
    """
    one_thread()
    folder.mkdir(parents=True, exist_ok=True)
    served = {"use_vllm": url is not None, "vllm_request_timeout": 60.0, "vllm_recovery_timeout": 200.0}
    saving = {"save_strategy": "steps", "save_steps": SAVE_EVERY, "save_total_limit": 2}
    trained = trainer(
        folder, model, url, RunningMean(), Spoilt, num_generations=2, steps_per_generation=2 if url is None else 1,
        max_completion_length=48, max_steps=STEPS, **{**saving, **served, **settings},
    )  # fmt: skip
    trained.at = spoil
    trained.add_callback(StepFile())
    (folder / f"pid{trained.accelerator.process_index}").write_text(str(os.getpid()))
    try:
        trained.train(resume_from_checkpoint="auto")
    except ServerLost:
        return 69
    except DiskFull as error:
        print(error, flush=True)
        return 70
    except SystemExit:
        return 75
    trained.save_model(str(folder / "final"))
    if trained.accelerator.is_main_process:
        (folder / "history.json").write_text(json.dumps(trained.state.log_history))
    return 0


class Run:
    """One process or several ranks of `disturbed`."""

    def __init__(self, folder: Path, model: Path, url: str | None = None, ranks: int = 1, **settings: Any) -> None:
        self.folder = folder
        launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
        given = [str(folder), str(model), json.dumps({"url": url, **settings})]
        command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "benchmarks.faults", "--run", *given]
        with folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def until(self, step: float) -> None:
        """Wait for a moment between two steps; 7.3 is shortly after step 7."""
        while step_of(self.folder) < int(step) and self.process.poll() is None:
            time.sleep(0.005)
        time.sleep((step % 1) * 0.2)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def done(self) -> int:
        """The exit code, once the run has ended."""
        return self.process.wait(300.0)

    def since_checkpoint(self) -> int:
        """The number of steps after the newest complete checkpoint."""
        return step_of(self.folder) - saved_step_of(self.folder)

    def lost(self) -> int:
        """The number of steps before the last due checkpoint that must be repeated."""
        return max(0, self.since_checkpoint() - SAVE_EVERY)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "final" / "model.safetensors")

    def log_of(self, key: str) -> list[float]:
        history = json.loads((self.folder / "history.json").read_text())
        return [row[key] for row in history if key in row]


def resumed(folder: Path, model: Path, expected: dict[str, torch.Tensor], ranks: int = 1) -> Outcome:
    """Resume from the newest complete checkpoint, and compare the weights with the uninterrupted run's to the bit."""
    again = Run(folder, model, ranks=ranks)
    code = again.done()
    same = code == 0 and all(torch.equal(value, again.weights()[name]) for name, value in expected.items())
    return {"resumed": code == 0, "wrong": not same}


def trainer_killed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL at `moment`, at any point within a step."""
    run = Run(folder, model)
    run.until(moment)
    run.kill()
    found = {"lost": run.lost(), "since checkpoint": run.since_checkpoint()}
    return {**found, **resumed(folder, model, expected)}


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
    found = {"cut off": len(cut), "lost": run.lost()}
    return {**found, **resumed(folder, model, expected)}


def killed_before_saving(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL after an optimizer step and before the checkpoint that is due then."""
    run = Run(folder, model)
    run.until(SAVE_EVERY * (1 + int(moment) // SAVE_EVERY))
    run.kill()
    found = {"lost": run.lost(), "since checkpoint": run.since_checkpoint()}
    return {**found, **resumed(folder, model, expected)}


def disk_full(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """The run's disk, one of its own, is filled at `moment`: it must end by itself with one line, and be resumed when
    there is room."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        return {"left out": "no disk may be mounted here", "lost": 0, "wrong": False}
    try:
        run = Run(folder, model)
        run.until(moment)
        with suppress(OSError), (folder / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        code, said = run.done(), folder.with_suffix(".log").read_text()
        found = {"exit code": code, "named": "is full" in said, "lost": run.lost()}
        (folder / "filler").unlink()
        again = resumed(folder, model, expected)
        return {**found, **again, "wrong": again["wrong"] or code != 70 or "Traceback" in said}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def folder_removed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """The run's folder is removed at `moment`: it must end by itself with one line, and leave no checkpoint there."""
    run = Run(folder, model)
    run.until(moment)
    folder.rename(folder.with_name(f"{folder.name} moved"))
    code, said = run.done(), folder.with_suffix(".log").read_text()
    wrong = code != 70 or "was removed or renamed" not in said or "Traceback" in said
    wrong = wrong or any(checkpoint.is_complete(each) for each in checkpoint.checkpoints(folder))
    # Of a checkpoint that was being written.
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f"{folder.name} moved").rename(folder)
    found = {"exit code": code, "lost": run.lost(), **resumed(folder, model, expected)}
    return {**found, "wrong": found["wrong"] or wrong}


def stop_signal(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGTERM at `moment`: the trainer must end normally, with a checkpoint."""
    run = Run(folder, model)
    run.until(moment)
    run.process.send_signal(signal.SIGTERM)
    found = {"exit code": run.done(), "lost": run.since_checkpoint()}
    return {**found, **resumed(folder, model, expected)}


def rank_killed(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """SIGKILL of one of two ranks: the other must end as well."""
    run = Run(folder, model, ranks=2)
    run.until(moment)
    os.kill(int((folder / "pid1").read_text()), signal.SIGKILL)
    start = time.monotonic()
    code = run.done()
    found = {"others ended after": round(time.monotonic() - start, 1), "exit code": code, "lost": run.lost()}
    return {**found, **resumed(folder, model, expected, ranks=2)}


def gradients_spoilt(folder: Path, model: Path, moment: float, expected: Any) -> Outcome:
    """A NaN in the gradient of step `moment`: its update must be skipped."""
    run = Run(folder, model, spoil=int(moment))
    code = run.done()
    finite = all(bool(value.isfinite().all()) for value in run.weights().values())
    return {"skipped": run.log_of("gradient/skipped_steps"), "lost": 0, "wrong": code != 0 or not finite}


def outcome_of(run: Run) -> Outcome:
    """Whether a run with a server trained on rollouts that its own weights had sampled, to its end."""
    code = run.done()
    errors, kl = run.log_of("rollout/sync_error"), run.log_of("rollout/kl")
    wrong = code != 0 or len(kl) != STEPS or max(kl) > 1e-6 or max(errors) > 1e-3
    return {"lost": 0, "wrong": wrong, "largest sync error": max(errors), "largest kl": max(kl)}


def kill_server(running: Server) -> None:
    os.killpg(running.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    running.stop()


def server_killed(folder: Path, model: Path, moment: float, running: Server) -> Outcome:
    """The generation server dies and is restarted some seconds later: the run must continue."""
    run = Run(folder, model, running.url)
    run.until(moment)
    kill_server(running)
    start = time.monotonic()
    running.start()
    return {"server back after": round(time.monotonic() - start, 1), **outcome_of(run)}


def server_frozen(folder: Path, model: Path, moment: float, running: Server) -> Outcome:
    """The generation server is frozen for longer than a request may take."""
    run = Run(folder, model, running.url, vllm_request_timeout=3.0)
    run.until(moment)
    group = running.process.pid  # type: ignore[union-attr]
    os.killpg(group, signal.SIGSTOP)
    time.sleep(6.0)
    os.killpg(group, signal.SIGCONT)
    return outcome_of(run)


def server_gone(folder: Path, model: Path, moment: float, running: Server) -> Outcome:
    """The generation server does not return: the run must end normally, and resume when it is started again."""
    run = Run(folder, model, running.url, vllm_recovery_timeout=3.0)
    run.until(moment)
    kill_server(running)
    found = {"exit code": run.done(), "lost": run.since_checkpoint()}
    running.start()
    return {**outcome_of(Run(folder, model, running.url)), **found}


SERVED = (server_killed, server_frozen, server_gone)
KILLED = (trainer_killed, killed_while_saving, killed_before_saving, rank_killed)
FAULTS = (*KILLED, stop_signal, gradients_spoilt, disk_full, folder_removed, *SERVED)


def measure(repeats: int, chosen: Sequence[str]) -> dict[str, list[Outcome]]:
    """Inject each of the `chosen` faults `repeats` times at random moments."""
    os.environ["OMP_NUM_THREADS"] = "1"
    draw = random.Random(0)
    results: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        root = Path(temporary)
        model = save_model(root / "model", tied=True)
        states: dict[str, Any] = {}  # what faults are given: a server, or the weights of an uninterrupted run
        for fault in FAULTS:
            if fault.__name__ not in chosen:
                continue
            kind = "server" if fault in SERVED else "two ranks" if fault is rank_killed else "one rank"
            if kind == "server" and kind not in states:
                states[kind] = stack.enter_context(server(model, root / "server.log"))
            elif kind not in states:
                run = Run(root / f"whole, {kind}", model, ranks=2 if kind == "two ranks" else 1)
                assert run.done() == 0, run.folder.with_suffix(".log").read_text()[-3000:]
                states[kind] = run.weights()
            name = fault.__name__.replace("_", " ")
            for i in range(repeats):
                moment = draw.uniform(2, STEPS - 4)
                found = fault(root / f"{fault.__name__}{i}", model, moment, states[kind])
                results.setdefault(name, []).append({"moment": round(moment, 2), **found})
                print(f"{name}: {results[name][-1]}", flush=True)
    return results


SOAK_STEPS = 16
STREAM = {
    "rollouts": "stream", "max_staleness": 4, "batches_in_flight": 2, "vllm_importance_sampling_mode": "token_truncate"
}  # fmt: skip
# The settings of each. `baseline`, `tools` and `prompt_sampler` are arguments of the trainer, the others keys of
# `BasisConfig`.
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "running mean": {"baseline": "running mean"},
    "rloo": {"baseline": "rloo"},
    "basis": {"baseline": "basis", "num_generations": 1},
    "basis_history": {"baseline": "basis_history"},
    "bv_blend": {"baseline": "bv_blend"},
    "otb": {"baseline": "otb"},
    "ppo": {"baseline": "ppo"},
    "variance sampler": {"baseline": "basis", "prompt_sampler": "variance"},
    "thompson sampler": {"baseline": "basis_history", "prompt_sampler": "thompson"},
    "dynamic sampler": {"baseline": "basis", "prompt_sampler": "dynamic"},
    "two passes": {"baseline": "bv_blend", "num_iterations": 2},
    "accumulation": {"baseline": "running mean", "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
    "one checkpoint, each step": {"baseline": "bv_blend", "save_steps": 1, "save_total_limit": 1},
    "stream": {"baseline": "bv_blend", "num_generations": 1, **STREAM},
    "stream, sampler": {"baseline": "rloo", "prompt_sampler": "frontier", **STREAM},
    "stream, tool": {"baseline": "basis_history", "tools": [calculator], "max_completion_length": 48, **STREAM},
    "stream, long batches": {"baseline": "rloo", "steps_per_generation": 4, "gradient_accumulation_steps": 2, **STREAM},
    "push of each checkpoint": {"baseline": "rloo", "hub_strategy": "all_checkpoints"},
    "push of the last checkpoint": {"baseline": "bv_blend", "hub_strategy": "checkpoint"},
    "evaluations": {"baseline": "bv_blend", "eval_strategy": "steps", "eval_steps": 1},
    "two ranks": {"baseline": "bv_blend", "ranks": 2},
    "two ranks, FSDP2": {"baseline": "bv_blend", "ranks": 2, "accelerate": "fsdp2"},
}
TOKEN, REPOSITORY = "hf_AliceMayWriteHere0001", "models/alice/run"
SECONDS = 240.0  # that a run may take


class Places(TrainerCallback):
    """Keeps, in a file that outlives a kill, at which step each place of a stream's blocks was first trained on."""

    def __init__(self, trained: Any) -> None:
        self.batches, self.taken = trained._streamed, list[tuple[int, int]]()
        self.file = Path(trained.args.output_dir) / "places"
        take = self.batches.take

        def noted(number: int, *given: int) -> Any:
            found = take(number, *given)
            self.taken += self.batches._taken[number]
            return found

        self.batches.take = noted

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # What a run that was killed did after the checkpoint is done again.
        rows = self.file.read_text().splitlines() if self.file.is_file() else []
        kept = [row for row in rows if row.endswith("]]") and json.loads(row)[0] <= state.global_step]
        self.file.write_text("".join(f"{row}\n" for row in kept))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.taken:
            with self.file.open("a") as file:
                file.write(json.dumps([state.global_step, self.taken]) + "\n")
        self.taken = []

    def all(self) -> list[tuple[int, int]]:
        """Blocks and places, in order."""
        found = [tuple(at) for row in self.file.read_text().splitlines() for at in json.loads(row)[1]]
        assert len({*found}) == len(found), f"trained on twice: {found}"
        return sorted(found)


def soak(kills: int, root: Path, names: Sequence[str] | None = None) -> Iterator[dict[str, list[Outcome]]]:
    """So many kills in turn over all configurations, with a line for each on the terminal.

    Yields the outcomes of each configuration so far, whenever each has had its turn, and in the end.
    """
    if not names:
        names = list(CONFIGURATIONS)
        if importlib.util.find_spec("vllm") is None:
            print("vLLM is not installed, and TRL's client of its server imports it: streams are left out.")
            names = [name for name in names if "rollouts" not in CONFIGURATIONS[name]]
    draw, ends = random.Random(0), dict[str, str]()
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with served(root / "model", any("rollouts" in CONFIGURATIONS[name] for name in names)) as url:
        for number in range(kills):
            name = names[number % len(names)]
            try:
                if name not in ends:
                    ends[name] = uninterrupted(root / f"{name} {number} whole", name, url)
                outcome = until_killed(root / f"{name} {number}", name, draw, ends[name], url)
            except AssertionError as error:  # the others are soaked all the same
                outcome = {"failed": str(error), "lost": 0, "wrong": True}
            outcomes[name].append(outcome)
            print(f"soak {number + 1}/{kills} {name}: {outcome}", flush=True)
            if (number + 1) % len(names) == 0 or number + 1 == kills:
                yield dict(outcomes)


def until_killed(folder: Path, name: str, draw: random.Random, expected: str, url: str) -> Outcome:
    """The outcome of `one_kill`, at another moment where a run ended before it came."""
    for attempt in range(5):
        outcome = one_kill(
            folder.with_name(f"{folder.name} {attempt}"), name, draw.uniform(0, SOAK_STEPS), expected, url
        )
        if outcome is not None:
            return outcome
    raise AssertionError(f"'{name}' ended before each of five kills")


def uninterrupted(folder: Path, name: str, url: str) -> str:
    """The digest of the end of a run that nothing disturbs."""
    with repository(folder, name, SOAK_STEPS + 1.0) as hub:
        done = finish(fork(folder, name, url, hub))
    missing = lacking(folder)
    assert (done, missing) == (0, []), f"'{name}' ended with {done}, {missing}:\n{said(folder)}"
    warm(folder)
    return (folder / "digest").read_text()


def warm(folder: Path) -> None:
    """Import what a run has imported, so that the next one has it from its start."""
    for module in set((folder / "modules").read_text().split()) - set(sys.modules):
        with suppress(Exception):
            importlib.import_module(module)


def one_kill(folder: Path, name: str, moment: float, expected: str, url: str) -> Outcome | None:
    """SIGKILL some time after step `moment`, in the middle of a push if there are any, then resume: what was lost
    before the last checkpoint, and whether the end is the uninterrupted run's to the bit. None if the run ended
    before."""
    with repository(folder, name, moment) as hub:
        children = fork(folder, name, url, hub)
        if not hub:
            while step_of(folder) < int(moment) and all(map(lives, children)):
                time.sleep(0.002)
            time.sleep((moment % 1) * 0.3)
            os.kill(children[int(moment * 1000) % len(children)], signal.SIGKILL)
        code = finish(children)
        if code == 0:
            return None
        assert code == -signal.SIGKILL, f"the run of '{name}' ended with {code} by itself:\n{said(folder)}"
        at = step_of(folder)
        since = at - saved_step_of(folder)
        every = int(CONFIGURATIONS[name].get("save_steps", 3))
        code = finish(fork(folder, name, url, hub))
    missing = lacking(folder) if code == 0 else []
    wrong = code != 0 or (folder / "digest").read_text() != expected or bool(missing)
    lost = max(0, since - every)  # the checkpoint of the last step may have been under way
    if lost or wrong:
        print(f"'{name}' in {folder} ended with {code}, {missing}:\n{said(folder)}", flush=True)
    return {"moment": round(moment, 2), "killed at": at, "lost": lost, "wrong": wrong}


def said(folder: Path) -> str:
    """The end of a run's log."""
    return (folder / "log").read_text()[-3000:]


@contextmanager
def served(model: Path, needed: bool) -> Iterator[str]:
    """The URL of a server in a process of its own, which outlives the trainers that are killed; empty if there is no
    need of one."""
    if not needed:
        yield ""
        return
    tokenizer = tool_tokenizer()
    save_tiny_model(tiny_model(tokenizer), tokenizer, model)
    server, parent = ModelServer(model), os.getpid()

    def serve() -> None:
        server.start()
        while os.getppid() == parent:
            time.sleep(1.0)

    child = forked(serve, model / "log")
    try:
        yield server.url
    finally:
        os.kill(child, signal.SIGKILL)
        finish([child])


@contextmanager
def repository(folder: Path, name: str, moment: float) -> Iterator[str]:
    """The address of a Hub of one's own in a process of its own, which kills the trainer within a push; empty for a
    configuration without pushes. `lacking` tells in the end what is wrong with the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    strategy = CONFIGURATIONS[name].get("hub_strategy")
    if strategy is None:
        yield ""
        return
    hub = HubEndpoint({TOKEN: ("alice", "write")})
    child = forked(lambda: hold(hub, folder, moment, strategy, os.getppid()), folder / "hub.log")
    try:
        yield hub.url
    finally:
        (folder / "over").touch()
        finish([child])
        hub.server.server_close()


def hold(hub: HubEndpoint, folder: Path, moment: float, strategy: str, parent: int) -> None:
    """Serve until it is over. After step `moment` and some requests of a push more the trainer is killed, and the
    request that is under way arrives or not."""
    before, arrives, one = int(moment % 1 * 20), int(moment * 1000) % 2 == 0, threading.Lock()

    def pass_on() -> str | None:
        nonlocal before
        with one:
            before -= step_of(folder) >= int(moment)
            if before != -1:
                return None
            before -= 1
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
            return None if arrives else "drop"

    with hub:
        hub.fail(r"(preupload|commit)/main|info/lfs|PUT /lfs", pass_on)
        while not (folder / "over").exists() and os.getppid() == parent:
            time.sleep(0.01)
    (folder / "lacking").write_text(json.dumps(halves(hub) + absent(hub, folder, strategy)))


def lacking(folder: Path) -> list[str]:
    """What is wrong with the repository of a run that is over; nothing if it has none."""
    if not (folder / "hub.log").is_file():
        return []
    found: list[str] = json.loads((folder / "lacking").read_text()) if (folder / "lacking").is_file() else ["an end"]
    return found


def halves(hub: HubEndpoint) -> list[str]:
    """Files of checkpoints that a commit of the repository lacks, or has otherwise than their manifest says."""
    found = []
    for number, commit in enumerate(hub.repos[REPOSITORY].branches["main"]):
        for place in {path.split("/")[0] for path in commit.files if "checkpoint" in path.split("/")[0]}:
            manifest = commit.files.get(f"{place}/{checkpoint.MANIFEST}")
            files = json.loads(manifest.data)["files"] if manifest is not None else {checkpoint.MANIFEST: [0, ""]}
            for name, (_, digest) in files.items():
                blob = commit.files.get(f"{place}/{name}")
                if blob is None or blob.sha256 != digest:
                    found.append(f"{place}/{name} of commit {number}")
    return found


def absent(hub: HubEndpoint, folder: Path, strategy: str) -> list[str]:
    """What the repository of a run that has ended should have and has not: the model, and what `strategy` promises."""
    files = hub.files(REPOSITORY)
    found = [] if files.get("model.safetensors") == (folder / "model.safetensors").read_bytes() else ["the model"]
    if strategy == "checkpoint":
        newest = checkpoint.newest(folder)
        here = (newest / checkpoint.MANIFEST).read_bytes() if newest else b""
        return [*found, *([] if files.get(f"{checkpoint.LAST}/{checkpoint.MANIFEST}") == here else [checkpoint.LAST])]
    promised = {f"checkpoint-{step}" for step in range(3, SOAK_STEPS, 3)}
    return found + sorted(promised - {path.split("/")[0] for path in files})


def fork(folder: Path, name: str, url: str, hub: str) -> list[int]:
    """Processes that train in `folder`, from its newest checkpoint if there is one; the first leaves the digest of
    the end."""
    ranks, port = CONFIGURATIONS[name].get("ranks", 1), free_port()

    def work(rank: int) -> None:
        if ranks > 1:
            join(rank, ranks, port, CONFIGURATIONS[name].get("accelerate"))
        train(folder, name, url, hub)

    children = [forked(partial(work, rank), folder / "log") for rank in range(ranks)]
    (folder / "pid").write_text(str(children[0]))
    return children


def join(rank: int, ranks: int, port: int, kind: str | None) -> None:
    """What a launcher tells a rank: its place, and the sharding of an accelerate config."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    if kind is not None:
        settings = yaml.safe_load(Path(f"accelerate_configs/{kind}.yaml").read_text())["fsdp_config"]
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        for key, value in settings.items():
            os.environ[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)


def forked(work: Callable[[], None], log: Path) -> int:
    """A child that does `work` and says what it says in `log`."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def lives(child: int) -> bool:
    """Whether a process has not ended yet."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def finish(children: Sequence[int]) -> int:
    """The exit code of processes that belong together, negative for a signal: 0 if all of them have it, that of a kill
    if there was one, else the largest. One that does not end is a failure."""
    until = time.monotonic() + SECONDS
    while any(map(lives, children)):
        if time.monotonic() > until:
            for child in children:
                os.kill(child, signal.SIGKILL)
            raise AssertionError(f"processes {children} did not end")
        time.sleep(0.005)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return min(codes) if min(codes) < 0 else max(codes)


def train(folder: Path, name: str, url: str, hub: str) -> None:
    """One run of a configuration, to its end."""
    one_thread()
    settings = {key: value for key, value in CONFIGURATIONS[name].items() if key not in ("ranks", "accelerate")}
    streams = "rollouts" in settings
    baseline, data, tokenizer = settings.pop("baseline"), sums(64 if streams else 16), tiny_tokenizer()
    own: dict[str, Callable[[], Any]] = {"running mean": RunningMean, "ppo": lambda: Ppo(critic_warmup_steps=1)}
    if streams:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        tokenizer = tool_tokenizer()
    tools = settings.pop("tools", [])
    if tools:
        # A random model calls nothing: what is a call is a rule over its tokens.
        turns.read_turn = by_rule  # type: ignore[assignment]
        settings["generation_kwargs"] = {"allowed_token_ids": few_tokens(tokenizer)}
        settings["allow_truncated_sampling"] = True
    if hub:
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = hub, False, True
        settings |= {"push_to_hub": True, "hub_model_id": "run", "hub_token": TOKEN, "hub_retry_wait": 0.1}
    saving = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    trained = OnCpus(
        model=tiny_model(tokenizer), reward_funcs=parity_reward, train_dataset=data, processing_class=tokenizer,
        tools=tools or None,
        baseline=own[baseline]() if baseline in own else named_baseline(baseline, data),
        prompt_sampler=settings.pop("prompt_sampler", "uniform"),
        args=config(folder, **{"max_steps": SOAK_STEPS, **saving, **settings}), eval_dataset=data.select(range(8)),
    )  # fmt: skip
    places = Places(trained) if streams else None
    if places is not None:
        trained.add_callback(places)
    trained.add_callback(StepFile())
    trained.train(resume_from_checkpoint="auto")
    assert not hub or trained.push_to_hub() is not None
    weights = {name: whole_tensor(value).cpu() for name, value in trained.model.state_dict().items()}
    trained.accelerator.wait_for_everyone()
    if not trained.accelerator.is_main_process:
        return
    (folder / "modules").write_text("\n".join(name for name in sys.modules if not name.startswith("_")))
    if places is not None:
        ages = [row["rollout/staleness_max"] for row in trained.state.log_history if "rollout/staleness_max" in row]
        assert max(ages) <= trained.args.max_staleness, ages
        (folder / "digest").write_text(str(places.all()))
        return
    digest = hashlib.sha256()
    add(digest, weights)
    add(digest, trained.baseline.state_dict())
    add(digest, trained.selection.state_dict() if trained.selection is not None else None)
    add(digest, trained._critic.module.state_dict() if trained._critic is not None else None)
    (folder / "digest").write_text(digest.hexdigest())


def add(digest: Any, value: Any) -> None:
    """Make `digest` that of all numbers in `value` too, to the bit."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}:".encode())
            add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            add(digest, each)
    elif torch.is_tensor(value):
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())


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
        folder, model, settings = options.run
        sys.exit(disturbed(Path(folder), Path(model), **json.loads(settings)))
    if options.quick:
        options.repeats, options.faults = 1, ["stop_signal"]
    results: dict[str, list[Outcome]] = {}
    if options.soak:
        one_thread()
        with tempfile.TemporaryDirectory() as temporary:
            for soaked in soak(options.soak, Path(temporary), options.configurations):
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


if __name__ == "__main__":
    main()
