"""Sends weights to an engine server: the producer is rank 0 of a process group, its workers are the other ranks.

Guarantees:
1. the group is built like the servers build theirs: a TCPStore at rank 0 under the prefix of the group's name, then
   torch's own helper; every broadcast is uint8, from rank 0;
2. every wait is bounded: operations that the backend cannot interrupt go on in a daemon thread;
3. a failure is final: the group must be closed, and a new one needs another name;
4. torch is imported by `listen`, not before. `close` frees everything that `listen` and `join` took.
`gloo` reads host memory in place; `nccl` and `hccl` copy it to this process's device first. They have no
authentication: use an isolated network. Only Gloo was ever run.

`pieces` cuts a bucket for engines that take tensors back to back, without the padding between them.

Example: tensors a U8 `[3]` at 0, b F32 `[2]` at 4, c F32 `[1]` at 12 of one bucket are two pieces: `a` (bytes 0..3)
and `b c` (bytes 4..16), because between a and b there is a byte of padding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from asyncrl.errors import ConfigError, WorkError
from asyncrl.wire import Tensor
from weightsync.plan.buckets import ITEM_BYTES
from weightsync.transports.worker_thread import Worker

T = TypeVar("T")
END_S = 2.0  # a healthy group ends at once
LISTEN_S = 120.0  # torch is imported meanwhile
BACKENDS = ("gloo", "nccl", "hccl")


def pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors of one bucket, cut where they are not back to back, or would not be aligned to their item size in
    memory that begins with the first tensor of their piece."""
    cut: list[list[Tensor]] = []
    first = end = 0
    for tensor in tensors:
        if not cut or tensor.offset != end or (tensor.offset - first) % ITEM_BYTES[tensor.dtype]:
            cut.append([])
            first = tensor.offset
        cut[-1].append(tensor)
        end = tensor.offset + tensor.nbytes
    return cut


class GroupSender:
    """One group. `listen`, `join`, any number of `send`, `close`; none of them after a failure but `close`."""

    def __init__(
        self,
        name: str,
        *,
        workers: int,
        backend: str = "gloo",
        host: str = "",
        timeout_s: float = 60.0,
        device: str = "",
    ) -> None:
        """`workers` is the number of ranks 1 and above; `host` is the address of this rank for them (empty: loopback);
        `timeout_s` bounds `join` and each `send`.

        Raises:
            ConfigError: `config.type` for another backend.
        """
        if backend not in BACKENDS:
            raise ConfigError("config.type", f"group backend {backend!r} is not one of {', '.join(BACKENDS)}")
        self.name = name
        self.host = host or "127.0.0.1"
        self.size = 1 + workers
        self.backend = backend
        self.port = 0
        self._device = device
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: Any = None
        self._place: Any = None
        self._failed = ""
        self._worker: Worker | None = None

    async def listen(self) -> int:
        """Open the store; its port.

        Raises:
            ConfigError: `config.network` if this host lacks the address, `config.extra` without torch or backend.
        """
        self._worker = Worker(f"group-{self.name}")
        self.port = await self._do("no store", self._open, within_s=LISTEN_S)
        return self.port

    def _open(self) -> int:
        try:
            from weightsync.transports.process_groups import Place, group_maker, listening_store
        except ImportError as error:
            raise ConfigError("config.extra", f"a process group needs torch: {error}", where=self.name) from None
        group_maker(self.backend)
        self._place = Place(self.backend, device=self._device)
        self._store = listening_store(self.host, timeout=timedelta(seconds=self._timeout_s), where=self.name)
        return int(self._store.port)

    async def join(self) -> None:
        """Build the group; the workers must do so meanwhile. Raises `engine.broken`."""
        await self._do("the group was not built", self._build)

    def _build(self) -> None:
        from producers.engines.process_group import build_group

        timeout = timedelta(seconds=self._timeout_s)
        self._group = build_group(self.name, self._store, rank=0, size=self.size, backend=self.backend, timeout=timeout)

    async def send(self, data: memoryview) -> None:
        """Broadcast these bytes; they may change after this returns. Raises `engine.broken`."""
        if data.nbytes:
            await self._do(f"{data.nbytes} bytes were not sent", lambda: self._broadcast(data))

    def _broadcast(self, data: memoryview) -> None:
        self._group.broadcast(self._place.send(data), 0).wait(timedelta(seconds=self._timeout_s))

    async def _do(self, what: str, work: Callable[[], T], *, within_s: float = 0.0) -> T:
        """Run it on the group's thread within the limit; a failure is remembered."""
        if self._worker is None or self._failed:
            raise WorkError("engine.broken", f"group {self.name}: {self._failed or 'not listening'}")
        self._failed = what  # also if this wait is cancelled
        limit_s = within_s or self._timeout_s
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(self._worker.submit(work)), limit_s + END_S)
        except TimeoutError:
            self._failed = f"{what} within {limit_s:g} s"
            raise WorkError("engine.broken", f"group {self.name}: {self._failed}") from None
        except RuntimeError as error:  # DistError and errors of the backends
            self._failed = f"{what}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            raise WorkError("engine.broken", f"group {self.name}: {self._failed}") from None
        self._failed = ""
        return result

    async def close(self) -> None:
        """Leave the group and close the store; a hanging operation ends by the backend's own limit."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.close, self._end, within_s=END_S)

    def _end(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is None:
            return
        from torch.distributed import distributed_c10d as c10d

        with suppress(RuntimeError):  # if it is broken already
            if self._failed:
                group.abort()
        with suppress(RuntimeError, ValueError):
            c10d.destroy_process_group(group)
