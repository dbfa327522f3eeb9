"""The system calls that Python does not have, by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys

LINUX = sys.platform == "linux"
_MACHINES = {"x86_64": 0, "amd64": 0, "aarch64": 1, "arm64": 1}
MACHINE = _MACHINES.get(os.uname().machine.lower()) if LINUX and sys.maxsize > 1 << 32 else None
"""0 = x86_64, 1 = aarch64: the column of the tables of system calls. None where we know no numbers."""

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
# The number of this system call is the same on every architecture.
_MOUNT_SETATTR = 442
_CAPSET = (126, 91)
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
# NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE with their locks, no KEEP_CAPS.
_NO_PRIVILEGES_OF_ROOT = 0b11101111

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Raises: OSError with what was tried, if the call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """The bare call; -1 if it failed. Integers are passed as 64 bits."""
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *wide))


def prctl(option: int, value: int = 0) -> None:
    arguments = [ctypes.c_ulong(argument) for argument in (value, 0, 0, 0)]
    checked(_libc.prctl(option, *arguments), f"prctl {option}")


def pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    names = [None if name is None else os.fsencode(name) for name in (source, target, kind, options)]
    checked(_libc.mount(*names[:3], ctypes.c_ulong(flags), names[3]), f"mount {target}")


def set_read_only(path: str, *, recursive: bool, on: bool = True) -> None:
    """Make the mount at `path` read-only or writable, if `recursive` with all below it. Needs Linux 5.12."""
    # struct mount_attr: what to set, what to clear, propagation, user namespace.
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY if on else 0, 0 if on else _MOUNT_ATTR_RDONLY, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, attributes, len(attributes))
    checked(result, f"mount_setattr {path}")


def drop_capabilities() -> None:
    """Drop all capabilities for good, also those that root would regain by an exec."""
    try:
        for capability in range(64):
            prctl(_PR_CAPBSET_DROP, capability)
    except OSError:
        # The kernel knows no more capabilities, or we may not drop them; no_new_privs holds in both cases.
        pass
    for option, value in ((_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL), (_PR_SET_SECUREBITS, _NO_PRIVILEGES_OF_ROOT)):
        with contextlib.suppress(OSError):
            prctl(option, value)
    if MACHINE is not None:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        checked(syscall(_CAPSET[MACHINE], ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become_subreaper() -> None:
    """Orphans among the descendants become children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get this signal when the thread that forked this process ends. A change of credentials undoes it."""
    prctl(_PR_SET_PDEATHSIG, number)


def set_dumpable(on: bool) -> None:
    """Off: only root may look into the process through /proc or ptrace."""
    prctl(_PR_SET_DUMPABLE, int(on))
