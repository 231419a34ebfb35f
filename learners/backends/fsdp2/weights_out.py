"""The published weights of a sharded policy: their layout, and three ways out of it.

- `own_rows`: this rank's rows as they lie, if all parameters are split by rows;
- `iter_bytes`: whole tensors in host memory of rank 0, gathered in parts, or layer by layer by FSDP;
- `iter_device`: the same in the memory of its device, or by turns of several ranks.

A parameter that stacks experts is published as the tensors of its folder, which lie in its memory one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.capabilities import MOST_SENDERS
from asyncrl.runtime.model_tensors import Part
from learners.backends.base import DTYPES, WeightSpec, published_dtype, published_specs, tensor_bytes
from learners.backends.fsdp2.gathering import PART_BYTES, Gathering, Turns, fits
from learners.backends.fsdp2.own_rows import OwnRows
from learners.backends.fsdp2.sharded_module import PLAIN, Sharded, View
from learners.gang.gang import Gang
from weightsync.encoding.quantised import quantise_all
from weightsync.transports.pinned_copies import PinnedCopies

Bytes = npt.NDArray[np.uint8]
WHOLE = Part("", -1, 0, 0)  # of a parameter that is published as it is


class WeightsOut:
    """`parts`: the published tensors of stacked parameters (`asyncrl.runtime.model_tensors`)."""

    def __init__(
        self, sharded: Sharded, parts: Mapping[str, Mapping[str, Part]], view: View, config: Config, gang: Gang
    ) -> None:
        self._sharded = sharded
        self._parts = parts
        self._view = view
        self._gang = gang
        self._device = gang.device
        self._dtype = DTYPES[config.model.dtype][1]
        self._sent_name, self._sent_dtype = DTYPES[published_dtype(config)]
        self._quantised = config.weightsync.quantised
        self._config = config
        self._pinned: PinnedCopies | None = None  # made for the first version

    def specs(self) -> list[WeightSpec]:
        """Root unit first, then the layers, each in the order of its modules. Experts one by one, as in folders."""
        shapes = {name: tuple(p.shape) for name, p in self._sharded.root.named_parameters()}
        names = (name for names in self._sharded.names for name in filter(self._view.name, names))
        found = [
            WeightSpec(sent, self._sent_name, shape)
            for name in names
            for sent, shape in self._published(name, shapes[name]).items()
        ]
        return published_specs(found, self._config)

    def own_rows(self) -> OwnRows | None:
        """Return this rank's rows of the tensors of `specs`; None for layouts other than `fits`, and if matrices are
        quantised.
        """
        if self._view is not PLAIN or self._quantised:
            return None
        on_device = self._row_parameters(self._device.type)
        named = on_device or self._row_parameters("cpu")  # with `cpu_offload`
        if not named:
            return None
        published = [(self._published(name, tuple(parameter.shape)), parameter) for name, parameter in named]
        return OwnRows(
            [({one: math.prod(shape) for one, shape in shapes.items()}, parameter) for shapes, parameter in published],
            compute=self._dtype,
            sent=self._sent_dtype,
            pin=self._pin_rows if on_device and self._device.pin_memory_ok else None,
        )

    def iter_bytes(self, settle: Callable[[], None] | None) -> Iterator[tuple[str, Bytes]]:
        """Yield name and bytes in the order of `specs` on rank 0; nothing on the others."""
        if self._quantised:
            yield from self._quantised_bytes(settle)
            return
        for name, data in self._whole_bytes(settle):
            if name not in self._parts:
                yield name, data
                continue
            parts = self._parts[name]
            yield from zip(parts, data.reshape(len(parts), -1), strict=True)

    def _quantised_bytes(self, settle: Callable[[], None] | None) -> Iterator[tuple[str, Bytes]]:
        """The same with quantised matrices: on rank 0, on the device where a tensor is whole."""
        named = self._iter_whole(settle, PART_BYTES)
        if not self._gang.lead:
            for _ in named:
                pass
            return
        for name, tensor in quantise_all(self._split(named), self._quantised):
            yield name, tensor_bytes(tensor, tensor.dtype, lend=False)

    def _split(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors of each."""
        for name, tensor in named:
            for one, part in self._parts.get(name, {name: WHOLE}).items():
                yield one, part.view(tensor.to(self._sent_dtype))

    def turns(self) -> Turns:
        """Return the ranks that can send buckets: rank 0 alone if a part of a gathering cannot be a bucket."""
        gathering = self._make_gathering()
        if gathering is None or self._parts:
            return Turns()
        return Turns(gathering.ranks, min(gathering.ranks, MOST_SENDERS))

    def iter_device(
        self, settle: Callable[[], None], *, part_bytes: int, buckets: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The same tensors in the memory of rank 0's device, gathered in parts of this size; with `buckets` (by name)
        those of each bucket in the memory of the rank that sends it.
        """
        for name, tensor in self._iter_whole(settle, part_bytes, buckets):
            if buckets is None and not self._gang.lead:
                continue
            sent = tensor.to(self._device.torch_device, self._sent_dtype)
            if name in self._parts:
                yield from zip(self._parts[name], sent.reshape(len(self._parts[name]), -1), strict=True)
            else:
                yield name, sent

    def _published(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the published tensors of a parameter, in the order of its memory, and their shapes."""
        parts = self._parts.get(sent := self._view.name(name))
        return {one: part.shape(shape) for one, part in parts.items()} if parts else {sent: shape}

    def _whole_bytes(self, settle: Callable[[], None] | None) -> Iterator[tuple[str, Bytes]]:
        """Yield name and bytes of each on rank 0; exhaust the iterator on all."""
        named = self._iter_whole(settle, PART_BYTES)
        if self._gang.lead and settle is not None and self._device.pin_memory_ok:
            largest = max(math.prod(parameter.shape) for parameter in self._sharded.root.parameters())
            sent = ((name, tensor.to(self._sent_dtype)) for name, tensor in named)
            yield from self._pin(largest * self._sent_dtype.itemsize).run(sent, settle)
            return
        for name, tensor in named:
            if self._gang.lead:
                yield name, tensor_bytes(tensor, self._sent_dtype, lend=settle is not None)

    def _iter_whole(
        self, settle: Callable[[], None] | None, part_bytes: int, buckets: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        gathering = self._make_gathering(part_bytes, buckets)
        return self._sharded.whole(settle, view=self._view) if gathering is None else gathering.run(settle)

    def _make_gathering(
        self, part_bytes: int = PART_BYTES, buckets: Mapping[str, int] | None = None
    ) -> Gathering | None:
        """Return the gathering by parts, or of buckets on those that send them, if the layout allows it."""
        if self._gang.size == 1 or self._view is not PLAIN:
            return None
        named = self._row_parameters(self._device.type)
        if not named:
            return None
        sent = [(self._view.name(name), parameter) for name, parameter in named]
        senders = 1 if buckets is None else self.turns().senders
        made: dict[str, Any] = {"part_bytes": part_bytes, "buckets": buckets, "senders": senders}
        return Gathering(sent, compute=self._dtype, sent=self._sent_dtype, **made)

    def _row_parameters(self, device: str) -> list[tuple[str, Any]]:
        """Return the parameters in publishing order if all are split by rows and lie on this kind of device."""
        self._sharded.reshard()
        named = [(name, self._sharded.root.get_parameter(name)) for names in self._sharded.names for name in names]
        return named if fits([parameter for _, parameter in named], device=device) else []

    def _pin_rows(self) -> PinnedCopies:
        return self._pin(PART_BYTES)

    def _pin(self, largest: int) -> PinnedCopies:
        if self._pinned is None or self._pinned.largest < largest:
            self._pinned = PinnedCopies(self._device, largest)
        return self._pinned
