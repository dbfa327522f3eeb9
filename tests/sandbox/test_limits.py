"""Memory, CPU time, processes, disk; and that nothing outlives the command, or its owner."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from basis_rl.sandbox import environment, isolation, python_paths, remove_folder, sandboxed
from basis_rl.sandbox.folders import used_bytes
from tests.sandbox.owner import kinds, policy_in
from tests.sandbox.users import OWNER, USERS, command_as, own
from tests.support.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
HELD = [kind for kind in kinds() if kind in ("all", "without namespaces")]
held = pytest.mark.parametrize("kind", HELD)
users = pytest.mark.parametrize("user", USERS)

FORK_BOMB = """
import os, time
print("started", flush=True)
failed = tried = 0
while failed < 20 and tried < 400:  # bounded: where the limit should ever fail, the machine must survive
    tried += 1
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except BlockingIOError:
        failed += 1
print("refused" if failed == 20 else "not refused", flush=True)
if failed < 20:  # counted, which takes the monitor a moment
    time.sleep(60)
"""
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        open("alive", "w").close()
        while True:
            time.sleep(0.01)
            open("alive", "a").write("x")
    os._exit(0)
while not os.path.exists("alive"):
    time.sleep(0.01)
{then}
"""


def processes_with(mark):
    """PIDs of processes in whose command line `mark` is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@users
@held
def test_a_fork_bomb_ends(kind, user):
    report = own(user, kind=kind, code=FORK_BOMB, policy={"processes": 8})
    assert report["out"].startswith("started")
    assert report["seconds"] < 20
    if user == "nobody" and kind == "all":
        assert (report["code"], report["out"]) == (0, "started\nrefused\n")
    else:  # counted
        assert report["code"] == -signal.SIGKILL
        assert "more than 8 processes" in report["errors"]


@users
@held
def test_one_process_means_one(kind, user):
    code = (
        "import os, threading\n"
        "spawn = lambda: os.posix_spawn('/bin/true', ['true'], {})\n"
        "for start in (os.fork, threading.Thread(target=print).start, spawn):\n"
        "    try: start()\n"
        "    except (OSError, RuntimeError) as error: print(type(error).__name__)\n"
    )
    report = own(user, kind=kind, code=code, policy={"processes": 1})
    assert report["out"].split() == ["BlockingIOError", "RuntimeError", "BlockingIOError"]


@held
def test_memory_and_cpu_time(kind):
    memory = "x = bytearray(10)\ntry: x = bytearray(3 << 30)\nexcept MemoryError: print('no')"
    assert own("self", kind=kind, code=memory, policy={})["out"] == "no\n"
    deaf = kind == "all"
    code = f"import signal\nsignal.signal(24, signal.SIG_IGN) if {deaf} else None\nwhile True: pass"
    report = own("self", kind=kind, code=code, policy={"cpu_seconds": 1})
    assert report["code"] == -(signal.SIGKILL if deaf else signal.SIGXCPU)


@held
def test_the_disk_is_not_filled(kind):
    one = "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 16))"
    report = own("self", kind=kind, code=one, policy={})
    assert "File too large" in report["errors"]
    assert report["size"] <= 1 << 20
    many = "import time\nfor i in range(200): open(f'{i}', 'wb').write(bytes(1 << 19)); time.sleep(0.01)\nprint('done')"
    report = own("self", kind=kind, code=many, policy={"folder_bytes": 4 << 20})
    assert report["code"] == -signal.SIGKILL
    assert "bytes in its folder" in report["errors"]
    deep = "import os, time\nfor i in range(2000):\n    os.mkdir('aaaaa'); os.chdir('aaaaa')\ntime.sleep(5)"
    assert own("self", kind=kind, code=deep, policy={})["code"] == -signal.SIGKILL


# What is unlinked and still open, and what has no content, count as well; each until the folder is full.
UNLINKED = """
import os
held = []
for _ in range(64):
    file = open("x", "wb", buffering=0)
    os.unlink("x")
    held.append(file)
    file.write(bytes(1 << 19))
"""
EMPTY = "held = range(5000)\nfor held in held: open(f'{held}', 'w').close()"
FILL = """
import time
try:
    exec({code!r})
    time.sleep(10)
except OSError as error:
    print(error.errno, held if isinstance(held, int) else len(held) - 1)
"""


@users
@held
@pytest.mark.parametrize(("code", "fit"), [(UNLINKED, 8), (EMPTY, (4 << 20) // 4096 + 1)], ids=["unlinked", "empty"])
def test_files_without_a_name_or_content_count_too(code, fit, kind, user):
    policy = {"folder_bytes": 4 << 20, "temporary": True}
    report = own(user, kind=kind, code=FILL.format(code=code), policy=policy)
    if kind == "all" and "sized-folder" in isolation().mechanisms:
        assert (report["code"], report["out"]) == (0, f"28 {fit}\n"), report["errors"]  # full at its size, to the byte
    else:
        assert report["code"] == -signal.SIGKILL
        assert "bytes in its folder" in report["errors"]


THREADS = """
import threading
go, started = threading.Event(), threading.Barrier({number})

def work():
    hoard = [bytearray(100) for _ in range(100)]
    started.wait(20)
    go.wait(20)

threads = [threading.Thread(target=work) for _ in range({number} - 1)]
for thread in threads:
    thread.start()
started.wait(20)
print(threading.active_count(), flush=True)
go.set()
"""


@users
@held
def test_there_are_as_many_threads_as_are_promised(kind, user):
    policy = {"processes": 32, "memory_bytes": 1 << 30}
    report = own(user, kind=kind, code=THREADS.format(number=32), policy=policy)
    assert (report["code"], report["out"]) == (0, "32\n"), report["errors"]


CONCURRENT = """
import asyncio, concurrent.futures, ctypes, multiprocessing, numpy, shutil, socket, sqlite3, sympy

async def main():
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode().strip(), await asyncio.to_thread(int, "3")

with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(*asyncio.run(main()), *pool.map(abs, [-1, -2]))
ours, theirs = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=theirs.send, args=(4,))
child.start()
print(ours.recv())
child.join()
with open("source", "wb") as file:
    file.write(bytes(100000))
first, second = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # anyio's, for what only wakes it up
    first.setsockopt(socket.SOL_SOCKET, option, 1)
with open(shutil.copyfile("source", "copy"), "rb") as file:  # which both try sendfile
    print(first.sendfile(file))
connection = sqlite3.connect("database")
connection.execute("create table numbers(number)")
connection.commit()
print(connection.execute("select count(*) from numbers").fetchone()[0])
x = sympy.Symbol("x")
back = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n: n + 1)
print(sympy.expand((x + 1)**2), float(numpy.linalg.det(numpy.eye(3))), back(1))
"""


@held
def test_concurrency_copies_databases_and_libraries_work_inside(kind):
    report = own("self", kind=kind, code=CONCURRENT, policy={"temporary": True})
    assert report["out"] == "hi 3 1 2\n4\n100000\n0\nx**2 + 2*x + 1 1.0 2\n", report["errors"]


@held
def test_codes_of_the_command_are_handed_on(kind):
    assert own("self", kind=kind, code="raise SystemExit(7)", policy={})["code"] == 7
    assert own("self", kind=kind, code="import os; os.abort()", policy={})["code"] == -signal.SIGABRT


def started(kind, code, user="self", **changes):
    """A sandbox whose owner is this process; its folder, and the process."""
    folder = tempfile.mkdtemp(prefix="basis_rl_inside")
    process = subprocess.Popen(
        sandboxed([sys.executable, "-c", code, folder], policy_in(folder, **changes), kinds()[kind]),
        env=environment(folder),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return folder, process


def ends(process, mark):
    """What has been killed or is about to end, with all in whose command line `mark` is."""
    process.wait()
    if process.stdout:
        process.stdout.close()
    wait_until(lambda: not processes_with(mark))


@held
@pytest.mark.parametrize("then", ["print('ended')", "time.sleep(60)"], ids=["command ends", "command is killed"])
def test_a_daemon_does_not_outlive_the_command(kind, then):
    folder, process = started(kind, DAEMON.format(then=then))
    wait_until(lambda: os.path.exists(f"{folder}/alive"))
    if "sleep" in then:
        os.killpg(process.pid, signal.SIGKILL)
    ends(process, folder)
    size = os.path.getsize(f"{folder}/alive")
    time.sleep(0.1)
    assert os.path.getsize(f"{folder}/alive") == size
    remove_folder(folder)


@users
@held
def test_everything_ends_with_its_owner_and_the_temporary_folder_goes(kind, user):
    request = {"kind": kind, "code": DAEMON.format(then="time.sleep(60)"), "policy": {"temporary": True}}
    mark = f"# {os.getpid()} {kind} {user}\n"
    request["code"] = mark + request["code"]
    owner = subprocess.Popen(command_as(user, [sys.executable, str(OWNER), json.dumps(request)]), cwd="/tmp")
    wait_until(lambda: list(folders_of(mark, "alive")))
    folders = list(folders_of(mark, "alive"))
    owner.kill()
    ends(owner, mark)
    assert not folders[0].exists()


def folders_of(mark, name):
    """Working directories of the processes with `mark` in which there is a file `name`, in their own file systems."""
    for pid in processes_with(mark):
        try:
            os.stat(f"/proc/{pid}/cwd/{name}")
            yield Path(os.readlink(f"/proc/{pid}/cwd"))
        except OSError:
            continue


@held
def test_a_launcher_killed_alone_takes_everything_along(kind):
    folder, process = started(kind, "import time; print('up', flush=True); time.sleep(60)")
    assert process.stdout.readline() == b"up\n"
    os.kill(process.pid, signal.SIGKILL)
    ends(process, folder)
    remove_folder(folder)


def test_a_command_that_is_not_there_and_an_owner_that_is_gone():
    folder = tempfile.mkdtemp()
    missing = subprocess.run(
        sandboxed(["no such command"], policy_in(folder)), capture_output=True, text=True, check=False
    )
    assert missing.returncode == 126
    assert "No such file" in missing.stderr
    child = subprocess.run(
        [sys.executable, "-c", f"import json, sys; sys.path[:0] = {sys.path!r}; from tests.sandbox.owner import *;"
         f"print(json.dumps(sandboxed(['true'], policy_in({folder!r}))))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert subprocess.run(json.loads(child.stdout), capture_output=True, check=False).returncode == 126
    remove_folder(folder)


def test_folders_that_are_hard_to_remove(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    current = os.open(folder, os.O_RDONLY)
    for level in range(1100):
        os.mkdir("deep", dir_fd=current)
        if level % 100 == 0:
            os.mkdir("side", dir_fd=current)
            os.mkdir("side/other", 0o300, dir_fd=current)
            os.symlink(kept, "link", dir_fd=current)
            os.close(os.open("side/other/closed", os.O_CREAT | os.O_WRONLY, 0, dir_fd=current))
        below = os.open("deep", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(current)
    before = len(os.listdir("/proc/self/fd"))
    assert used_bytes(str(folder), 10**9) > 10**9  # too deep to be counted
    remove_folder(str(folder))
    assert not folder.exists()
    assert (kept / "file").read_text() == "x"
    assert len(os.listdir("/proc/self/fd")) == before


def test_policies_that_make_no_sense():
    for wrong in ({"memory_bytes": 0}, {"cpu_seconds": -1.0}, {"processes": 0}, {"folder": "relative"}):
        with pytest.raises(ValueError, match="must be"):
            policy_in(**{"folder": "/tmp", **wrong})


def test_python_paths_leave_the_home_folder_out(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.home()), "/"])
    assert not {str(Path.home()), "/"} & set(python_paths())
    assert isolation().mechanisms[0] == "rlimits"


def test_the_temporary_folder_goes_though_its_owner_dies_before_the_command_has_started(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    code = f"""
import os, signal, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from basis_rl.sandbox import Policy, environment, python_paths, sandboxed
policy = Policy(memory_bytes=1 << 30, cpu_seconds=5, file_bytes=1 << 20, processes=1, folder={str(folder)!r},
                readable=python_paths(), temporary=True)
command = sandboxed([sys.executable, "-c", "pass"], policy)
subprocess.Popen(command, env=environment({str(folder)!r}), start_new_session=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    wait_until(lambda: not folder.exists())
