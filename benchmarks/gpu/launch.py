"""Starts `benchmarks.gpu.launched` in one process, or on several ranks with one of our accelerate configurations."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from threading import TIMEOUT_MAX
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu.runner import ROOT
from benchmarks.gpu.stage import REASON, Findings


def launch(
    found: Findings,
    name: str,
    side: str,
    *,
    kind: str | None = None,
    ranks: int = 1,
    timeout: float | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Start a short run, and return what each rank recorded; see `benchmarks.gpu.launched`.

    Args:
        found: findings of the stage; its folder has the model.
        name: name of the run, and of the folder with its files.
        side: name of the baseline.
        kind: name of a file of ``accelerate_configs``; None starts one process without a launcher.
        ranks: number of processes. One sees the first GPU only.
        timeout: seconds after which it is ended; None waits as long as the stage does.
        settings: settings of the trainer.

    Raises:
        RuntimeError: the run failed, or was ended; the message has its last output.
    """
    folder = found.folder / name
    folder.mkdir()
    command = [sys.executable]
    if kind is not None:
        chosen = yaml.safe_load((ROOT / "accelerate_configs" / f"{kind}.yaml").read_text())
        chosen |= {"num_processes": ranks, "mixed_precision": "bf16" if found.cuda else "no"}
        (folder / "config.yaml").write_text(yaml.safe_dump(chosen))
        command += ["-m", "accelerate.commands.launch", "--config_file", str(folder / "config.yaml")]
        command += ["--main_process_port", "0"]
    given = json.dumps({"out": name, "bf16": found.cuda, **settings})
    command += ["-m", "benchmarks.gpu.launched", str(found.folder), side, found.device, given]
    # With CI set, torchrun does not ask a terminal for its width. Extensions are compiled in a fresh folder, since the
    # lock file that a killed run has left would block this one.
    environment = {**os.environ, "CI": "1", "TORCH_EXTENSIONS_DIR": str(found.folder / "extensions")}
    if found.cuda and ranks == 1:
        environment["CUDA_VISIBLE_DEVICES"] = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    said: deque[str] = deque(maxlen=300)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        timer = threading.Timer(timeout or TIMEOUT_MAX, end, [process])
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:  # passed on at once, so that the log of a stage that times out is complete
            said.append(line)
            print(line, end="", flush=True)
        timer.cancel()
    if process.returncode != 0:
        errors = [line.strip() for line in said if "Error" in line]
        told = " / ".join(errors[-3:]) or "".join(said)
        late = f" (ended after {timeout:g} s)" if timeout and process.returncode == -signal.SIGKILL else ""
        raise RuntimeError(f"{name} ended with code {process.returncode}{late}: {told[-REASON:]}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def end(process: subprocess.Popen[str]) -> None:
    """End a process with all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def saved_weights(found: Findings, name: str) -> dict[str, Tensor]:
    """The weights that a run has saved at its end, in float32."""
    files = sorted((found.folder / name / "saved").glob("*.safetensors"))
    return {key: value.float() for path in files for key, value in load_file(path).items()}
