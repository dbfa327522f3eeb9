"""Kills at random moments over many configurations, each forked from one warm process: a kill costs seconds."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from basis_rl.baselines import Ppo
from basis_rl.trainer import BasisTrainer, checkpoint
from examples.quickstart.warm_start import save as save_model
from tests.support.fake_vllm import ModelServer
from tests.support.tiny import config, named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer
from tests.trainer.test_state import RunningMean

STEPS = 16
# Settings of each; `baseline` and `prompt_sampler` are the trainer's, the rest are those of `BasisConfig`.
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
    "async_prefetch": {"baseline": "bv_blend", "async_prefetch": True},
    "async_prefetch, sampler": {"baseline": "rloo", "prompt_sampler": "frontier", "async_prefetch": True},
}


class Told(TrainerCallback):
    """Writes the number of the last whole step where the disturber looks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            part = Path(args.output_dir) / "step.part"
            part.write_text(str(state.global_step))
            part.rename(part.with_name("step"))


class Repeatable(ModelServer):
    """What it draws depends on its weights and on the prompts alone: a batch that is asked for again is the same."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.one_request = threading.Lock()

    def answered(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.one_request:
            asked = hashlib.sha256(json.dumps(body.get("prompt")).encode())
            if path == "/v1/completions":
                add(asked, self.model.state_dict())
            self.drawn.manual_seed(int.from_bytes(asked.digest()[:7], "little"))
            return super().answered(path, body)


def chosen() -> list[str]:
    """The configurations that can run here: TRL's client of a vLLM server imports vLLM."""
    served = importlib.util.find_spec("vllm") is not None
    if not served:
        print("vLLM is not installed: async_prefetch is left out.")
    return [name for name, settings in CONFIGURATIONS.items() if served or "async_prefetch" not in settings]


def soak(kills: int, root: Path, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """So many kills in turn over all configurations; the outcomes of each, and a line for each on the terminal."""
    names, draw, whole = chosen(), random.Random(seed), {}
    outcomes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with served(root / "model", any("async_prefetch" in CONFIGURATIONS[name] for name in names)) as url:
        for number in range(kills):
            name = names[number % len(names)]
            if name not in whole:
                folder = root / f"{name} whole"
                done = finish(fork(folder, name, url))
                assert done == 0, f"the uninterrupted run of '{name}' ended with {done}:\n{said(folder)}"
                whole[name] = (folder / "digest").read_text()
                warm(folder)
            outcome = None
            for attempt in range(5):  # a run may end before the moment comes
                outcome = one_kill(root / f"{name} {number} {attempt}", name, draw.uniform(0, STEPS), whole[name], url)
                if outcome is not None:
                    break
            assert outcome is not None, f"'{name}' ended before each of five kills"
            outcomes[name].append(outcome)
            print(f"soak {number + 1}/{kills} {name}: {outcome}", flush=True)
    return dict(outcomes)


def warm(folder: Path) -> None:
    """Import what a run has imported, so that the next one has it from its start."""
    for module in set((folder / "modules").read_text().split()) - set(sys.modules):
        with suppress(Exception):
            importlib.import_module(module)


def one_kill(folder: Path, name: str, moment: float, expected: str, url: str) -> dict[str, Any] | None:
    """SIGKILL some time after step `moment`, then resume: what was lost before the last checkpoint, and whether the end
    is the uninterrupted run's to the bit. None if the run ended before."""
    child = fork(folder, name, url)
    while step_of(folder) < int(moment) and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)
    time.sleep((moment % 1) * 0.3)
    os.kill(child, signal.SIGKILL)
    code = finish(child)
    if code == 0:
        return None
    assert code == -signal.SIGKILL, f"the run of '{name}' ended with {code} by itself:\n{said(folder)}"
    at = step_of(folder)
    kept = checkpoint.newest(folder)
    since = at - (int(kept.name.split("-")[1]) if kept else 0)
    every = int(CONFIGURATIONS[name].get("save_steps", 3))
    code = finish(fork(folder, name, url))
    digest = (folder / "digest").read_text() if code == 0 else ""
    lost = max(0, since - every)  # the checkpoint of the last step may have been under way
    if lost or digest != expected:
        print(f"'{name}' in {folder} ended with {code}:\n{said(folder)}", flush=True)
    return {"moment": round(moment, 2), "killed at": at, "lost": lost, "wrong": digest != expected}


def said(folder: Path) -> str:
    """The end of a run's log."""
    return (folder / "log").read_text()[-3000:]


def step_of(folder: Path) -> int:
    """The last whole optimizer step of a run."""
    return int((folder / "step").read_text()) if (folder / "step").is_file() else 0


@contextmanager
def served(model: Path, needed: bool) -> Iterator[str]:
    """The URL of a server in a process of its own, which outlives the trainers that are killed; empty if there is no
    need of one."""
    if not needed:
        yield ""
        return
    tokenizer = tiny_tokenizer()
    save_model(tiny_model(tokenizer), tokenizer, model)
    server, parent = Repeatable(model), os.getpid()

    def serve() -> None:
        server.start()
        while os.getppid() == parent:
            time.sleep(1.0)

    child = forked(serve, model / "log")
    try:
        yield server.url
    finally:
        os.kill(child, signal.SIGKILL)
        finish(child)


def fork(folder: Path, name: str, url: str) -> int:
    """A process that trains in `folder`, from its newest checkpoint if there is one; leaves the digest of its end."""
    folder.mkdir(parents=True, exist_ok=True)
    return forked(lambda: train(folder, name, url), folder / "log")


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


def finish(child: int) -> int:
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(folder: Path, name: str, url: str) -> None:
    """One run of a configuration, to its end."""
    torch.set_num_threads(1)
    settings = dict(CONFIGURATIONS[name])
    baseline, data, tokenizer = settings.pop("baseline"), sums(), tiny_tokenizer()
    own: dict[str, Callable[[], Any]] = {"running mean": RunningMean, "ppo": lambda: Ppo(critic_warmup_steps=1)}
    if "async_prefetch" in settings:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    trainer = BasisTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=parity_reward,
        train_dataset=data,
        processing_class=tokenizer,
        baseline=own[baseline]() if baseline in own else named_baseline(baseline, data),
        prompt_sampler=settings.pop("prompt_sampler", "uniform"),
        args=config(
            folder,
            **{"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, **settings},
        ),
    )
    trainer.add_callback(Told())
    trainer.train(resume_from_checkpoint="auto")
    digest = hashlib.sha256()
    add(digest, trainer.model.state_dict())
    add(digest, trainer.baseline.state_dict())
    add(digest, trainer.selection.state_dict() if trainer.selection is not None else None)
    add(digest, trainer._critic.module.state_dict() if trainer._critic is not None else None)
    (folder / "modules").write_text("\n".join(name for name in sys.modules if not name.startswith("_")))
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
