"""The workers' side of a weight update group, for the stand-in servers: as servers build it, in words of its own.

`GroupMember(...)` blocks until the group is there; `receive(size)` is the next broadcast of that many bytes. Both end
within `timeout_s`. Called in a thread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d


class GroupMember:
    """One rank above 0."""

    def __init__(
        self, *, host: str, port: int, rank: int, size: int, name: str, backend: str = "gloo", timeout_s: float = 30.0
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        rendezvous = c10d.rendezvous(f"tcp://{host}:{port}", rank, size, timeout=limit)
        store, rank, size = next(rendezvous)
        store.set_timeout(limit)
        self._limit = limit
        self.name = name
        self.group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=limit
        )
        c10d._world.pg_group_ranks[self.group] = {place: place for place in range(size)}

    def receive(self, size: int) -> torch.Tensor:
        """uint8 `[size]` from rank 0."""
        tensor = torch.empty(size, dtype=torch.uint8)
        c10d.broadcast(tensor, src=0, group=self.group, async_op=True).wait(self._limit)
        return tensor

    def leave(self) -> None:
        """End the membership."""
        c10d.destroy_process_group(self.group)
