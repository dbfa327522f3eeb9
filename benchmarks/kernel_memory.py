"""How much memory of the kernel can one process in a sandbox hold?

    python -m benchmarks.kernel_memory [--parts sockets pipes ...] [--quick]

The figures of docs/security.md: half a minute if little else runs on the machine, which should be so, since ``slab``
(the kernel's small objects) is that of the whole machine. ``--quick`` stops each case after a tenth of a second of CPU
time. Results are only printed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from basis_rl.sandbox import environment, remove_folder, sandboxed
from benchmarks.common import parser_of
from tests.sandbox.owner import kinds, policy_in

BEFORE = """
import contextlib, ctypes, fcntl, os, select, socket, struct, termios, time

def slab():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("Slab:"))

def enough():
    return time.process_time() > 8

start, held = slab(), []
"""
SOCKETS = """
def filled():
    pair = socket.socketpair()
    size = 0
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        end.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                end.send(bytes(1 << 15))
        size += struct.unpack("i", fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)))[0]
    return pair, size

way, _ = held = socket.socketpair()
held, sizes, sent = [held], {"open": 0, "on their way": 0}, 0
with contextlib.suppress(OSError):
    while True:
        pair, size = filled()
        try:
            socket.send_fds(way, [b"x"], [end.fileno() for end in pair])
        except OSError:
            held.append(pair)
            sizes["open"] += size
        else:
            sizes["on their way"] += size
            sent += 2
            for end in pair:
                end.close()
print({name: f"{size / 1e6:.0f} MB" for name, size in sizes.items()}, 2 * len(held), "open,", sent, "on their way")
"""
PIPES = """
size = 0
with contextlib.suppress(OSError):
    while True:
        reader, writer = os.pipe()
        held += [reader, writer]
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                size += os.write(writer, bytes(4096))
print(f"{size / 1e6:.0f} MB in {len(held) // 2} pipes")
"""
EPOLL = """
watchers, count = [select.epoll() for _ in range(120)], 0
for source in [os.eventfd(0) for _ in range(120)]:
    if enough():
        break
    for descriptor in range(270, 500):
        os.dup2(source, descriptor)
        for watcher in watchers:
            watcher.register(descriptor, select.EPOLLIN)
            count += 1
print(f"{count} watches: slab grew by {slab() - start} MiB, {time.process_time():.0f} s of CPU time")
"""
LOCKS = """
count = 0
while not enough() and len(held) < 480:
    held.append(os.open(f"{len(held)}", os.O_RDWR | os.O_CREAT))
    for place in range(4000):
        fcntl.lockf(held[-1], fcntl.LOCK_EX, 1, 2 * place)
        count += 1
print(f"{count} locks: slab grew by {slab() - start} MiB, {time.process_time():.0f} s of CPU time")
"""
NAMES = """
count = 0
with contextlib.suppress(OSError):
    while True:
        os.symlink("x" * 120, "n" * 240 + f"{count}")
        count += 1
print(f"{count} links: slab grew by {slab() - start} MiB")
"""
MAPPED = """
libc = ctypes.CDLL(None)
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 5]
free = lambda: os.statvfs(".").f_bavail * os.statvfs(".").f_frsize
before = free()
for _ in range(24):
    with open("file", "w+b", buffering=0) as file:
        os.unlink("file")
        file.write(bytes(30 << 20))
        os.fsync(file)
        held.append(libc.mmap(None, 4096, 1, 1, file.fileno(), 0))
time.sleep(1)
print(f"{(before - free()) / 1e6:.0f} MB of disk")
"""


CASES = {"sockets": SOCKETS, "pipes": PIPES, "epoll": EPOLL, "locks": LOCKS, "names": NAMES, "mapped": MAPPED}


def main(argv: list[str] | None = None) -> dict[str, str]:
    """Each case in a sandbox with 1 GiB of memory and 64 MiB of folder; the last one without a sized folder."""
    given = parser_of(__doc__, CASES).parse_args(argv)
    found = {}
    for name in given.parts:
        folder = tempfile.mkdtemp(prefix="basis_rl_inside")
        policy = policy_in(folder, file_bytes=32 << 20, folder_bytes=64 << 20, temporary=True)
        kind = "without namespaces" if name == "mapped" else "all"
        before = BEFORE.replace("> 8", "> 0.1") if given.quick else BEFORE
        command = sandboxed([sys.executable, "-c", before + CASES[name]], policy, kinds()[kind])
        done = subprocess.run(
            command, env=environment(folder), capture_output=True, text=True, start_new_session=True, check=False
        )
        found[name] = done.stdout.strip() or done.stderr[-500:]
        print(f"{name}:", found[name], flush=True)
        remove_folder(folder)
    return found


if __name__ == "__main__":
    main()
