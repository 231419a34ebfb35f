"""The weights of one model: the current version, and a new version that is built next to it and exchanged between
steps.

Guarantees:
1. the model is not touched before `exchange`, which swaps storages (`parameter.data`) and copies nothing: its time does
   not depend on the size of the model. Only with `in_place` do buckets go into the parameters themselves;
2. `apply` returns the digest of the bucket after the copy, `digest` that of the model after the exchange, read again: a
   bit that flipped in between shows;
3. after `abort` (also of a copy that still runs in its thread) nothing is written any more;
4. if the model holds the bytes as they are sent (a CPU, the same dtypes) the parameters are views into one storage per
   bucket, and `bucket_room` lends those of the coming version: a transport writes the bytes without a copy. Lent memory
   is not used again after an abort, because the transport may still write there.
The storages of the version before are the room for the next one: their pages exist already and fill twice as fast. So
the weights are held twice at all times; `weightsync.in_place` avoids that.

Example: a model holds v3 in storages A. v4 fills B while steps read A; the exchange makes B the parameters (0.2 ms for
300 tensors); v5 will fill A.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from asyncrl.errors import AsyncRLError, WorkError
from asyncrl.runtime.model_tensors import Part
from asyncrl.wire import Buffer, Manifest, Tensor
from producers.engines.hf.layout import DTYPES, HostBytes, Layout, Named, Room, Update, check_layout, is_plain
from producers.engines.hf.lora import AdapterUpdate


class FullUpdate:
    """All weights. `in_place`: into the parameters themselves, else next to them."""

    def __init__(
        self,
        named: Named,
        manifest: Manifest,
        tensors: Sequence[Tensor],
        *,
        room: Room,
        host: HostBytes,
        in_place: bool,
    ) -> None:
        self.manifest = manifest
        self.layout = Layout(manifest, tensors, host)
        self.missing = set(range(len(self.layout.buckets)))
        self.storages: tuple[torch.Tensor, ...] = ()  # by bucket, if the values are views into them
        self._lent = False
        self._parameters = named.parameters
        self._room = room
        self._in_place = in_place
        self._values: dict[str, torch.Tensor] = {}  # by name of a tensor
        self._wholes: dict[str, torch.Tensor] = {}  # by name of a parameter
        whole = all(
            tensor.name not in named.parts and is_plain(named.parameters[tensor.name].data, DTYPES[tensor.dtype])
            for tensor in tensors
        )
        if whole and not in_place:
            self.storages = room.take_buckets(manifest.bucket_bytes)
        for tensor in tensors:
            owner = named.owner(tensor.name)
            now = named.parameters[owner].data
            if self.storages:
                part = self.storages[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes]
                self._wholes[owner] = part.view(now.dtype).view(now.shape)
            elif owner not in self._wholes:
                self._wholes[owner] = now if in_place else room.take(owner, now.shape, now.dtype, now.device)
            self._values[tensor.name] = named.view(tensor.name, self._wholes[owner])

    def room(self, number: int) -> memoryview | None:
        """Memory for the bytes of a bucket; None if they have to be copied or converted."""
        if not self.storages:
            return None
        self._lent = True
        held: Any = self.storages[number].numpy()
        return memoryview(held)

    def apply(self, number: int, data: Buffer) -> str:
        """Copy the tensors of one bucket, unless the bytes are in its room."""
        if self.storages and np.frombuffer(data, np.uint8).ctypes.data == self.storages[number].data_ptr():
            return self.layout.bucket_digest(number, self.tensor_for)
        return self.layout.fill(number, data, self.tensor_for)

    def tensor_for(self, name: str) -> torch.Tensor:
        return self._values[name]

    def complete(self) -> None: ...

    def exchange(self) -> None:
        if self._in_place:
            return
        for name, value in self._wholes.items():
            parameter = self._parameters[name]
            old, parameter.data = parameter.data, value
            if not self.storages:
                self._room.give(name, old)

    def drop(self) -> None:
        """Free the storages of an update that is not exchanged."""
        if self.storages:
            if not self._lent:
                self._room.give_buckets(self.storages)
        elif not self._in_place:
            for name, value in self._wholes.items():
                self._room.give(name, value)


class ModelWeights:
    """`apply` and `digest` may be called from any thread, one at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        in_place: bool = False,
        parts: Mapping[str, Mapping[str, Part]] = MappingProxyType({}),
    ) -> None:
        """`parts`: names of tensors that versions have in place of a parameter (`asyncrl.runtime.model_tensors`)."""
        self._model = model
        self._in_place = in_place
        self._named = Named(model, parts)
        self._parameters = self._named.parameters
        self._device = next(model.parameters()).device
        self.host = HostBytes(self._device)
        self._stream: Any = None
        self._room = Room()
        self._storages: tuple[torch.Tensor, ...] = ()  # of the current version, if its tensors are views into them
        self._update: Update | None = None
        self._writing = threading.Lock()  # held during a copy: an abort waits for it
        self.layout: Layout | None = None  # of the whole weights, also under an adapter
        self.base = ""  # their digest
        self.kept: dict[str, torch.Tensor] = {}  # base values of the parameters that an adapter changed
        self.adapter: AdapterUpdate | None = None  # the current adapter

    def begin(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        """Make room for a version. Raises `sync.plan` for the layout of another model, and `sync.failed` for an
        adapter of another base."""
        self.abort()
        if manifest.encoding == "adapter" and not self._in_place:
            self._update = AdapterUpdate(self, manifest, tensors)
        elif manifest.encoding == "full":
            check_layout(self._named, tensors)
            self._update = FullUpdate(
                self._named, manifest, tensors, room=self._room, host=self.host, in_place=self._in_place
            )
            if self._in_place:  # the parameters are of no version now
                self.layout, self.base = None, ""
        else:
            raise AsyncRLError("sync.plan", f"encoding {manifest.encoding!r} is not for this engine")

    def pending_update(self) -> Update:
        """The begun update. Raises `sync.failed` without one."""
        if self._update is None:
            raise WorkError("sync.failed", "no update is under way")
        return self._update

    def bucket_room(self, number: int) -> memoryview | None:
        """Memory for the bytes of a bucket before `apply`; None: `apply` copies them."""
        update = self.pending_update()
        return update.room(number) if isinstance(update, FullUpdate) else None

    def apply(self, number: int, data: Buffer) -> str:
        """Take the bytes of one bucket; the digest of the copy."""
        update = self.pending_update()
        with self._writing, self._on_side_stream():
            if self._update is not update:
                raise WorkError("sync.failed", "the update was aborted")
            digest = update.apply(number, data)
            update.missing.discard(number)
            if digest is None:
                digest = update.layout.bucket_digest(number, update.tensor_for)
            if not update.missing:
                update.complete()
        return digest

    def take(self, number: int, data: torch.Tensor) -> str:
        """Take the bytes of one bucket from memory of the model's device, uint8; the digest of what the model holds."""
        update = self.pending_update()
        with self._writing, self._on_side_stream():
            if self._update is not update:
                raise WorkError("sync.failed", "the update was aborted")
            digest = update.layout.take(number, data, update.tensor_for)
            update.missing.discard(number)
        return digest

    def exchange(self, *, kept: bool = False) -> None:
        """Make the new version the model's. On the decode thread, between two steps. `kept`: another model refers to
        the tensors of an older version, so none of those that are free now is written again."""
        update = self.pending_update()
        update.exchange()
        self._update = None
        if isinstance(update, FullUpdate):
            self.layout, self.base, self.adapter, self.kept = update.layout, update.manifest.digest, None, {}
            if update.storages:
                self._room.give_buckets(self._storages)
            self._storages = update.storages
        else:
            assert isinstance(update, AdapterUpdate)
            self.adapter = update
        if kept:
            self._room.clear()

    def check_complete(self) -> None:
        """Raise `sync.failed` if a bucket is missing."""
        if missing := self.pending_update().missing:
            raise WorkError("sync.failed", f"commit without buckets {sorted(missing)[:8]}")

    def digest(self) -> str:
        """Digest of the model's weights, in the manifest's dtypes; with an adapter, of its tensors and the base, read
        again (an unknown digest if the product is not the computed one)."""
        if self.layout is None:
            return ""
        with self._on_side_stream():
            base = self.layout.digest(self.base_value)
            if self.adapter is None:
                return base
            return self.adapter.attest(self._parameters, base=base)

    def read(self, number: int, into: memoryview) -> bool:
        """Write the bytes of one bucket of the current version; False without one."""
        source = self.adapter if self.adapter is not None else self
        if source.layout is None:
            return False
        with self._on_side_stream():
            return source.layout.read(number, into, source.tensor_for)

    def tensor_for(self, name: str) -> torch.Tensor:
        return self._named.view(name, self._parameters[self._named.owner(name)].data)

    def base_value(self, name: str) -> torch.Tensor:
        """The value of that name without an adapter."""
        return self.kept[name] if name in self.kept else self.tensor_for(name)

    def parameter(self, name: str) -> torch.nn.Parameter | None:
        """The parameter of that name."""
        return self._parameters.get(name)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def second_copy(self) -> int:
        """Bytes of a second version; 0 in place."""
        values = {id(value): value.nbytes for value in self._parameters.values()}
        return 0 if self._in_place else sum(values.values())

    def linear(self, module: str) -> torch.nn.Parameter | None:
        """The weight of a linear layer; None without one of that name, or if it shares its weight."""
        parameter = self._parameters.get(f"{module}.weight")
        if parameter is None or not isinstance(self._model.get_submodule(module), torch.nn.Linear):
            return None
        return parameter if sum(other is parameter for other in self._parameters.values()) == 1 else None

    @property
    def room(self) -> Room:
        """Storages that are free."""
        return self._room

    def abort(self) -> None:
        """Drop the update; a copy under way ends first, a later one is refused."""
        with self._writing:
            update, self._update = self._update, None
        if isinstance(update, FullUpdate):
            update.drop()

    @contextlib.contextmanager
    def _on_side_stream(self) -> Any:
        """On an accelerator: work on a second stream, finished at the end."""
        with self._side_stream():
            yield
        if self._stream is not None:
            self._stream.synchronize()

    def _side_stream(self) -> AbstractContextManager[Any]:
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        module = torch.get_device_module(self._device)
        if self._stream is None:
            self._stream = module.Stream(self._device)
        self._stream.wait_stream(module.current_stream(self._device))  # memory that was freed there is no longer read
        side: AbstractContextManager[Any] = module.stream(self._stream)
        return side
