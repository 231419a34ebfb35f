"""Transport `collective`: one broadcast per bucket in a process group of its own (Gloo; a seam for NCCL and HCCL).

The publisher hosts a TCPStore; every formation is a new process group under a prefix of its own (the generation),
never re-used. Steps of a generation:
1. every member sets `here/<rank>` and the publisher waits for all of them, at most a quarter of the deadline;
2. it writes the ranks that came (`group`); who is not among them leaves, the others build the group;
3. one broadcast of a uint8 tensor per bucket, rank 0 sends.
Guarantees: a member that never comes costs a quarter of the deadline, one that dies or stops in the middle fails the
whole generation within half of it; the survivors get a new generation. Nothing waits longer than the deadline.
Gloo has no authentication and listens where the host name resolves to (`GLOO_SOCKET_IFNAME` chooses the interface):
use it on an isolated network. The store listens at `weightsync.collective_host` alone, on a free port.
Imports torch when this file is imported; nobody imports it before the transport is needed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from asyncrl.errors import ConfigError
from asyncrl.wire import Instruction, RoundReply
from weightsync.transports.base import TransportError, Version

#: The names of torch.distributed that type checkers do not see.
dist: Any = torch.distributed
JOIN_SHARE = 0.25  # of the deadline: for members to appear
OPERATION_SHARE = 0.5  # of the deadline: for one broadcast; Gloo cannot be interrupted within it


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


#: Process groups by backend. What a backend needs beyond this (a device tensor per bucket) goes into `_tensor`.
GROUPS: dict[str, Callable[[Any, int, int, timedelta], Any]] = {"gloo": _gloo}


def group_of(backend: str) -> Callable[[Any, int, int, timedelta], Any]:
    """The maker of process groups. Raises `config.extra` for a backend that this build does not have."""
    if backend not in GROUPS:
        raise ConfigError("config.extra", f"collective backend {backend!r}: only {', '.join(GROUPS)} here")
    return GROUPS[backend]


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=max(value, 0.05))


class CollectiveOutbox:
    """Rank 0: hosts the store, forms groups, broadcasts."""

    def __init__(self, host: str, *, timeout_s: float, backend: str = "gloo") -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._make_group = group_of(backend)
        self._store: Any = None

    def open(self) -> str:
        """Start the store; `host:port`. Raises `config.network` where this host does not have that address."""
        if self._store is None:
            self._store = self._listen()
        return f"{self._host}:{self._store.port}"

    def _listen(self) -> Any:
        try:
            family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((self._host, 0))
            listener.listen(128)
            port = int(listener.getsockname()[1])
        except OSError as error:
            raise ConfigError(
                "config.network", f"cannot listen at {self._host}: {error}", where="weightsync.collective_host"
            ) from None
        return dist.TCPStore(
            self._host, port, None, True, timeout=_seconds(self._timeout_s), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def offer(self, version: Version) -> str:
        """Nothing: members do not pull."""
        return self.open()

    def send(self, reply: RoundReply, blobs: Sequence[memoryview], *, deadline_s: float) -> None:
        """Form the generation and broadcast every bucket. Raises TransportError."""
        self.open()
        deadline = time.monotonic() + deadline_s
        store = dist.PrefixStore(f"ws/{reply.generation}", self._store)
        try:
            present = self._gather(store, sorted(reply.ranks.values()), deadline_s * JOIN_SHARE)
            store.set("group", ",".join(map(str, present)))
            if not present:
                raise TransportError("no member came to the group")
            timeout = _seconds(deadline_s * OPERATION_SHARE)
            group = self._make_group(dist.PrefixStore("pg", store), 0, len(present) + 1, timeout)
            for bucket in filter(len, blobs):
                if time.monotonic() > deadline:
                    raise TransportError(f"not sent within {deadline_s:g} s")
                group.broadcast(_tensor(bucket), 0).wait(timeout)
        except RuntimeError as error:  # DistError and what Gloo raises
            raise TransportError(f"generation {reply.generation}: {error}") from None

    def _gather(self, store: Any, ranks: list[int], within_s: float) -> list[int]:
        """The ranks that came in time."""
        until = time.monotonic() + within_s
        while True:
            present = [rank for rank in ranks if store.check([f"here/{rank}"])]
            if len(present) == len(ranks) or time.monotonic() > until:
                return present
            time.sleep(0.005)

    def close(self) -> None:
        """End the store; members of an open generation fail."""
        self._store = None


class CollectiveInbox:
    """A member of one generation."""

    def __init__(self, instruction: Instruction, *, backend: str = "gloo") -> None:
        assert instruction.manifest is not None
        self._instruction = instruction
        self._sizes = instruction.manifest.bucket_bytes
        self._deadline = time.monotonic() + instruction.deadline_s
        self._operation = _seconds(instruction.deadline_s * OPERATION_SHARE)
        self._make_group = group_of(backend)
        self._group: Any = None
        self._store: Any = None

    def open(self) -> None:
        """Appear at the store, learn who came, build the group."""
        host, _, port = self._instruction.address.rpartition(":")
        rank = self._instruction.rank
        try:
            whole = dist.TCPStore(host, int(port), None, False, timeout=self._operation)
            store = dist.PrefixStore(f"ws/{self._instruction.generation}", whole)
            store.set(f"here/{rank}", "1")
            present = [int(text) for text in store.get("group").decode().split(",") if text]
            if rank not in present:
                raise TransportError(f"came too late to generation {self._instruction.generation}")
            self._store = whole
            self._group = self._make_group(
                dist.PrefixStore("pg", store), present.index(rank) + 1, len(present) + 1, self._operation
            )
        except RuntimeError as error:
            raise TransportError(f"generation {self._instruction.generation}: {error}") from None

    def read(self, number: int) -> memoryview:
        """Take part in the broadcast of bucket `number`."""
        if time.monotonic() > self._deadline:
            raise TransportError(f"bucket {number}: past the deadline")
        data = memoryview(bytearray(self._sizes[number]))
        try:
            if data.nbytes:
                self._group.broadcast(_tensor(data), 0).wait(self._operation)
        except RuntimeError as error:
            raise TransportError(f"bucket {number}: {error}") from None
        return data

    def close(self) -> None:
        """Leave the group."""
        self._group = None
        self._store = None
