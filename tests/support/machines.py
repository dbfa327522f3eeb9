"""Two machines: network namespaces with a link between them that can be cut. Needs the right to make them (root)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000
_PRIVATE = 0x00040000 | 0x00004000  # MS_PRIVATE, MS_REC


class Machines:
    """`addresses[i]` is that of machine i, `interfaces[i]` its interface, and `names[i]` its namespace."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:6]
        self.names = [f"basis-{mark}-{i}" for i in (0, 1)]
        self.interfaces = [f"b{mark}{i}" for i in (0, 1)]
        self.addresses = ["10.87.0.1", "10.87.0.2"]

    def start(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Packets are lost from now on, as by a switch that is off; neither machine is told."""
        for here, there in ((0, 1), (1, 0)):
            # To a card that nobody has.
            address = [self.addresses[there], "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
            _ip("-n", self.names[here], "neigh", "replace", *address, "dev", self.interfaces[here])

    def join(self) -> None:
        for here, there in ((0, 1), (1, 0)):
            _ip("-n", self.names[here], "neigh", "del", self.addresses[there], "dev", self.interfaces[here])

    def stop(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Raises PermissionError or OSError where they are not to be had."""
    made = Machines()
    try:
        made.start()
    except subprocess.CalledProcessError as error:
        made.stop()
        raise PermissionError(error.stderr.decode()) from error
    try:
        yield made
    finally:
        made.stop()


def enter(network: str, empty: Sequence[str] = ()) -> None:
    """Move this process, and the threads and processes that it starts, to a machine.

    Args:
        network: name of its namespace.
        empty: folders that are its own, and empty.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(f"/run/netns/{network}", os.O_RDONLY)
    assert libc.setns(file, _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    os.close(file)
    if not empty:
        return
    assert libc.unshare(_NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, _PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
    for folder in empty:
        Path(folder).mkdir(parents=True, exist_ok=True)
        assert libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())
