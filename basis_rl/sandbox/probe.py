"""Tries out, each in a process of its own, by what the kernel lets us hold a command. Prints the names as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable

from basis_rl.sandbox import kernel, landlock, launch, seccomp

_PROC = 1
_READ_ONLY = 2
_SIZED = 4
_FAILED = 100


def main(arguments: list[str]) -> None:
    """No arguments."""
    print(json.dumps(mechanisms()))


def mechanisms() -> list[str]:
    """Names of the mechanisms that work here."""
    found = ["rlimits"]
    if not kernel.LINUX:
        return found
    if _exit_code(_no_new_privileges) != 0:
        return found
    found.append("no_new_privs")
    version = landlock.version()
    if version and _exit_code(lambda: _restricted(version)) == 0:
        found.append(f"landlock {version}")
    if seccomp.available() and _exit_code(_filtered) == 0:
        found.append("seccomp")
    code = _exit_code(_namespaces)
    if code < _FAILED:
        found.append("namespaces")
        found += ["private-proc"] if code & _PROC else []
        found += ["read-only-mounts"] if code & _READ_ONLY else []
        found += ["sized-folder"] if code & _SIZED else []
    return found


def _exit_code(attempt: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        try:
            code = attempt()
        except BaseException:
            # A fork must not continue as the parent, and its code says that it failed.
            code = _FAILED
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256


def _no_new_privileges() -> int:
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    return 0


def _restricted(version: int) -> int:
    _no_new_privileges()
    landlock.restrict(version, (), None, private_proc=False)
    try:
        os.listdir("/")
    except PermissionError:
        return 0
    return _FAILED


def _filtered() -> int:
    assert kernel.MACHINE is not None
    _no_new_privileges()
    options = {"namespaces": True, "read_only_mounts": True, "scoped_signals": True, "one_process": True}
    seccomp.install(seccomp.assemble(seccomp.refusals(**options), kernel.MACHINE))
    try:
        socket.socket()
    except PermissionError:
        return 0
    return _FAILED


def _namespaces() -> int:
    launch.enter_user_namespace()
    return _exit_code(_inside)


def _inside() -> int:
    launch.unshare_the_rest()
    found = 0
    for name, bit in (("private-proc", _PROC), ("read-only-mounts", _READ_ONLY)):
        try:
            launch.mount_inside([name], None)
        except OSError:
            continue
        found |= bit
    with contextlib.suppress(OSError):
        launch.mount_inside([], "/", 1 << 20)
        found |= _SIZED
    return found
