"""Ranks that are lost, as one of them sees it; with a network between them in tests/cli/test_machines.py."""

import socket
import time
from types import SimpleNamespace

import pytest
from torch.distributed import DistBackendError

from basis_rl.run import peers
from basis_rl.run.errors import PeerLost, RewardFailed, ServerLost
from basis_rl.run.peers import naming_lost_peers

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:29871"
# A vLLM server, or what a reward function asks, refuses a connection in the words in which a rank does.
OTHERS = [
    RuntimeError("a bug"), ValueError(CLOSED), PeerLost("told already"),
    ServerLost("Connection refused"), RewardFailed("Connection reset"),
]  # fmt: skip
LATE = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv"


@pytest.fixture
def other(monkeypatch):
    """This process is rank 0 of two; yields the socket of rank 1, which says nothing by itself."""
    monkeypatch.setattr(peers, "PartialState", lambda: SimpleNamespace(num_processes=2, process_index=0))
    monkeypatch.setattr(peers, "_SILENT", 0.5)
    monkeypatch.setattr(peers, "_EVERY", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.bind(("127.0.0.1", 0))
        mine.settimeout(10)
        there = ("the other", "127.0.0.1", mine.getsockname()[1])
        monkeypatch.setattr(peers, "gathered", lambda here: [here, there])
        yield mine


@pytest.mark.parametrize("error", [RuntimeError(CLOSED), RuntimeError(LATE), DistBackendError("NCCL error")])
def test_who_was_silent_and_since_when_is_told(error, other):
    at = []

    def work():
        beat, address = other.recvfrom(16)
        assert beat == b"0"
        other.sendto(b"1", address)
        time.sleep(0.2)
        at.append(int(time.strftime("%S")))
        raise error

    with pytest.raises(PeerLost) as lost, naming_lost_peers():
        work()
    told = str(lost.value)
    assert told.startswith("Silent: rank 1 on the other (127.0.0.1) since ")
    assert (at[0] - int(told.split(" since ")[1][6:8])) % 60 <= 2
    assert str(error)[:50] in told
    assert "--resume_from_checkpoint auto" in told
    assert lost.value.__cause__ is error


def test_nobody_is_blamed_who_was_heard_or_never_heard(other):
    with pytest.raises(PeerLost, match=r"^A rank was lost"), naming_lost_peers():
        raise RuntimeError(CLOSED)


@pytest.mark.parametrize("error", OTHERS)
def test_other_failures_are_left_alone(error, other):
    with pytest.raises(type(error)) as found, naming_lost_peers(), naming_lost_peers():
        raise error
    assert found.value is error


def test_a_run_of_one_rank_has_no_pulse(monkeypatch):
    monkeypatch.setattr(peers, "_Pulse", None)
    with pytest.raises(RuntimeError, match="closed by peer"), naming_lost_peers():
        raise RuntimeError(CLOSED)
