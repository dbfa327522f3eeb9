"""Tries out which of our mechanisms work on this kernel, each in a process of its own. Prints their names as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from basis_rl.sandbox import kernel, landlock, launch, seccomp

# Arguments of `launch.mount_inside` by which each mechanism of mounts is tried.
_MOUNTS: dict[str, tuple[Any, ...]] = {
    "private-proc": (["private-proc"], None),
    "read-only-mounts": (["read-only-mounts"], None),
    "sized-folder": ([], "/", 1 << 20),
}


def main(arguments: list[str]) -> None:
    """No arguments."""
    print(json.dumps(mechanisms()))


def mechanisms() -> list[str]:
    """Names of the mechanisms that work here."""
    found = ["rlimits"]
    if not kernel.LINUX or not _works(_no_new_privileges):
        return found
    found.append("no_new_privs")
    version = landlock.version()
    if version and _works(partial(_restricted, version)):
        found.append(f"landlock {version}")
    if _works(_filtered):
        found.append("seccomp")
    if _works(_in_namespaces):
        found.append("namespaces")
        found += [name for name, mounts in _MOUNTS.items() if _works(partial(_in_namespaces, *mounts))]
    return found


def _works(attempt: Callable[[], object]) -> bool:
    """Whether `attempt` raises nothing in a forked process."""
    child = os.fork()
    if child == 0:
        code = 1
        # Whatever is raised: a fork must not continue as the parent.
        with contextlib.suppress(BaseException):
            attempt()
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _require_refusal(act: Callable[..., object], *arguments: object) -> None:
    try:
        act(*arguments)
    except PermissionError:
        return
    raise RuntimeError("the kernel allowed what it was told to refuse")


def _no_new_privileges() -> None:
    kernel.drop_capabilities()
    kernel.no_new_privileges()


def _restricted(version: int) -> None:
    _no_new_privileges()
    landlock.restrict(version, (), None, private_proc=False)
    _require_refusal(os.listdir, "/")


def _filtered() -> None:
    assert kernel.MACHINE is not None
    _no_new_privileges()
    options = {"namespaces": True, "read_only_mounts": True, "scoped_signals": True, "one_process": True}
    seccomp.install(seccomp.assemble(seccomp.refusals(**options), kernel.MACHINE))
    _require_refusal(socket.socket)


def _in_namespaces(*mounts: Any) -> None:
    launch.enter_user_namespace()
    # Only a child is inside the new PID namespace, where /proc can be mounted.
    if not _works(partial(_inside, *mounts)):
        raise RuntimeError("no namespaces, or not these mounts in them")


def _inside(*mounts: Any) -> None:
    launch.unshare_the_rest()
    if mounts:
        launch.mount_inside(*mounts)
