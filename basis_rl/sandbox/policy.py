"""What a sandboxed command may do, and how to start it."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from subprocess import run

_ROOT = Path(__file__).resolve().parents[2]
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from basis_rl.sandbox.{0} import main; main(sys.argv[1:])"
)
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/nix", "/etc/ld.so.cache", "/etc/ld.so.conf.d",
           "/etc/alternatives", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")  # fmt: skip
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is granted; the rest is refused as far as the machine can (`isolation`). No limit may be 0 or less.

    Attributes:
        memory_bytes: address space of each process.
        cpu_seconds: CPU time of each process, rounded up to seconds; then SIGXCPU, a second later SIGKILL. None: no
            limit.
        file_bytes: size of each file.
        processes: threads of all processes together. 1: neither thread nor process can be started (EAGAIN). More:
            EAGAIN for an ordinary user in a user namespace; elsewhere, and for root, they are counted 20 times a
            second, and all is killed when there are more.
        folder: absolute path of the only place that can be written; it is cwd, and should be HOME and TMPDIR
            (`environment`). None: nothing can be written.
        folder_bytes: all files of the folder together. With user namespaces a temporary folder is a tmpfs of that size
            (ENOSPC, and it takes memory). Elsewhere it is measured 4 times a second, and all is killed when it is
            larger.
        readable: files and folders that can be read and executed (`python_paths`).
        temporary: the folder is empty for the command, and removed when the command or the process that started it
            ends.

    Raises:
        ValueError: a limit that is not positive, a folder that is no absolute path of a folder.
    """

    memory_bytes: int
    file_bytes: int
    processes: int
    readable: tuple[str, ...]
    cpu_seconds: float | None = None
    folder: str | None = None
    folder_bytes: int = 1 << 30
    temporary: bool = False

    def __post_init__(self) -> None:
        limits = (self.memory_bytes, self.cpu_seconds, self.file_bytes, self.processes, self.folder_bytes)
        if any(limit is not None and limit <= 0 for limit in limits):
            raise ValueError(f"The limits of a sandbox must be positive: {self}.")
        if self.folder is not None and not (os.path.isabs(self.folder) and os.path.isdir(self.folder)):
            raise ValueError(f"The folder of a sandbox must be an existing folder, by absolute path: '{self.folder}'.")


class Isolation:
    """What this machine gives.

    Attributes:
        mechanisms: what the promises are kept by.
        network: no connection to anywhere.
        writes: no change outside the folder.
        reads: nothing is read that is not `readable`; no other process is looked into.
        processes: no signal to processes outside; all that was started ends with the command, and with its owner.
        complete: all four promises hold.
    """

    def __init__(self, mechanisms: Iterable[str]) -> None:
        self.mechanisms = tuple(mechanisms)
        landlock = _landlock(self.mechanisms) > 0
        seccomp = "seccomp" in self.mechanisms
        self.network = seccomp or "namespaces" in self.mechanisms
        self.writes = "read-only-mounts" in self.mechanisms or (landlock and seccomp)
        self.reads = landlock
        self.processes = self.network
        self.complete = self.network and self.writes and self.reads and self.processes

    def __str__(self) -> str:
        promises = {
            "no network": self.network,
            "no writes outside a temporary folder": self.writes,
            "no reads outside a list": self.reads,
            "no processes left or signalled": self.processes,
        }
        kept = ", ".join(name for name, holds in promises.items() if holds)
        broken = ", ".join(name for name, holds in promises.items() if not holds)
        text = kept or "limits of memory, CPU time and file size only"
        return f"{text}{broken and f'; NOT promised here: {broken}'} (by {', '.join(self.mechanisms)})"


def _landlock(mechanisms: Iterable[str]) -> int:
    return max((int(name.split()[1]) for name in mechanisms if name.startswith("landlock")), default=0)


def _python(module: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP.format(module), str(_ROOT)]


@lru_cache(maxsize=1)
def isolation() -> Isolation:
    """What this machine gives, tried out once in a process of its own (about 0.1 s)."""
    tried = run(_python("probe"), capture_output=True, text=True, check=False, timeout=60, env=environment(None))
    return Isolation(json.loads(tried.stdout) if tried.returncode == 0 else ("rlimits",))


def sandboxed(command: Sequence[str], policy: Policy, mechanisms: Iterable[str] | None = None) -> list[str]:
    """The command line that runs `command` under `policy`.

    Its standard streams are the command's, all other descriptors are closed; its return code is the command's, 126 if
    the sandbox cannot be set up, 127 as in a shell. To end it, kill its process group; it should be started in a
    session of its own (``start_new_session=True``) with ``env=environment(policy.folder)``. It ends with the process
    that calls this function, however that ends.

    Args:
        command: found through PATH, paths relative to the policy's folder.
        policy: what it may do.
        mechanisms: of `isolation`, to use fewer than there are.
    """
    given = isolation().mechanisms if mechanisms is None else tuple(mechanisms)
    folder = None if policy.folder is None else os.path.realpath(policy.folder)
    plan = {**asdict(policy), "folder": folder, "owner": os.getpid(), "mechanisms": given, "landlock": _landlock(given)}
    return [*_python("launch"), json.dumps(plan), *command]


def environment(folder: str | None, **variables: str) -> dict[str, str]:
    """What a sandboxed command should see of the environment: paths, language, one thread; and `variables`.

    No token, key or address of this process is in it. HOME and TMPDIR are the `folder`.
    """
    home = folder or "/nonexistent"
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # Relative entries would mean other folders, since the command has another working directory.
    if "PYTHONPATH" in passed:
        passed["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, passed["PYTHONPATH"].split(os.pathsep)))
    # Otherwise each thread has an arena of its own, which takes 64 MB of addresses: with 14 threads 1 GB is full.
    fixed = {"HOME": home, "TMPDIR": folder or "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "2"}
    return {**passed, **dict.fromkeys(_ONE_THREAD, "1"), **fixed, **variables}


def python_paths(own_modules: bool = True) -> tuple[str, ...]:
    """What a Python of this very environment reads: interpreter, libraries, packages, modules on ``sys.path``.

    An entry of ``sys.path`` that holds the home folder (the home folder itself, ``/``) is left out. Without
    `own_modules` so are all of its entries that do not belong to the interpreter or to the installed packages: the
    working directory, and this package where it is not installed with the others.
    """
    homes = {Path.home().resolve(), *Path.home().resolve().parents, Path("/")}
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.exec_prefix), Path(sys.executable).resolve().parent]
    found += [Path(path) for path in sysconfig.get_paths().values()]
    found += [Path(path) for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    if own_modules:
        found += [Path(path or ".") for path in sys.path] + [Path(__file__).parents[1]]
    kept = [path.resolve() for path in found if path.exists() and path.resolve() not in homes]
    kept += map(Path, _SYSTEM)
    return tuple(dict.fromkeys(str(path) for path in kept if path.exists()))
