"""The launcher: takes away what the policy does not grant, then becomes the command. Runs with ``python -I -S``.

Three processes where there are namespaces: the monitor (outside: sees the owner die, counts processes, removes the
temporary folder), the init of the PID namespace (when it ends, the kernel kills everything inside), and the command.
Without namespaces the monitor is the parent of the command, and adopts what is orphaned in it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from basis_rl.sandbox import kernel, landlock, seccomp
from basis_rl.sandbox.folders import remove_folder, used_bytes

CANNOT_START = 126
_COUNT_SECONDS = 0.05
_LOOK_SECONDS = 0.25
_STUBBORN_SECONDS = 5.0
_OPEN_FILES = 512


def main(arguments: list[str]) -> NoReturn:
    """``PLAN COMMAND...``: the plan is JSON, as `basis_rl.sandbox.sandboxed` writes it."""
    plan = json.loads(arguments[0])
    command = arguments[1:]
    # What the trainer has open, such as sockets and devices, must not reach the command.
    os.closerange(3, 1 << 20)
    monitor = _Monitor(plan, command)
    try:
        status = monitor.run()
    except OSError as error:
        monitor.remove_temporary()
        _give_up(error)
    except _Ended:
        monitor.kill_everything()
        monitor.remove_temporary()
        os._exit(128 + signal.SIGTERM)
    monitor.remove_temporary()
    if os.WIFSIGNALED(status):
        # End by the same signal, so that the return code is the command's.
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _give_up(error: Exception) -> NoReturn:
    os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    os._exit(CANNOT_START)


class _Ended(BaseException):
    """SIGTERM: end all that is inside, then this process."""


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


class _Monitor:
    """Waits for the command's end, or its owner's, and leaves nothing behind."""

    def __init__(self, plan: dict[str, Any], command: list[str]) -> None:
        self.plan = plan
        self.command = command
        self.namespaces = "namespaces" in plan["mechanisms"]
        self.folder = plan["folder"]
        self.processes = plan["processes"]
        self.looked_at = self.folder is not None and not _in_memory(plan)
        # The kernel counts processes by user. Root it does not count at all, others over all that they run; only in a
        # user namespace of its own is the number that of the sandbox.
        exact = self.namespaces and os.getuid() != 0
        self.counted = not exact and self.processes != 1
        self.child = -1
        self.status = 0
        self.owner_end: int | None = None

    def run(self) -> int:
        """The status of the command as `os.waitpid` gives it."""
        # Not allowed where this process leads a group already, which is all that is wanted.
        with contextlib.suppress(PermissionError):
            os.setsid()
        self.owner_end = kernel.pidfd(self.plan["owner"])
        if self._owner_has_died():
            raise ProcessLookupError("who asked for this has died")
        signal.signal(signal.SIGTERM, _end)
        own = kernel.pidfd(os.getpid())
        inside, outside = os.pipe()
        if self.namespaces:
            enter_user_namespace()
        elif kernel.LINUX:
            kernel.become_subreaper()
        self.child = os.fork()
        if self.child == 0:
            # PID 1 ignores signals that it does not handle.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.namespaces:
                _init(self.plan, self.command, own, outside)
            _become(self.plan, self.command, exact=False)
        os.close(outside)
        if kernel.LINUX:
            kernel.set_dumpable(False)
        _leave_pipes()
        self._watch()
        if self.namespaces:
            # The child's own status is that of the init; this pipe has the command's, unless the init was killed.
            report = os.read(inside, 4)
            return int.from_bytes(report, "little") if len(report) == 4 else int(signal.SIGKILL)
        return self.status

    def _watch(self) -> None:
        ends = select.poll()
        descriptors = [kernel.pidfd(self.child), self.owner_end]
        for descriptor in descriptors:
            if descriptor is not None:
                ends.register(descriptor, select.POLLIN)
        # Nothing has to be counted, and the kernel reports both ends: wait without a timeout.
        idle = None not in descriptors and not self.counted and not self.looked_at and self.namespaces
        next_look = 0.0
        while True:
            ends.poll(None if idle else 1000 * (_COUNT_SECONDS if self.counted else _LOOK_SECONDS))
            if self._reap():
                break
            if self._owner_has_died():
                self.kill_everything()
                self.remove_temporary()
                os._exit(CANNOT_START)
            if self.counted and sum(_tree(os.getpid()).values()) - 1 - self.namespaces > self.processes:
                self._stop(f"more than {self.processes} processes and threads")
                break
            if self.looked_at and time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                limit = self.plan["folder_bytes"]
                if used_bytes(self.folder, limit) + _unlinked_bytes(os.getpid()) > limit:
                    self._stop(f"more than {limit} bytes in its folder")
                    break
        self.kill_everything()

    def remove_temporary(self) -> None:
        """Remove the temporary folder, however the command ended: if its owner has died, nobody else does."""
        if self.plan["temporary"] and self.folder is not None:
            remove_folder(self.folder)

    def _owner_has_died(self) -> bool:
        if self.owner_end is not None:
            return bool(select.select([self.owner_end], [], [], 0)[0])
        try:
            os.kill(self.plan["owner"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _reap(self) -> bool:
        """Whether the child has ended. Also reaps orphans that have."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.child:
                self.status = status
                return True

    def _stop(self, why: str) -> None:
        self.kill_everything()
        self.status = int(signal.SIGKILL)
        # Nobody may be reading the command's errors, and a full pipe would block.
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"sandbox: killed: {why}\n".encode())

    def kill_everything(self) -> None:
        """Kill and reap all descendants. In a PID namespace it is enough that the first one dies."""
        until = time.monotonic() + _STUBBORN_SECONDS
        while time.monotonic() < until:
            for pid in list(_tree(os.getpid()))[1:] if kernel.LINUX else [self.child]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)
        # They start new processes faster than we kill them: the kernel kills the whole group at once, this process
        # included.
        os.killpg(0, signal.SIGKILL)


def _in_memory(plan: dict[str, Any]) -> bool:
    """Whether the folder is a tmpfs: only a temporary one, since its files are lost with the command."""
    return plan["folder"] is not None and plan["temporary"] and "sized-folder" in plan["mechanisms"]


def enter_user_namespace() -> None:
    """Enter a user namespace that knows this user and group only; the next child is PID 1 of a new PID namespace."""
    user = os.getuid()
    group = os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _init(plan: dict[str, Any], command: list[str], monitor: int | None, report: int) -> NoReturn:
    """The first process of the namespace: starts the command and takes in orphans. Nobody inside can signal it."""
    try:
        unshare_the_rest()
        mount_inside(plan["mechanisms"], plan["folder"], plan["folder_bytes"] if _in_memory(plan) else None)
        kernel.die_with_parent()
        if monitor is not None and select.select([monitor], [], [], 0)[0]:
            # The monitor had died before the kernel was asked to tell of its death.
            os._exit(CANNOT_START)
        child = os.fork()
        if child == 0:
            os.setsid()
            _become(plan, command, exact=os.getuid() != 0)
        kernel.set_dumpable(False)
        _leave_pipes(errors=True)
        while True:
            pid, status = os.wait()
            if pid == child:
                os.write(report, status.to_bytes(4, "little"))
                os._exit(0)
    except OSError as error:
        _give_up(error)


def unshare_the_rest() -> None:
    """Mounts, network (nothing but a loopback that is down), IPC, host name."""
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)


def mount_inside(mechanisms: Sequence[str], folder: str | None, folder_bytes: int | None = None) -> None:
    """A /proc of the inside only, and everything but the folder read-only; with `folder_bytes` that is a tmpfs.

    A tmpfs counts what a look at the folder's names cannot see: files that are unlinked and still open. It holds one
    file for each 4096 bytes, as `used_bytes` counts them.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    if "private-proc" in mechanisms:
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if folder is not None and folder_bytes is not None:
        options = f"size={folder_bytes},nr_inodes={2 + folder_bytes // 4096},mode=700"
        kernel.mount("none", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    if "read-only-mounts" in mechanisms:
        if folder is not None and folder_bytes is None:
            kernel.mount(folder, folder, None, kernel.MS_BIND)
        kernel.set_read_only("/", recursive=True)
        if folder is not None:
            kernel.set_read_only(folder, recursive=False, on=False)


def _become(plan: dict[str, Any], command: list[str], *, exact: bool) -> NoReturn:
    """Give up everything that the policy does not grant, for good; then the command."""
    try:
        os.chdir(plan["folder"] or "/")
        # Python ignores them, and so would the command.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        _limit(plan, exact=exact)
        mechanisms = set(plan["mechanisms"])
        if "no_new_privs" in mechanisms:
            kernel.drop_capabilities()
            kernel.no_new_privileges()
            if "namespaces" not in mechanisms:
                kernel.die_with_parent()
        abi = plan["landlock"]
        # Before Landlock, which would hide it.
        program = _filter(plan, abi) if "seccomp" in mechanisms else None
        if abi:
            private = "private-proc" in mechanisms
            landlock.restrict(abi, plan["readable"], plan["folder"], private_proc=private)
        if program is not None:
            seccomp.install(program)
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        _give_up(error)


def _limit(plan: dict[str, Any], *, exact: bool) -> None:
    limits = {
        resource.RLIMIT_AS: plan["memory_bytes"],
        resource.RLIMIT_FSIZE: plan["file_bytes"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if exact:
        # The monitor and the init are of the same user.
        limits[resource.RLIMIT_NPROC] = plan["processes"] + 2
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError):
            # macOS knows RLIMIT_AS, and refuses to set it.
            if kernel.LINUX:
                raise
    if plan["cpu_seconds"] is not None:
        seconds = math.ceil(plan["cpu_seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _filter(plan: dict[str, Any], abi: int) -> bytes:
    assert kernel.MACHINE is not None
    namespaces = "namespaces" in plan["mechanisms"]
    scoped = namespaces or abi >= 6
    rules = seccomp.refusals(
        namespaces=namespaces,
        read_only_mounts="read-only-mounts" in plan["mechanisms"],
        scoped_signals=scoped,
        one_process=plan["processes"] == 1,
    )
    return seccomp.assemble(rules, kernel.MACHINE, None if scoped else os.getpid())


def _leave_pipes(*, errors: bool = False) -> None:
    """Close our copies of the command's pipes, whose reader must see end of file when the command has ended."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2) if errors else (0, 1):
        os.dup2(null, descriptor)
    os.close(null)


def _tree(root: int) -> dict[int, int]:
    """`root` and its descendants, with the number of threads of each."""
    threads: dict[int, int] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop(0)
        threads[pid] = 0
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            names = os.listdir(f"/proc/{pid}/task")
            threads[pid] = len(names)
            for name in names:
                with open(f"/proc/{pid}/task/{name}/children") as file:
                    waiting += map(int, file.read().split())
    return threads


def _unlinked_bytes(root: int) -> int:
    """On disk, of the files without a name that `root` and its descendants have open."""
    found: dict[tuple[int, int], int] = {}
    for pid in _tree(root):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                # The file may have been closed meanwhile.
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        found[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


if __name__ == "__main__":
    main(sys.argv[1:])
