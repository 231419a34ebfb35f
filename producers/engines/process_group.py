"""The process group in which a producer sends weights (`producers.engines.group_sender`), and a worker's end of it.

Guarantees: both ends build the group alike (a TCPStore at rank 0 under the prefix of the group's name, torch's own
helper); every broadcast is uint8 from rank 0; every wait is bounded. vLLM's own groups are not touched.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d


class Member:
    """This worker in the group."""

    def __init__(self, group: Any, store: Any, device: torch.device) -> None:
        self._group = group
        self._store = store  # the group uses it
        self._device = device

    def receive(self, size: int, *, timeout: timedelta) -> torch.Tensor:
        """The next bytes of rank 0, uint8 `[size]`, on the group's device. Raises RuntimeError."""
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            self._group.broadcast(memory, 0).wait(timeout)
        return memory

    def close(self) -> None:
        with suppress(RuntimeError, ValueError):  # it may be broken
            distributed_c10d.destroy_process_group(self._group)
        self._store = None


def join(
    name: str, *, rank: int, size: int, backend: str, host: str, port: int, timeout: timedelta, device: torch.device
) -> Member:
    """Join the group; blocks until all are there. Raises RuntimeError after `timeout`."""
    stores: Any = torch.distributed
    store = stores.TCPStore(host, port, size, False, timeout=timeout, wait_for_workers=False)
    group = build_group(name, store, rank=rank, size=size, backend=backend, timeout=timeout)
    return Member(group, store, torch.device("cpu") if backend == "gloo" else device)


def build_group(name: str, store: Any, *, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    """Build a group of these processes; blocks until all are there. Raises RuntimeError after `timeout`.

    Torch has no public call for a group of other processes next to the default one.
    """
    c10d: Any = distributed_c10d
    prefixed = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), prefixed, group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group
