"""Kills runs of many configurations at random moments; they are forked from one warm process, so each takes seconds."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from basis_rl.baselines import Ppo
from basis_rl.trainer import BasisTrainer, checkpoint
from tests.support.tiny import config, named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer
from tests.trainer.test_state import RunningMean

STEPS = 16
# The settings of each. `baseline` and `prompt_sampler` are arguments of the trainer, the others keys of `BasisConfig`.
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
}


class Told(TrainerCallback):
    """Writes the number of the last completed step to a file, which the process that injects the fault reads."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            part = Path(args.output_dir) / "step.part"
            part.write_text(str(state.global_step))
            part.rename(part.with_name("step"))


def soak(kills: int, root: Path, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Kill `kills` runs, cycling over the configurations; prints each outcome and returns them by configuration."""
    draw, whole = random.Random(seed), {}
    outcomes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(kills):
        name = list(CONFIGURATIONS)[number % len(CONFIGURATIONS)]
        if name not in whole:
            done = finish(fork(root / f"{name} whole", name))
            assert done == 0, f"the uninterrupted run of '{name}' ended with {done}"
            whole[name] = (root / f"{name} whole" / "digest").read_text()
        outcome = one_kill(root / f"{name} {number}", name, draw.uniform(0, STEPS), whole[name])
        outcomes[name].append(outcome)
        print(f"soak {number + 1}/{kills} {name}: {outcome}", flush=True)
    return dict(outcomes)


def one_kill(folder: Path, name: str, moment: float, expected: str) -> dict[str, Any]:
    """Send SIGKILL some time after step `moment`, then resume.

    Returns how many steps before the last due checkpoint were lost, and whether the final state is wrong, that is not
    bit-identical to that of the uninterrupted run.
    """
    child = fork(folder, name)
    while step_of(folder) < int(moment) and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)
    time.sleep((moment % 1) * 0.3)
    os.kill(child, signal.SIGKILL)
    finish(child)
    at = step_of(folder)
    kept = checkpoint.newest(folder)
    since = at - (int(kept.name.split("-")[1]) if kept else 0)
    every = int(CONFIGURATIONS[name].get("save_steps", 3))
    code = finish(fork(folder, name))
    digest = (folder / "digest").read_text() if code == 0 else ""
    lost = max(0, since - every)  # the checkpoint of the last step may not have been complete
    return {"moment": round(moment, 2), "killed at": at, "lost": lost, "wrong": digest != expected}


def step_of(folder: Path) -> int:
    """The last completed optimizer step of a run."""
    return int((folder / "step").read_text()) if (folder / "step").is_file() else 0


def fork(folder: Path, name: str) -> int:
    """Fork a process that trains in `folder`, from the newest checkpoint if there is one, and writes a final digest."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (folder / "log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            train(folder, name)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(child: int) -> int:
    """Wait for a process; returns its exit code, which is negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(folder: Path, name: str) -> None:
    """Train a configuration to its end, and write a digest of the final weights and the baseline's state."""
    torch.set_num_threads(1)
    settings = dict(CONFIGURATIONS[name])
    chosen, data, tokenizer = settings.pop("baseline"), sums(), tiny_tokenizer()
    own: dict[str, Callable[[], Any]] = {"running mean": RunningMean, "ppo": lambda: Ppo(critic_warmup_steps=1)}
    trainer = BasisTrainer(
        model=tiny_model(tokenizer),
        reward_funcs=parity_reward,
        train_dataset=data,
        processing_class=tokenizer,
        baseline=own[chosen]() if chosen in own else named_baseline(chosen, data),
        prompt_sampler=settings.pop("prompt_sampler", "uniform"),
        args=config(
            folder,
            **{"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, **settings},
        ),
    )
    trainer.add_callback(Told())
    trainer.train(resume_from_checkpoint="auto")
    digest = hashlib.sha256()
    for _, tensor in sorted(trainer.model.state_dict().items()):
        digest.update(tensor.numpy().tobytes())
    digest.update(str(trainer.baseline.state_dict()).encode())
    (folder / "digest").write_text(digest.hexdigest())
