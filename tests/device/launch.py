"""Short runs in processes of their own, alone or as ranks of `accelerate launch`; started as a module, it is a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import load_file
from trl.generation import vllm_generation

from basis_rl.__main__ import leave
from benchmarks.gpu.runs import Given, build_trainer, model_on
from benchmarks.trainers import random_model, tokenizer
from tests.support.ranks import no_shared_memory
from tests.support.tiny import DEVICE
from tests.trainer.sharded import Keep

ROOT = Path(__file__).resolve().parents[2]
CUDA = DEVICE == "cuda"
GPUS = os.environ.get("BASIS_TEST_GPUS", "0").split(",")
# A machine without a network may not be able to resolve its own name, for which each launch asks; with CI set, torchrun
# does not ask a terminal for its width.
ENVIRONMENT = {
    "CI": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}  # fmt: skip


class KeepGiven(Given, Keep):
    """Keeps batches and advantages of rollouts that are given."""


def save_model(folder, shape=None):
    """Save a model and its tokenizer into `folder` in the form that `from_pretrained` reads; returns the folder."""
    model = model_on(DEVICE) if shape is None else random_model(*shape, tokenizer=tokenizer())
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def launch(root, name, side, *, kind=None, ranks=1, timeout=None, **settings):
    """Train the model in ``root/model`` with the baseline `side`; returns what each rank recorded.

    The run has the folder ``root/name`` and ends after `timeout` seconds. `kind` is a file of ``accelerate_configs``;
    None starts one process without a launcher. One rank sees the first GPU only.

    Raises:
        RuntimeError: the run failed, or was ended; the message has its last output.
    """
    folder = root / name
    folder.mkdir()
    command = [sys.executable]
    if kind is not None:
        chosen = yaml.safe_load((ROOT / "accelerate_configs" / f"{kind}.yaml").read_text())
        chosen |= {"num_processes": ranks, "mixed_precision": "bf16" if CUDA else "no"}
        (folder / "config.yaml").write_text(yaml.safe_dump(chosen))
        command += ["-m", "accelerate.commands.launch", "--config_file", str(folder / "config.yaml")]
        command += ["--main_process_port", "0"]
    given = json.dumps({"out": name, "bf16": CUDA, **settings})
    env = {**ENVIRONMENT, **os.environ, "TORCH_EXTENSIONS_DIR": str(root / "extensions")}
    if CUDA:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(GPUS[:ranks])
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "-m", "tests.device.launch", str(root), side, given],
            cwd=ROOT, env=env, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"a kill after {timeout:g} s"
    if code != 0:
        raise RuntimeError(f"{name} ended with {code}: {log.read_text(errors='replace')[-3000:]}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False, map_location="cpu") for rank in range(ranks)]


def weights(root, name):
    """All weights that a run has saved at its end, in one float32 tensor; ``model`` is the model before it."""
    folder = root / name if name == "model" else root / name / "saved"
    found = {key: value.float() for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    return torch.cat([found[key].flatten() for key in sorted(found)])


def movement_off(root, name, other):
    """How far the weights of two runs are apart, relative to the movement of the other one."""
    start, ours, theirs = (weights(root, each) for each in ("model", name, other))
    assert not theirs.equal(start), "nothing was learned"
    return float((ours - theirs).norm() / (theirs - start).norm())


def main(root, side, settings):
    """Train as one rank, and write ``rankN.pt``."""
    if CUDA and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        # More ranks than GPUs share the first one; accelerate would choose missing devices.
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    cls = KeepGiven if settings.pop("given", True) else Keep
    if settings.pop("eager_engine", False):
        patch.object(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True)).start()
    if not CUDA:
        no_shared_memory()
    out = root / settings.pop("out")
    trainer = build_trainer(
        side, root / "model", out / "run", DEVICE, cls=cls, model_init_kwargs={"dtype": "float32"}, **settings
    )
    trainer.train()
    trainer.save_model(str(out / "saved"))
    parameter = next(trainer.model.parameters())
    found = {
        "kept": trainer.kept,
        "log": trainer.state.log_history,
        "type": str(trainer.accelerator.distributed_type),
        "device": str(trainer.accelerator.device),
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "world": trainer.accelerator.num_processes,
        "sharded": hasattr(parameter, "ds_tensor") or hasattr(parameter, "full_tensor"),
        "peak bytes": torch.cuda.max_memory_allocated() if CUDA else None,
    }
    torch.save(found, out / f"rank{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    leave(0)
