"""The filter of system calls of a sandbox: calls that could reach outside of it fail with EPERM.

The program is BPF for the kernel, for x86_64 and aarch64. Guarantees:
1. tracing, other processes' memory, namespaces, mounts, kernel modules, keys, BPF, io_uring, anonymous files (memfd)
   and objects that outlive a process (System V and POSIX queues, shared memory) are refused; sockets are only of the
   families unix, inet and inet6;
2. calls of another architecture end the process; `clone3` returns ENOSYS, so that the C library falls back to `clone`,
   whose flags the filter can read.
It is one layer of several: other machines run without it (`program` is empty there).
"""

from __future__ import annotations

import errno
import platform
import struct

LOAD, EQUAL, AT_LEAST, ANY_OF, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
X32 = 0x40000000
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, pid, net, ipc, uts, cgroup, mount
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
FAMILIES = (1, 2, 10)  # unix, inet, inet6

#: Refused: (name, number on x86_64, number on aarch64); -1: the machine has no such call.
REFUSED: tuple[tuple[str, int, int], ...] = (
    ("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271), ("kcmp", 312, 272),
    ("pidfd_getfd", 438, 438), ("unshare", 272, 97), ("setns", 308, 268), ("mount", 165, 40), ("umount2", 166, 39),
    ("pivot_root", 155, 41), ("chroot", 161, 51), ("open_tree", 428, 428), ("move_mount", 429, 429),
    ("fsopen", 430, 430), ("fsconfig", 431, 431), ("fsmount", 432, 432), ("fspick", 433, 433),
    ("mount_setattr", 442, 442), ("name_to_handle_at", 303, 264), ("open_by_handle_at", 304, 265),
    ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219), ("bpf", 321, 280),
    ("perf_event_open", 298, 241), ("userfaultfd", 323, 282), ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427), ("kexec_load", 246, 104),
    ("kexec_file_load", 320, 294), ("init_module", 175, 105), ("finit_module", 313, 273), ("delete_module", 176, 106),
    ("reboot", 169, 142), ("swapon", 167, 224), ("swapoff", 168, 225), ("acct", 163, 89), ("quotactl", 179, 60),
    ("syslog", 103, 116), ("shmget", 29, 194), ("shmctl", 31, 195), ("shmat", 30, 196), ("msgget", 68, 186),
    ("semget", 64, 190), ("mq_open", 240, 180), ("personality", 135, 92), ("settimeofday", 164, 170),
    ("clock_settime", 227, 112), ("adjtimex", 159, 171), ("clock_adjtime", 305, 266), ("sethostname", 170, 161),
    ("setdomainname", 171, 162), ("vhangup", 153, 58), ("iopl", 172, -1), ("ioperm", 173, -1), ("uselib", 134, -1),
    ("lookup_dcookie", 212, 18), ("move_pages", 279, 239), ("migrate_pages", 256, 238), ("mbind", 237, 235),
    ("set_mempolicy", 238, 237), ("fanotify_init", 300, 262),
    ("memfd_create", 319, 279), ("memfd_secret", 447, 447), ("quotactl_fd", 443, 443),
)  # fmt: skip

#: machine: (its architecture's number, which number of REFUSED, clone, clone3, socket, ioctl)
MACHINES = {
    "x86_64": (0xC000003E, 0, 56, 435, 41, 16),
    "aarch64": (0xC00000B7, 1, 220, 435, 198, 29),
}


def instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`; jumps count the instructions that are skipped."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def refuse(number: int, error: int) -> bytes:
    """`if call == number: fail with error`."""
    return instruction(EQUAL, number, if_false=1) + instruction(RETURN, ERRNO | error)


def argument(number: int, offset: int, tests: bytes) -> bytes:
    """`if call == number:` test one argument; `tests` end in a return."""
    body = instruction(LOAD, offset) + tests
    return instruction(EQUAL, number, if_false=len(body) // 8) + body


def program(machine: str = "") -> bytes:
    """The filter for this machine (or the given one); empty for an unknown machine."""
    if (machine or platform.machine()) not in MACHINES:
        return b""
    architecture, column, clone, clone3, socket, ioctl = MACHINES[machine or platform.machine()]
    allow, denied = instruction(RETURN, ALLOW), instruction(RETURN, ERRNO | errno.EPERM)
    parts = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, architecture, if_true=1),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
        instruction(AT_LEAST, X32, if_false=1),
        denied,
    ]
    for _, *numbers in REFUSED:
        if numbers[column] >= 0:
            parts.append(refuse(numbers[column], errno.EPERM))
    parts.append(refuse(clone3, errno.ENOSYS))
    parts.append(argument(clone, FIRST_ARGUMENT, instruction(ANY_OF, NEW_NAMESPACES, if_false=1) + denied + allow))
    known = b"".join(instruction(EQUAL, family, if_false=1) + allow for family in FAMILIES)
    parts.append(argument(socket, FIRST_ARGUMENT, known + instruction(RETURN, ERRNO | errno.EAFNOSUPPORT)))
    typed = b"".join(instruction(EQUAL, request, if_false=1) + denied for request in TERMINAL_INPUT)
    parts.append(argument(ioctl, SECOND_ARGUMENT, typed + allow))
    return b"".join(parts) + allow
