"""The learner's ranks as one gang: joining, orders from rank 0, and sums over ranks.

Guarantees:
1. orders and batches are msgpack and raw arrays on CPU tensors over Gloo, never pickled objects;
2. every wait has the process group's timeout, which is longer than the longest wait for a batch;
3. a gang of one opens no port; ranks on one host meet on loopback only;
4. batches are distributed by share and sums count once per share, in every layout (`learners.gang.topology`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config import Config
from asyncrl.net.addresses import LOOPBACK
from asyncrl.net.closed_listeners import closed_afterwards
from asyncrl.runtime.device import Device
from learners.gang.topology import Topology


def _store(rank: int, size: int, *, timeout_s: float) -> Any:
    """Create the store where ranks of one host meet: in memory for one rank, otherwise on a loopback port.

    None if the ranks are on several hosts, or if torchrun has its own store: then torch connects them.
    """
    known: Any = dist
    if size == 1:
        return known.HashStore()
    host, shared = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared or host not in LOOPBACK:
        return None
    port, timeout = int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s)
    if rank:
        return known.TCPStore(host, port, size, False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return known.TCPStore(
        host, port, size, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Gang:
    """This process among its ranks. `lead`: rank 0; `topology`: its place (by default every rank is a share)."""

    def __init__(self, rank: int, size: int, device: Device, topology: Topology | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.topology = topology or Topology(rank, size)
        self._group: dist.ProcessGroup | None = None  # for messages; None: the group of all ranks
        self._meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}

    @property
    def lead(self) -> bool:
        """Whether this process talks to the services."""
        return self.topology.lead

    @property
    def shares(self) -> int:
        """Number of shares of a batch."""
        return self.topology.shares

    @staticmethod
    def join(config: Config, *, anywhere: bool = False) -> Gang:
        """Join the process group that torchrun (or `learners.main`) describes in the environment.

        `anywhere`: a gang of one may replace any layout, for reading checkpoints.

        Raises:
            ConfigError: `config.conflict`: the ranks do not divide into `[learner.parallel]`.
        """
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, default)
        device = Device.find(config.learner.device, index=int(os.environ["LOCAL_RANK"]))
        longest = waiting_s(config)
        # A single rank without torchrun opens no port.
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        plain = anywhere and size == 1
        topology = (
            Topology(rank, size) if plain else Topology.from_config(config.learner.parallel, rank=rank, size=size)
        )
        joined = Gang(rank, size, device, topology)
        with joined.meeting():
            found = None if "MASTER_PORT" not in os.environ and size > 1 else _store(rank, size, timeout_s=longest)
            store = {"store": found, "rank": rank, "world_size": size} if found is not None else {}
            dist.init_process_group(device.group_string, timeout=timedelta(seconds=longest), **store)
        return joined

    def meeting(self) -> AbstractContextManager[None]:
        """A block in which ranks form a group. Afterwards the listeners of torch accept no further client.

        Only on CPUs: NCCL and HCCL connect later, too.
        """
        return closed_afterwards(_warn_of_listeners) if self.size > 1 and self.device.type == "cpu" else nullcontext()

    def clone(self, *, timeout_s: float) -> Gang:
        """Return the same ranks for another thread, with a process group of their own. Collective."""
        made = Gang(self.rank, self.size, self.device, self.topology)
        if self.size > 1:
            with self.meeting():
                made._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return made

    def leave(self) -> None:
        """Wait for the others and leave the group."""
        dist.barrier()  # bounded: the timeout of the group
        dist.destroy_process_group()

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return the ranks as a grid with these dimensions, slowest first; cached. Collective."""
        key = tuple(sizes.items())
        if key not in self._meshes:
            names = tuple(sizes)
            with self.meeting():
                self._meshes[key] = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=names)
        return self._meshes[key]

    def barrier(self) -> None:
        dist.barrier()  # bounded: the timeout of the group

    def share(self, data: bytes | None) -> bytes:
        """Return the bytes of rank 0 on every rank."""
        if self.size == 1:
            return data or b""
        size = torch.tensor([len(data or b"")], dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        content = _tensor(data or b"") if self.lead else torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            dist.broadcast(content, 0, group=self._group)
        return content.numpy().tobytes()

    def scatter(self, shares: Sequence[bytes] | None) -> bytes:
        """Return each rank's own part of the `shares` of rank 0."""
        if self.size == 1:
            return (shares or [b""])[0]
        sizes = torch.tensor([len(part) for part in shares] if shares else [0] * self.shares, dtype=torch.int64)
        dist.broadcast(sizes, 0)
        if self.lead:
            assert shares is not None
            for rank in range(1, self.size):
                dist.send(_tensor(shares[self.topology.peer(rank).share]), rank)
            return shares[self.topology.share]
        content = torch.empty(int(sizes[self.topology.share]), dtype=torch.uint8)
        dist.recv(content, 0)  # bounded: the timeout of the group
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, on every rank; for short texts such as digests."""
        if self.size == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=self._group)
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, _tensor(data + bytes(longest - len(data))), group=self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def gather_shares(self, data: bytes) -> list[bytes]:
        """Return the bytes of the counting rank of every share, by share, on every rank."""
        every = self.gather(data)
        return every if self.shares == self.size else [every[rank] for rank in self.topology.counting]

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return sums over shares; for names that end in `_max`, the maximum over ranks.

        Every counting rank must pass the same names; the others may leave names out.
        """
        if self.size == 1:
            return dict(sums)
        if self.shares < self.size:
            return self._total_of_shares(sums)
        result: dict[str, float] = {}
        for maximum in (False, True):
            names = sorted(name for name in sums if name.endswith("_max") is maximum)
            if names:
                values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
                dist.all_reduce(values, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
                result.update(zip(names, values.tolist(), strict=True))
        return result

    def _total_of_shares(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Like `total` if several ranks have the same share: summed in the order of the shares."""
        every = [
            msgspec.msgpack.decode(part, type=dict[str, float])
            for part in self.gather(msgspec.msgpack.encode(dict(sums)))
        ]
        counting = [every[rank] for rank in self.topology.counting]
        largest = {
            name: float(np.max([one[name] for one in every if name in one]))  # not max(): it may hide a NaN
            for one in every
            for name in one
            if name.endswith("_max")
        }
        return {name: sum(one[name] for one in counting) for name in counting[0] if name not in largest} | largest


def waiting_s(config: Config) -> float:
    """Return the timeout of collectives: longer than the longest wait for a batch, or for a checkpoint at the start."""
    return max(config.learner.batch_timeout_s, config.run.hang_timeout_s, config.run.start_timeout_s) + 120


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@cache
def _warn_of_listeners() -> None:
    """Once in a process: ranks meet several times."""
    print(
        "learner: warning: this system forbids packet filters, so the ports of torch's store and Gloo stay open: any "
        "process that reaches them can write to the store and use up descriptors (docs/security.md, Connections)",
        flush=True,
    )


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or does not answer.

    Gloo raises a plain RuntimeError that names its source file; NCCL and the store raise `DistError`.
    """
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
