"""A filter of system calls: what a computation never needs is refused, with an errno.

A list of what is refused, not of what is allowed: interpreters and libraries call too much that is harmless. What the
list is for: no sockets but pairs of connected ones; no looking into or steering other processes, no watching of files;
no memory that no limit counts; nothing that has been the way out of containers (namespaces, mounts, bpf, io_uring,
keyrings, ...); and, as far as Landlock and namespaces do not see to it, no signals to others, no change of owners and
modes, no leaving the process group.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import struct
from typing import NamedTuple

from basis_rl.sandbox.kernel import MACHINE, checked, syscall

_Table = dict[str, tuple[int | None, int | None]]
"""By name: its number on x86_64, on aarch64. None: not there."""

_SOCKETS: _Table = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
}  # fmt: skip
_PROCESSES: _Table = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
_SYSTEM: _Table = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "open_tree_attr": (467, 467), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "syslog": (103, 116), "vhangup": (153, 58), "fanotify_init": (300, 262), "uselib": (134, None),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "io_setup": (206, 0),
}  # fmt: skip
# And message queues, through which data leaves the sandbox without a file.
_SHARED_MEMORY: _Table = {
    "mq_open": (240, 180), "mq_unlink": (241, 181), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186),
    "msgctl": (71, 187), "msgsnd": (69, 189), "msgrcv": (70, 188),
}  # fmt: skip
# Files in memory: they are in no folder, so the folder's limit does not count them. ENOSYS: libraries then take a file.
_MEMORY_FILES: _Table = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
# They keep pages in a pipe or a socket, each of up to 2 MB, where the kernel counts one byte or one place of the pipe;
# the mapping or the file that the page is from can go. Callers fall back on reading and writing.
_KEPT_PAGES: _Table = {
    "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "sendfile": (40, 71),
}  # fmt: skip
# Rules that are never enforced take kernel memory, without a limit. What Landlock holds here is in force by now.
_LANDLOCK: _Table = {
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip
_GROUP: _Table = {"setsid": (112, 157), "setpgid": (109, 154)}
_METADATA: _Table = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "file_setattr": (469, 469), "truncate": (76, 45),
}  # fmt: skip
_SIGNALS: _Table = {
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}  # fmt: skip
_BY_ARGUMENT: _Table = {
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None), "socketpair": (53, 199),
    "ioctl": (16, 29), "prlimit64": (302, 261), "tgkill": (234, 131), "fcntl": (72, 25), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "setsockopt": (54, 208),
    "mmap": (9, 222),
}  # fmt: skip
# Allowed for the calling process (0) only.
_OF_ITSELF = ("prlimit64", "sched_setscheduler", "sched_setparam", "sched_setattr", "sched_setaffinity")
_AS_IF_MISSING = _MEMORY_FILES | _KEPT_PAGES | _LANDLOCK
_NUMBERS = (
    _SOCKETS | _PROCESSES | _SYSTEM | _SHARED_MEMORY | _AS_IF_MISSING | _GROUP | _METADATA | _SIGNALS | _BY_ARGUMENT
)

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32_BIT = 0x40000000
_SECCOMP = (317, 277)
_NEW_NAMESPACES = 0x7E020000
_TIOCSTI = 0x5412
_FIOSETOWN = 0x8901
_SIOCSPGRP = 0x8902
_FS_IOC_SETFLAGS = 0x40086602
_FS_IOC_FSSETXATTR = 0x401C5820
# The one of these commands that Python's fcntl does not have.
_F_SETOWN_EX = 15
_AF_UNIX = 1
_SOCK_STREAM = 1
_SOL_SOCKET = 1
_SO_SNDBUF = 7
_SO_RCVBUF = 8
_SO_ATTACH_FILTER = 26
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33

# The mask under which all of an argument's low 32 bits count.
_ALL = 0xFFFFFFFF

_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NUMBER_AT = 0
_ARCH_AT = 4
_ARGUMENTS_AT = 16


class Refusal(NamedTuple):
    """A system call that fails with `error` if the low 32 bits of all arguments named in `when` are as they say.

    With `error` 0 it does nothing, and says that it succeeded. A condition is (number of the argument, mask, ``==``,
    ``!=`` or ``&``, value).
    """

    name: str
    when: tuple[tuple[int, int, str, int], ...] = ()
    error: int = errno.EPERM


def refusals(*, namespaces: bool, read_only_mounts: bool, scoped_signals: bool, one_process: bool) -> list[Refusal]:
    """What is refused, given what else holds the process.

    Args:
        namespaces: own processes and IPC: what leaves the process group dies with the namespace, and sees no others.
        read_only_mounts: metadata of files outside cannot be changed.
        scoped_signals: signals to processes outside are refused (Landlock 6), or namespaces hide them.
        one_process: no new processes, no threads.
    """
    shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    result = [Refusal(name) for name in (*_SOCKETS, *_PROCESSES, *_SYSTEM, *_SHARED_MEMORY)]
    result += [Refusal(name, error=errno.ENOSYS) for name in _AS_IF_MISSING]
    result += [
        Refusal("clone", ((0, _ALL, "&", _NEW_NAMESPACES),)),
        # Its flags are in memory, where a filter cannot look; libraries fall back on clone.
        Refusal("clone3", error=errno.ENOSYS),
        Refusal("socketpair", ((0, _ALL, "!=", _AF_UNIX),)),
        # Only connected pairs: a datagram can be addressed to a socket of somebody else.
        Refusal("socketpair", ((1, 0xF, "!=", _SOCK_STREAM),)),
        # Its pages stay as long as one of them is mapped; the rest does not count for the process once it is unmapped.
        Refusal("mmap", ((3, shared, "==", shared),)),
        # What a socket holds unread counts for no process, so its buffer keeps the size that the machine gives. Setting
        # the first two succeeds and does nothing: no caller expects an error there (anyio sets them to 1).
        *(_socket_option(option, error=0) for option in (_SO_SNDBUF, _SO_RCVBUF)),
        *(_socket_option(option) for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_ATTACH_FILTER)),
        Refusal("ioctl", ((1, _ALL, "==", _TIOCSTI),)),
        Refusal("setpriority", ((0, _ALL, "!=", 0),)),
        Refusal("setpriority", ((1, _ALL, "!=", 0),)),
        *(Refusal(name, ((0, _ALL, "!=", 0),)) for name in _OF_ITSELF),
        # Of a process, not of a group or of all that the user runs.
        Refusal("ioprio_set", ((0, _ALL, "!=", 1),)),
        Refusal("ioprio_set", ((1, _ALL, "!=", 0),)),
        # A lease on a file outside that the command may read holds up whoever opens it for writing; notices tell of it.
        *(Refusal("fcntl", ((1, _ALL, "==", command),)) for command in (fcntl.F_SETLEASE, fcntl.F_NOTIFY)),
        # As if the kernel had none. Those of processes end when a descriptor is closed, these stay with a mapping of
        # the file, so that the number of open files does not limit how many there are.
        Refusal("fcntl", ((1, _ALL, "==", fcntl.F_OFD_SETLK),), errno.EINVAL),
        Refusal("fcntl", ((1, _ALL, "==", fcntl.F_OFD_SETLKW),), errno.EINVAL),
    ]
    if one_process:
        result += [Refusal(name, error=errno.EAGAIN) for name in ("fork", "vfork", "clone")]
    if not namespaces:
        result += [Refusal(name) for name in _GROUP]
    if not read_only_mounts:
        result += [Refusal(name) for name in _METADATA]
        result += [Refusal("ioctl", ((1, _ALL, "==", command),)) for command in (_FS_IOC_SETFLAGS, _FS_IOC_FSSETXATTR)]
    if not namespaces and not scoped_signals:
        result += [Refusal(name) for name in _SIGNALS]
        result += [Refusal("ioctl", ((1, _ALL, "==", command),)) for command in (_FIOSETOWN, _SIOCSPGRP)]
        owning = (fcntl.F_SETOWN, fcntl.F_SETSIG, _F_SETOWN_EX)
        result += [Refusal("fcntl", ((1, _ALL, "==", command),)) for command in owning]
    return result


def _socket_option(option: int, error: int = errno.EPERM) -> Refusal:
    return Refusal("setsockopt", ((1, _ALL, "==", _SOL_SOCKET), (2, _ALL, "==", option)), error)


def assemble(rules: list[Refusal], machine: int, own_pid: int | None = None) -> bytes:
    """The program (``struct sock_filter[]``) that refuses `rules`, and every call of another architecture.

    Args:
        rules: tried in their order.
        machine: column of the table.
        own_pid: signals by tgkill go to this process only; None: to any.
    """
    if own_pid is not None:
        rules = [*rules, Refusal("tgkill", ((0, _ALL, "!=", own_pid),))]
    refuse = _ERRNO | errno.EPERM
    code = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, refuse)]
    code.append((_LOAD, 0, 0, _NUMBER_AT))
    if machine == 0:
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, refuse)]
    for rule in rules:
        number = _NUMBERS[rule.name][machine]
        if number is not None:
            code += _refuse(number, rule)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _refuse(number: int, rule: Refusal) -> list[tuple[int, int, int, int]]:
    tests: list[tuple[int, int, int, int]] = []
    for position, (argument, mask, relation, value) in enumerate(rule.when):
        # Over the remaining tests and the refusal.
        out = 3 * (len(rule.when) - 1 - position) + 1
        jump = {"==": (_EQUAL, 0, out), "!=": (_EQUAL, out, 0), "&": (_ANY_BIT, 0, out)}[relation]
        tests += [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (_AND, 0, 0, mask), (*jump, value)]
    body = [*tests, (_RETURN, 0, 0, _ERRNO | rule.error)]
    if tests:
        # The tests have overwritten it.
        body.append((_LOAD, 0, 0, _NUMBER_AT))
    return [(_EQUAL, 0, len(body), number), *body]


def install(program: bytes) -> None:
    """For this process and all that it starts. Needs no_new_privs."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    assert MACHINE is not None
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = ctypes.byref(Program(len(program) // 8, ctypes.addressof(buffer)))
    set_mode_filter = 1
    checked(syscall(_SECCOMP[MACHINE], set_mode_filter, 0, pointer), "seccomp")
