"""Who listens where, from /proc: what a port scan from inside the host would find."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}


class Listener(NamedTuple):
    """One socket that waits for others."""

    kind: str
    address: str
    port: int
    inode: str

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listeners(pids: set[int]) -> list[Listener]:
    """TCP sockets that listen and UDP sockets that are bound, of these processes."""
    inodes = {inode for pid in pids for inode in inodes_of(pid)}
    found = []
    for kind, state in LISTENING.items():
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in inodes:
                address, port = parsed(words[1])
                found.append(Listener(kind, address, port, words[9]))
    return found


def inodes_of(pid: int) -> set[str]:
    """Sockets of a process."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:  # it has ended
        return set()
    return found


def parsed(text: str) -> tuple[str, int]:
    """`0100007F:1F90` is 127.0.0.1:8080: words of 32 bits in the order of the machine."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16)
