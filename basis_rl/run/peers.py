"""Ranks that are lost: a cut link or a dead machine ends the others with one line that says who was silent."""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from accelerate import PartialState
from torch.distributed import DistError

from basis_rl.run.errors import PeerLost
from basis_rl.run.ranks import gathered

_EVERY = 0.5
_SILENT = 2.0
# What gloo says of a connection, which it raises as a bare RuntimeError.
_LOST = re.compile(r"gloo/transport|Connection (closed by peer|reset|refused|timed out)|Timed out waiting|Broken pipe")
_within = False


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Within it a collective that has lost a rank raises `PeerLost`. May be nested.

    A collective fails when a connection ends, or after ``ddp_timeout`` seconds without a word: the kernel alone would
    wait for a quarter of an hour.
    """
    global _within
    if _within or PartialState().num_processes == 1:
        yield
        return
    pulse = _Pulse()
    _within = True
    try:
        yield
    except RuntimeError as error:
        # Our own errors may also speak of connections, to a vLLM server or in a reward function.
        if isinstance(error, DistError) or (type(error) is RuntimeError and _LOST.search(str(error))):
            raise PeerLost(
                f"{pulse.message()}: a process or machine has died, or the network is cut ({str(error)[:200]}). Resume "
                "with the same command and --resume_from_checkpoint auto."
            ) from error
        raise
    finally:
        _within = False
        pulse.stop()


class _Pulse:
    """Tells the other ranks twice a second that this one lives, and keeps when each of them was heard last.

    By UDP, which blocks nobody. Where it does not come through, no rank is named.
    """

    def __init__(self) -> None:
        state = PartialState()
        self.rank = state.process_index
        self.heard: dict[int, float] = {}
        family, _, _, _, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.socket.bind(("", 0))
        self.socket.settimeout(_EVERY)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel tells by which address the others see this machine.
            probe.connect(master)
            address = probe.getsockname()[0]
        self.peers = gathered((socket.gethostname(), address, self.socket.getsockname()[1]))
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        sent = 0.0
        while not self.ended.is_set():
            if time.monotonic() - sent >= _EVERY:
                sent = time.monotonic()
                for rank, (_, address, port) in enumerate(self.peers):
                    if rank != self.rank:
                        with suppress(OSError):
                            self.socket.sendto(str(self.rank).encode(), (address, port))
            with suppress(OSError, ValueError):
                self.heard[int(self.socket.recv(16))] = time.time()

    def message(self) -> str:
        """Who is silent, after a moment in which that shows."""
        time.sleep(_SILENT + 2 * _EVERY)
        named = []
        for rank, (host, address, _) in enumerate(self.peers):
            last = self.heard.get(rank, math.inf)
            if time.time() - last > _SILENT:
                since = time.strftime("%H:%M:%S", time.localtime(last))
                named.append(f"rank {rank} on {host} ({address}) since {since}")
        return f"Silent: {', '.join(named)}" if named else "A rank was lost"

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()
        self.socket.close()
