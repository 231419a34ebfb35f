"""Process groups for the collective transport: by backend, with the tensors that the backend can carry.

Imports torch. The device layer chooses the backend of a host. `nccl` and `hccl` need tensors on their device, so each
blob is copied there and back; `gloo` reads and writes host memory in place. `nccl` has run between processes of one GPU
(docs/gpus.md); `hccl` never on its hardware: it is tested by name, with a backend of that name that is Gloo inside.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from asyncrl.errors import ConfigError
from asyncrl.net.closed_listeners import closed_afterwards
from asyncrl.runtime.device import collective_device, device_module

#: Names of torch.distributed that type checkers do not know.
dist: Any = torch.distributed
GroupMaker = Callable[[Any, int, int, timedelta], Any]
LONGEST = timedelta(days=1)
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
POLL_S = 0.0005
OPERATION_SHARE = 0.5  # of the deadline: for one broadcast; Gloo cannot be interrupted within it
REACH_SHARE = 0.2  # of the deadline: to connect to the store, which torch tries twice


def seconds(value: float) -> timedelta:
    """A limit for torch, which refuses none."""
    return timedelta(seconds=max(value, 0.05))


def reach(address: str, generation: int, *, deadline_s: float) -> Any:
    """The store of a generation. Raises RuntimeError, ValueError if rank 0 cannot be reached at this address."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    store = dist.TCPStore(host, int(port), None, False, timeout=seconds(deadline_s * REACH_SHARE))
    store.set_timeout(seconds(deadline_s * OPERATION_SHARE))
    return dist.PrefixStore(f"ws/{generation}", store)


def lane_store(store: Any, lane: int) -> Any:
    """Where the processes of a lane find each other."""
    return dist.PrefixStore(f"pg{lane or ''}", store)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group without torch's watchdog, whose limits and errors are those of `finish`: the watchdog ends the processes
    that are left a minute after one has died. Torch reads the variable when the group is made."""
    del timeout
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LONGEST
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(NO_WATCHDOG)
        if before is not None:
            os.environ[NO_WATCHDOG] = before


def _hccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of a backend that registered itself with torch, as torch_npu does."""
    return registered_maker("hccl")(store, rank, size, timeout)


#: Process groups by backend.
GROUPS: dict[str, GroupMaker] = {"gloo": _gloo, "nccl": _nccl, "hccl": _hccl}


def group_maker(backend: str) -> GroupMaker:
    """The maker of process groups. Raises `config.extra` for a backend that this build lacks."""
    if backend not in GROUPS:
        raise ConfigError("config.extra", f"collective backend {backend!r} is not one of {', '.join(GROUPS)}")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ConfigError("config.extra", "collective backend nccl: this build of torch does not have it")
    if backend == "hccl":
        registered_maker("hccl")
    return GROUPS[backend]


def broadcast(group: Any, tensor: torch.Tensor, *, within_s: float) -> Any:
    """Begin a broadcast from rank 0. The limit is that of this operation: a kept group was made with another one."""
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timedelta(seconds=max(within_s, 0.05))
    return group.broadcast([tensor], options)


def form(make_group: GroupMaker, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group whose members are all connected. It is kept for long, so Gloo's listener is closed to later clients."""
    if make_group is not _gloo:
        return make_group(store, rank, size, timeout)
    with closed_afterwards(_warn_of_listeners):
        group = make_group(store, rank, size, timeout)
        met = group.barrier(dist.BarrierOptions())  # bounded: it only starts the operation
        met.wait(timeout)
    return group


@cache
def _warn_of_listeners() -> None:
    """Once in a process: groups are made again and again."""
    print(
        "warning: this system forbids packet filters, so the ports of a kept Gloo group stay open: any process that "
        "reaches them can use up descriptors (docs/security.md, Connections)",
        flush=True,
    )


def finish(work: Any, group: Any, *, within_s: float, on_device: bool) -> None:
    """Wait for an operation of a group. On a device it is asked again and again: waiting there has no limit. Raises
    RuntimeError if it fails, or after `within_s`; then the group is aborted.
    """
    until = time.monotonic() + within_s
    while on_device and not work.is_completed():
        if time.monotonic() > until:
            abort(group)
            raise RuntimeError(f"no end of the operation within {within_s:g} s")
        time.sleep(POLL_S)
    work.wait(timedelta(seconds=max(until - time.monotonic(), 0.05)))


def abort(group: Any) -> None:
    """Interrupt the operations of a group, if the backend can."""
    if group is not None:
        with suppress(RuntimeError):  # not every backend can
            group.abort()


def leave(group: Any) -> None:
    """End a group. Its destructor alone may wait for other threads while it holds the interpreter's lock."""
    end = getattr(group, "shutdown", None)
    if end is not None:
        with suppress(RuntimeError):  # a peer is gone, or the backend has no such call
            end()


def listening_store(host: str, *, timeout: timedelta, where: str) -> Any:
    """A TCPStore of rank 0 that listens at `host`, on a free port. Raises `config.network` if this host lacks it."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
    except OSError as error:
        raise ConfigError("config.network", f"cannot listen at {host}: {error}", where=where) from None
    descriptor = listener.detach()
    return dist.TCPStore(host, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)


def registered_maker(backend: str) -> GroupMaker:
    """The maker of a backend from `torch.distributed.Backend.register_backend`; its package is imported if need be.

    Torch has no public call for such a group next to the default one, which belongs to the trainer. So this reads the
    registered creator (`Backend._plugins`; a test fails if torch moves it).
    """
    if not hasattr(dist.Backend, backend.upper()):
        try:
            importlib.import_module(device_module(backend))
        except (ImportError, OSError) as error:
            raise ConfigError("config.extra", f"collective backend {backend}: {error}") from None
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise ConfigError("config.extra", f"collective backend {backend}: no package registered it with torch")

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        options = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            group_id="weightsync",
            global_ranks_in_group=list(range(size)),
        )
        return plugin.creator_fn(options, None)

    return make


class Place:
    """The memory of a backend's tensors: host memory in place, or a device with a copy there and back."""

    def __init__(self, backend: str, *, device: str = "") -> None:
        """Raises `config.type` if this host has no such device; the backend chooses an empty `device`."""
        found = collective_device(backend, device)
        self._device = found.torch_device
        self._found = found
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self.staged = backend != "gloo"

    @property
    def device(self) -> torch.device:
        return self._device

    def mark(self) -> Any:
        """A mark behind the work that this thread has queued on the device."""
        return self._found.mark()

    def carry(self, tensor: torch.Tensor, mark: Any) -> torch.Tensor:
        """The tensor where the backend takes it, once the work before the mark is done."""
        self._found.wait_for(mark)  # bounded: work of this process; the watchdog ends a rank whose device hangs
        return tensor.to(self._device)

    def send(self, view: memoryview) -> torch.Tensor:
        """A tensor with these bytes."""
        host = torch.frombuffer(view, dtype=torch.uint8)
        return host.to(self._device, copy=True) if self.staged else host

    def room(self, view: memoryview) -> torch.Tensor:
        """A tensor to receive into; `fetch` brings its bytes to the view."""
        if not self.staged:
            return torch.frombuffer(view, dtype=torch.uint8)
        return torch.empty(view.nbytes, dtype=torch.uint8, device=self._device)

    def fetch(self, tensor: torch.Tensor, view: memoryview) -> None:
        """Copy the received bytes to the view, from a device through pinned memory."""
        if self.staged:
            if self._pinned.numel() < tensor.numel():
                self._pinned = torch.empty(tensor.numel(), dtype=torch.uint8, pin_memory=self._found.pin_memory_ok)
            room = self._pinned[: tensor.numel()]
            room.copy_(tensor, non_blocking=True)
            self._found.synchronize()
            torch.frombuffer(view, dtype=torch.uint8).copy_(room)
