"""Landlock: files, TCP ports, signals and abstract sockets by an allow list, for any user, since Linux 5.13.

From inside, no process outside can be traced, so its environ, memory and descriptors in /proc are not readable either.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from basis_rl.sandbox.kernel import checked, syscall

# On every machine.
_CREATE = 444
_ADD = 445
_RESTRICT = 446
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
# From which version on, how many file rights there are.
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
_ONLY_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
# Bind and connect; abstract unix sockets and signals.
_TCP = 0b11
_SCOPES = 0b11
_READ = _EXECUTE | _READ_FILE | _READ_DIR

# Without /dev/zero: mapped, it is memory that stays when all but one page of it is unmapped, and no limit counts.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_OF_THE_MACHINE = ("cpuinfo", "meminfo", "stat", "loadavg", "version", "uptime", "filesystems", "sys")


def version() -> int:
    """Of the kernel's Landlock interface; 0 where there is none."""
    return max(0, syscall(_CREATE, None, 0, 1))


def restrict(abi: int, readable: Iterable[str], folder: str | None, *, private_proc: bool) -> None:
    """This process and all that it starts may read what is named, write below `folder`, and nothing else.

    Args:
        abi: version to use, at most `version()`.
        readable: files and folders; those that are not there are passed over.
        folder: may be written. None: nothing may.
        private_proc: /proc shows the inside only, and may be read.
    """
    # All rights on files that this version knows, as bits.
    rights = (1 << max(bits for since, bits in _RIGHTS.items() if since <= abi)) - 1
    attributes = struct.pack("=QQQ", rights, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    attributes = attributes[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = checked(syscall(_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in _DEVICES:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE) & rights)
        for name in ("",) if private_proc else (*_OF_THE_MACHINE, os.readlink("/proc/self")):
            _allow(ruleset, f"/proc/{name}", _READ)
        if folder is not None:
            _allow(ruleset, folder, rights)
        checked(syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _ONLY_FILES
        beneath = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        checked(syscall(_ADD, ruleset, 1, beneath, 0), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)
