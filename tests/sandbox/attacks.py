"""Runs inside: tries to get out, in every way it knows. Prints what came of each as JSON, null where it succeeded.

Attacks that a sandbox answers by killing all of it can report nothing. They are in ``test_limits.py``: too many
processes and threads, memory, CPU time, files (with a name and without), and what is to outlive the command.
"""

import ctypes
import fcntl
import functools
import json
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading

libc = ctypes.CDLL(None, use_errno=True)
target = json.loads(sys.argv[1])
owner, outside = target["owner"], target["outside"]


def call(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in arguments]) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write(path):
    def attempt():
        with open(path, "w") as file:
            file.write("x")

    return attempt


def read(path):
    def attempt():
        with open(path, "rb") as file:
            assert file.read(1)

    return attempt


def connect(family, address, kind=socket.SOCK_STREAM):
    def attempt():
        with socket.socket(family, kind) as end:
            end.settimeout(2)
            end.connect(address)
            end.send(b"x")

    return attempt


def listen():
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        end.listen()


def datagram_pair():
    first, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    first.sendto(b"x", target["datagrams"])


def io_signal():
    """Has the kernel send SIGKILL to the owner, on our behalf, when a pipe becomes readable."""
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETOWN, owner)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")


def tell_of_file(command, kind, path="notes 2"):
    """Lease it, or be told of what happens in it. One of our own, which nobody else can forbid."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, command, kind)
    finally:
        os.close(descriptor)


def unread_bytes(buffer_size=None):
    """What a socket holds, with what the kernel adds to it, when nobody reads what is sent."""
    first, second = socket.socketpair()
    with first, second:
        if buffer_size is not None:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_size)
        first.setblocking(False)
        try:
            while True:
                first.send(bytes(1 << 15))
        except BlockingIOError:
            return struct.unpack("i", fcntl.ioctl(first, termios.TIOCOUTQ, bytes(4)))[0]


def larger_socket_buffer():
    """Twice the default where the machine grants no more; up to twice ``net.core.wmem_max``."""
    assert unread_bytes(1 << 24) > 1.5 * unread_bytes()


def lock_of_an_open_file(command):
    with open("notes 2", "r+b") as file:
        fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))


def zero_device():
    with open("/dev/zero", "rb") as device:
        mmap.mmap(device.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ).close()


def pages_in_a_pipe(name):
    """By splice and its like: they stay in memory when the mapping or the file that they are from has gone."""
    reader, writer = os.pipe()
    source = os.open("notes 2", os.O_RDONLY)
    piece = ctypes.create_string_buffer(1)
    pieces = ctypes.create_string_buffer(struct.pack("@PN", ctypes.addressof(piece), 1))
    other, end = os.pipe()
    os.write(end, b"x")
    arguments = {
        "splice": (275, source, 0, writer, 0, 1, 0),
        "tee": (276, other, writer, 1, 0),
        "vmsplice": (278, writer, ctypes.addressof(pieces), 1, 0),
        "sendfile": (40, writer, source, 0, 1),
    }
    try:
        call(*arguments[name])
    finally:
        for descriptor in (reader, writer, source, other, end):
            os.close(descriptor)


def socket_filter():
    first, second = socket.socketpair()
    with first, second:
        accept_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0xFFFF))
        program = struct.pack("@HP", 1, ctypes.addressof(accept_all))
        first.setsockopt(socket.SOL_SOCKET, 26, program)


def socket_option(number, level=socket.SOL_SOCKET):
    """Raises it, by the system call itself."""
    first, second = socket.socketpair()
    with first, second:
        value = ctypes.c_int(1 << 24)
        before = first.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        call(54, first.fileno(), level, number, ctypes.addressof(value), 4)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > before


attacks = {
    "tcp": connect(socket.AF_INET, ("127.0.0.1", target["tcp"])),
    "udp": connect(socket.AF_INET, ("127.0.0.1", target["udp"]), socket.SOCK_DGRAM),
    "dns": lambda: socket.getaddrinfo("example.org", 80),
    "abstract socket": connect(socket.AF_UNIX, target["abstract"]),
    "path socket": connect(socket.AF_UNIX, target["path"]),
    "datagrams": datagram_pair,
    "listen": listen,
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).getsockname(),
    "write outside": write(f"{outside}/new"),
    "overwrite": write(f"{outside}/secret"),
    **{f"write {place}": write(f"{place}/basis_rl_sandbox_test") for place in ("/tmp", "/dev/shm")},
    **{f"write {place}": write(f"{target[place]}/basis_rl_sandbox_test") for place in ("home", "project")},
    "write sysctl": lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)),
    "mkdir": lambda: os.mkdir(f"{outside}/folder"),
    "unlink": lambda: os.unlink(f"{outside}/unlink me"),
    "rename": lambda: os.rename(f"{outside}/rename me", "mine"),
    "link": lambda: os.link(f"{outside}/secret", "linked"),
    "symlink": lambda: os.symlink("/", f"{outside}/link"),
    "chmod": lambda: os.chmod(f"{outside}/secret", 0o777),
    "utime": lambda: os.utime(f"{outside}/secret", (0, 0)),
    "truncate": lambda: os.truncate(f"{outside}/secret", 0),
    "chown": lambda: os.chown(f"{outside}/secret", os.getuid(), os.getgid()),
    "setxattr": lambda: os.setxattr(f"{outside}/secret", "user.x", b"1"),
    "read outside": read(f"{outside}/secret"),
    "read by link": lambda: (os.symlink(f"{outside}/secret", "seen"), read("seen")()),
    "list outside": lambda: os.listdir(outside),
    "environ": read(f"/proc/{owner}/environ"),
    "cmdline": read(f"/proc/{owner}/cmdline"),
    "memory": lambda: read(f"/proc/{owner}/mem")(),
    "descriptors": lambda: os.listdir(f"/proc/{owner}/fd"),
    "root of owner": lambda: os.listdir(f"/proc/{owner}/root"),
    "monitor's environ": read(f"/proc/{os.getppid()}/environ"),
    "kill owner": lambda: os.kill(owner, signal.SIGKILL),
    "kill monitor": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "kill group": lambda: os.killpg(os.getpgid(owner), signal.SIGKILL),
    "prlimit": lambda: resource.prlimit(owner, resource.RLIMIT_CPU, (1, 1)),
    "affinity": lambda: os.sched_setaffinity(owner, {0}),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, owner, 19),
    "setuid": lambda: (os.setuid(12345), os.setgid(12345)),
    "chroot": lambda: os.chroot("."),
    "mknod": lambda: os.mknod("disk", 0o660 | 0o060000, os.makedev(8, 0)),
}
unheld = {"tcp", "udp", "abstract socket", "write outside", "unlink", "utime", "read outside", "environ", "prlimit"}
by_seccomp = {
    "ptrace": lambda: call(101, 16, owner, 0, 0),
    "user namespace": lambda: call(272, 0x10000000),
    "clone namespace": lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0),
    "mount": lambda: libc.mount(b"none", b".", b"tmpfs", 0, None) and call(165, 0, 0, 0, 0, 0),
    "io_uring": lambda: call(425, 1, 0),
    "keyctl": lambda: call(250, 0, -3, 1),
    "bpf": lambda: call(321, 0, 0, 0),
    "perf": lambda: call(298, 0, 0, 0, 0, 0),
    "shared memory": lambda: call(29, 12345, 4096, 0o1600),
    "x32": lambda: call(0x40000000 + 39),
    "memory file": lambda: os.memfd_create("x"),
    "secret memory file": lambda: call(447, 0),
    "larger socket buffer": larger_socket_buffer,
    "larger receive buffer": lambda: socket_option(socket.SO_RCVBUF),
    "larger receive buffer by a wide number": lambda: socket_option(1 << 32 | socket.SO_RCVBUF, 1 << 32 | 1),
    "program on a socket": socket_filter,
    "shared memory without a name": lambda: mmap.mmap(-1, 4096),
    "shared memory without a name, by wide flags": lambda: call(9, 0, 4096, 3, 1 << 32 | 0x21, -1, 0),
    "shared memory of a device": zero_device,
    **{name: functools.partial(pages_in_a_pipe, name) for name in ("splice", "tee", "vmsplice", "sendfile")},
    "rules of Landlock": lambda: call(444, ctypes.addressof(ctypes.create_string_buffer(struct.pack("Q", 1))), 8, 0),
    "inotify": lambda: call(253),
    "inotify with flags": lambda: call(294, 0),
    "lease": lambda: tell_of_file(fcntl.F_SETLEASE, fcntl.F_WRLCK),
    "lease by a wide number": lambda: call(72, os.open("notes 2", os.O_RDONLY), (1 << 32) + fcntl.F_SETLEASE, 1),
    "lock of an open file": lambda: lock_of_an_open_file(37),
    "lock of an open file, waited for": lambda: lock_of_an_open_file(38),
    "notices of a folder": lambda: tell_of_file(fcntl.F_NOTIFY, fcntl.DN_CREATE, "."),
    "asynchronous input": lambda: call(206, 8, ctypes.addressof(ctypes.c_long(0))),
    "io priority of the group": lambda: call(251, 2, 0, 3 << 13),
    "io priority of the user": lambda: call(251, 3, 0, 3 << 13),
}


def attempt(attack):
    try:
        attack()
    except (OSError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def harmless():
    """What must still work."""
    with open("notes", "w") as file:
        file.write("x")
    os.rename("notes", "notes 2")
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=lambda: open("/dev/null", "w").write("x"))  # noqa: SIM115
    thread.start()
    thread.join()
    first, second = socket.socketpair()
    first.send(b"x")
    assert second.recv(1) == b"x"
    return sorted(os.listdir("."))


def lock(kind, how):
    """Of a file that may be read, so that others who want the same have to wait."""
    with open(os.__file__) as file:
        kind(file, how)


def there_and_back():
    os.chdir(outside)
    os.chdir(os.environ["HOME"])


# What docs/security.md says is possible: by this much, and no more, is known about what lies outside.
known = {
    "stat": lambda: os.stat(f"{outside}/secret").st_size,
    "readlink": lambda: os.readlink(f"{outside}/link there"),
    "getxattr": lambda: os.getxattr(f"{outside}/secret", "user.basis_rl").decode() if target["attribute"] else None,
    "access": lambda: os.access(f"{outside}/secret", os.F_OK),
    "access to nothing": lambda: os.access(f"{outside}/not there", os.F_OK),
    "chdir": there_and_back,
    "flock": lambda: lock(fcntl.flock, fcntl.LOCK_EX),
    "lockf": lambda: lock(fcntl.lockf, fcntl.LOCK_SH),
    "exclusive lockf": lambda: attempt(lambda: lock(fcntl.lockf, fcntl.LOCK_EX)),
}


def status(name):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(f"{name}:"))


report = {
    "harmless": harmless(),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "capabilities": [status(name) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")],
    "environment": dict(os.environ),
    "known": {name: what() for name, what in known.items()},
    "cwd": os.getcwd(),
}
if target["seccomp"] and os.uname().machine == "x86_64":  # by number; where it succeeds, clone makes two of us
    attacks |= by_seccomp
if not target["held"]:  # nothing that this machine would not get over
    attacks = {name: attack for name, attack in attacks.items() if name in unheld}
report["attacks"] = {name: attempt(attack) for name, attack in attacks.items()}
if target["held"]:  # these two may seem to succeed; the owner lives, and so does its neighbour
    attempt(io_signal)
    if os.getuid() != 0:  # of a sandbox that leaks, root would kill the machine
        attempt(lambda: os.kill(-1, signal.SIGKILL))
print(json.dumps(report))
