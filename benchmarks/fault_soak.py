"""Kills runs of many configurations at random moments; they are forked from one warm process, so each takes seconds."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import constants
from transformers import TrainerCallback

from basis_rl.baselines import Ppo
from basis_rl.engine.server import free_port
from basis_rl.run import checkpoint
from basis_rl.trainer.shards import whole
from examples.quickstart.warm_start import save as save_model
from tests.support.fake_vllm import ModelServer
from tests.support.hub_endpoint import HubEndpoint
from tests.support.tiny import config, named_baseline, parity_reward, sums, tiny_model, tiny_tokenizer
from tests.trainer.sharded import OnCpus
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
    "async_prefetch": {"baseline": "bv_blend", "async_prefetch": True},
    "async_prefetch, sampler": {"baseline": "rloo", "prompt_sampler": "frontier", "async_prefetch": True},
    "push of each checkpoint": {"baseline": "rloo", "hub_strategy": "all_checkpoints"},
    "push of the last checkpoint": {"baseline": "bv_blend", "hub_strategy": "checkpoint"},
    "two ranks": {"baseline": "bv_blend", "ranks": 2},
    "two ranks, FSDP2": {"baseline": "bv_blend", "ranks": 2, "accelerate": "fsdp2"},
}
TOKEN, REPOSITORY = "hf_AliceMayWriteHere0001", "models/alice/run"
SECONDS = 240.0  # that a run may take


class Told(TrainerCallback):
    """Writes the number of the last completed step to a file, which the process that injects the fault reads."""

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


def soak(
    kills: int, root: Path, seed: int = 0, names: Sequence[str] | None = None
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """So many kills in turn over all configurations; the outcomes of each so far whenever each has had its turn and in
    the end, and a line for each kill on the terminal."""
    names, draw, ends = names or chosen(), random.Random(seed), {}
    outcomes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with served(root / "model", any("async_prefetch" in CONFIGURATIONS[name] for name in names)) as url:
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


def until_killed(folder: Path, name: str, draw: random.Random, expected: str, url: str) -> dict[str, Any]:
    """The outcome of `one_kill`, at another moment where a run ended before it came."""
    for attempt in range(5):
        outcome = one_kill(folder.with_name(f"{folder.name} {attempt}"), name, draw.uniform(0, STEPS), expected, url)
        if outcome is not None:
            return outcome
    raise AssertionError(f"'{name}' ended before each of five kills")


def uninterrupted(folder: Path, name: str, url: str) -> str:
    """The digest of the end of a run that nothing disturbs."""
    with repository(folder, name, STEPS + 1.0) as hub:
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


def one_kill(folder: Path, name: str, moment: float, expected: str, url: str) -> dict[str, Any] | None:
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
        at, kept = step_of(folder), checkpoint.newest(folder)
        since = at - (int(kept.name.split("-")[1]) if kept else 0)
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


def step_of(folder: Path) -> int:
    """The last completed optimizer step of a run."""
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
    promised = {f"checkpoint-{step}" for step in range(3, STEPS, 3)}
    return found + sorted(promised - {path.split("/")[0] for path in files})


def fork(folder: Path, name: str, url: str, hub: str) -> list[int]:
    """Processes that train in `folder`, from its newest checkpoint if there is one; the first leaves the digest of
    the end."""
    ranks, port = CONFIGURATIONS[name].get("ranks", 1), free_port()

    def of(rank: int) -> Callable[[], None]:
        def work() -> None:
            if ranks > 1:
                join(rank, ranks, port, CONFIGURATIONS[name].get("accelerate"))
            train(folder, name, url, hub)

        return work

    children = [forked(of(rank), folder / "log") for rank in range(ranks)]
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
    torch.set_num_threads(1)
    settings = {key: value for key, value in CONFIGURATIONS[name].items() if key not in ("ranks", "accelerate")}
    baseline, data, tokenizer = settings.pop("baseline"), sums(), tiny_tokenizer()
    own: dict[str, Callable[[], Any]] = {"running mean": RunningMean, "ppo": lambda: Ppo(critic_warmup_steps=1)}
    if "async_prefetch" in settings:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    if hub:
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = hub, False, True
        settings |= {"push_to_hub": True, "hub_model_id": "run", "hub_token": TOKEN, "hub_retry_wait": 0.1}
    trainer = OnCpus(
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
    assert not hub or trainer.push_to_hub() is not None
    weights = whole(trainer.model.state_dict())
    trainer.accelerator.wait_for_everyone()
    if not trainer.accelerator.is_main_process:
        return
    digest = hashlib.sha256()
    add(digest, weights)
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
