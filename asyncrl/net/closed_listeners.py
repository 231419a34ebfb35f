"""Listening sockets of libraries, closed to later clients once the processes that had to meet are connected.

torch's store and Gloo accept any client and keep its descriptor. They need their listeners only while ranks connect to
each other. A packet filter on a listener then drops every further connection; those that exist are not touched.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>
RETURN_NOTHING = (0x06, 0, 0, 0)  # one instruction of classic BPF: keep 0 bytes of the packet


class _Instruction(ctypes.Structure):
    """`struct sock_filter`."""

    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


@contextmanager
def closed_afterwards(report_open: Callable[[], object]) -> Iterator[None]:
    """Close to later connections what this process begins to listen on inside the block.

    The block must return only when everybody is connected, and no other thread may open a listener meanwhile. It is
    for Linux; elsewhere, in containers that forbid such filters, and after an error in the block, the listeners stay
    open. `report_open` is called for each that the system does not let close.
    """
    before = _listening()
    yield
    for inode, descriptor in _listening().items():
        if inode not in before:
            try:
                _drop_connections(descriptor)
            except OSError:
                report_open()


def _listening() -> dict[int, int]:
    """Sockets of this process that accept TCP connections: inode -> descriptor."""
    found = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and _accepts(int(name)):
                    found[os.fstat(int(name)).st_ino] = int(name)
    return found


def _accepts(descriptor: int) -> bool:
    borrowed = socket.socket(fileno=descriptor)
    try:
        over_ip = borrowed.family in (socket.AF_INET, socket.AF_INET6)
        return over_ip and borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    finally:
        borrowed.detach()


def _drop_connections(descriptor: int) -> None:
    instruction = _Instruction(*RETURN_NOTHING)
    program = _Program(1, ctypes.pointer(instruction))
    borrowed = socket.socket(fileno=descriptor)
    try:
        borrowed.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, bytes(program))
    finally:
        borrowed.detach()
