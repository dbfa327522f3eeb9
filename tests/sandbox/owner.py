"""Owns a sandbox, as the trainer would: puts up what can be attacked, runs the attacks, prints what came of them.

``python owner.py REQUEST``: JSON with the ``command`` (or ``attacks``: the path of a script), ``policy`` and
``mechanisms``. A process of its own, so that it can run as another user, and be killed.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from basis_rl.sandbox import Policy, environment, isolation, python_paths, remove_folder, sandboxed  # noqa: E402

POLICY = {"memory_bytes": 1 << 30, "cpu_seconds": 20, "file_bytes": 1 << 20, "processes": 16}


def policy_in(folder: str, **changes: object) -> Policy:
    return Policy(**{**POLICY, "folder": folder, "readable": python_paths(), **changes})


def kinds() -> dict[str, tuple[str, ...]]:
    """Mechanisms, all together and a part of them alone, as far as they are here."""
    here = isolation().mechanisms
    base = [name for name in here if name in ("rlimits", "no_new_privs")]
    files = next((name for name in here if name.startswith("landlock")), None)
    result = {"all": here}
    if files and "seccomp" in here:
        result["without namespaces"] = (*base, files, "seccomp")
        result["old kernel without namespaces"] = (*base, "landlock 1", "seccomp")
    if {"namespaces", "private-proc", "read-only-mounts"} <= set(here):
        result["namespaces, the old /proc"] = tuple(name for name in here if name != "private-proc")
        result["namespaces alone"] = (*base, "namespaces", "private-proc", "read-only-mounts")
    return result


def listeners(folder: str) -> dict[str, object]:
    tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    abstract, path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    tcp.bind(("127.0.0.1", 0))
    udp.bind(("127.0.0.1", 0))
    abstract.bind(f"\0basis_rl {os.getpid()}")
    path.bind(f"{folder}/socket")
    datagrams.bind(f"{folder}/datagrams")
    for end in (tcp, abstract, path):
        end.listen()
    ends = {"tcp": tcp, "udp": udp, "abstract": abstract, "path": path, "datagrams": datagrams}
    names = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1], "abstract": f"\0basis_rl {os.getpid()}"}
    return {"ends": ends, "names": {**names, "path": f"{folder}/socket", "datagrams": f"{folder}/datagrams"}}


def reached(ends: dict[str, socket.socket]) -> list[str]:
    found = []
    for name, end in ends.items():
        end.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            end.recvfrom(1) if end.type == socket.SOCK_DGRAM else end.accept()
            found.append(name)
    return found


def attack(script: str, policy: dict[str, object], mechanisms: list[str]) -> dict[str, object]:
    outside, folder = tempfile.mkdtemp(prefix="basis_rl_outside"), tempfile.mkdtemp(prefix="basis_rl_inside")
    for name in ("secret", "rename me", "unlink me"):
        (Path(outside) / name).write_text("secret")
    (Path(outside) / "link there").symlink_to("secret")
    attribute = False  # where the file system has none
    with contextlib.suppress(OSError):
        os.setxattr(f"{outside}/secret", "user.basis_rl", b"attribute")
        attribute = True
    before = {path.name: path.stat() for path in Path(outside).iterdir()}
    sockets = listeners(outside)
    home = str(Path.home())
    target = {"owner": os.getpid(), "outside": outside, "home": home, "project": str(PROJECT), **sockets["names"]}
    target["attribute"] = attribute
    target["seccomp"] = "seccomp" in mechanisms
    target["held"] = len(mechanisms) > 1
    neighbour = subprocess.Popen(["sleep", "100"])
    open_descriptor = os.open("/", os.O_RDONLY)
    os.environ["HF_TOKEN"] = "hf_secret"
    limits, cores = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    done = subprocess.run(
        sandboxed(
            [sys.executable, "-c", Path(script).read_text(), json.dumps(target)],
            policy_in(folder, **policy),
            mechanisms,
        ),
        env=environment(folder),
        capture_output=True,
        text=True,
        start_new_session=True,
        pass_fds=[open_descriptor],
    )
    after = {path.name: path.stat() for path in Path(outside).iterdir() if path.name not in ("socket", "datagrams")}
    same = set(before) == set(after) and all(
        (old.st_mode, old.st_size, old.st_mtime_ns, old.st_nlink)
        == (after[name].st_mode, after[name].st_size, after[name].st_mtime_ns, after[name].st_nlink)
        for name, old in before.items()
    )
    left = [
        path for path in ("/tmp", "/dev/shm", home, str(PROJECT)) if os.path.exists(f"{path}/basis_rl_sandbox_test")
    ]
    unchanged = limits == os.getpriority(os.PRIO_PROCESS, 0) and cores == os.sched_getaffinity(0)
    alive = neighbour.poll() is None
    neighbour.kill()
    neighbour.wait()
    report = {
        "reached": reached(sockets["ends"]), "same": same, "left": left, "unchanged": unchanged, "neighbour": alive,
        "folder": folder, "code": done.returncode, "errors": done.stderr, "inside": json.loads(done.stdout or "null"), 
        "uid": os.getuid(),
    }  # fmt: skip
    remove_folder(outside)
    remove_folder(folder)
    return report


def execute(code: str, policy: dict[str, object], mechanisms: list[str]) -> dict[str, object]:
    """Run `code` in a sandbox; its output, and how long it took."""
    folder = tempfile.mkdtemp(prefix="basis_rl_inside")
    began = time.monotonic()
    done = subprocess.run(
        sandboxed([sys.executable, "-c", code], policy_in(folder, **policy), mechanisms),
        env=environment(folder),
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    seconds, size = (
        time.monotonic() - began,
        sum(file.stat().st_size for file in Path(folder).glob("*") if file.is_file()),
    )
    remove_folder(folder)
    return {"code": done.returncode, "out": done.stdout, "errors": done.stderr, "seconds": seconds, "size": size}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    chosen = ("rlimits",) if request["kind"] == "none" else kinds()[request["kind"]]
    if "attacks" in request:
        print(json.dumps(attack(request["attacks"], request["policy"], chosen)))
    else:
        print(json.dumps(execute(request["code"], request["policy"], chosen)))
