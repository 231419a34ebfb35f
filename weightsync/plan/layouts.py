"""In which order weights leave a learner, and how parts of a tensor find their place: layouts, without tensors.

Guarantees:
1. `by_layer` keeps the order in which FSDP2 gathers its units, so that each bucket is complete as early as it can be,
   and says after which unit that is: a bucket may leave while later layers are gathered;
2. `Shards` takes parts of planned tensors in any order (a Megatron export: tensor-parallel slices, pipeline stages);
   every element of every tensor is taken exactly once, an overlap or a part outside is refused before anything is
   written, and what is missing at the end is named;
3. `runs` names the contiguous element ranges of a box in the memory of its tensor, in C order.
No torch; nothing here gathers or sends. The layout of a LoRA adapter is in `weightsync.encoding.adapter`, that of other
names in `weightsync.plan.names`.

Example: the box rows 0..2, columns 2..4 of a tensor [2, 4] is the ranges (2, 2) and (6, 2) (start and length).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from asyncrl.wire import Buffer, Tensor
from weightsync.plan.buckets import ITEM_BYTES, Plan, TensorSpec, plan_buckets

#: (start, stop) for each axis of a tensor.
Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, side) for side in shape)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """(start, length) of the elements of a box, contiguous ranges in the order of the box's own elements.

    Raises:
        ValueError: the box has another rank than the tensor or leaves it.
    """
    if len(box) != len(shape) or any(
        not 0 <= start <= stop <= side for side, (start, stop) in zip(shape, box, strict=True)
    ):
        raise ValueError(f"box {box} in a tensor of shape {tuple(shape)}")
    if volume(box) == 0:
        return
    axis = len(shape)  # from here on all elements are taken: one range spans these axes and the one before
    while axis and box[axis - 1] == (0, shape[axis - 1]):
        axis -= 1
    if axis == 0:
        yield 0, volume(box)
        return
    inner = math.prod(shape[axis:])
    start, stop = box[axis - 1]
    strides = [math.prod(shape[a + 1 :]) for a in range(axis - 1)]
    sides = [stop_ - start_ for start_, stop_ in box[: axis - 1]]
    corner = sum(low * stride for (low, _), stride in zip(box, strides, strict=False))
    for place in np.ndindex(*sides):
        outer = corner + sum(step * stride for step, stride in zip(place, strides, strict=True))
        yield outer + start * inner, (stop - start) * inner


# ---------------------------------------------------------------- by layer


class LayeredPlan(msgspec.Struct, frozen=True):
    """`complete_after[k]`: bucket k holds nothing that is gathered after so many units."""

    plan: Plan
    complete_after: tuple[int, ...]


def by_layer(units: Sequence[Sequence[TensorSpec]], *, bucket_bytes: int) -> LayeredPlan:
    """Plan tensors in the order in which their units are gathered (FSDP2: the root's own, then layer by layer).

    Raises:
        ValueError: as `plan_buckets`.
    """
    plan = plan_buckets([spec for unit in units for spec in unit], bucket_bytes=bucket_bytes)
    unit_of = {spec.name: number for number, unit in enumerate(units, start=1) for spec in unit}
    after = [0] * len(plan.bucket_bytes)
    for tensor in plan.tensors:
        after[tensor.bucket] = max(after[tensor.bucket], unit_of[tensor.name])
    return LayeredPlan(plan, tuple(after))


# ---------------------------------------------------------------- shards


class Shard(msgspec.Struct, frozen=True):
    """Elements `box` of tensor `name`, in C order."""

    name: str
    box: Box
    data: Buffer


class Shards:
    """The tensors of one version on their way into its buckets, part by part. Used by one thread."""

    def __init__(self, plan: Plan) -> None:
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}
        self._taken: dict[str, list[Box]] = {name: [] for name in self._tensors}
        self._open = [0] * len(plan.bucket_bytes)  # elements that are missing, by bucket
        for tensor in plan.tensors:
            self._open[tensor.bucket] += math.prod(tensor.shape)

    def complete(self, bucket: int) -> bool:
        """Whether every element of this bucket was taken."""
        return self._open[bucket] == 0

    def place(self, shard: Shard, buckets: Sequence[memoryview]) -> int:
        """Copy a part to its place; the bucket that it went to.

        Raises:
            ValueError: no such tensor, a box outside of it, bytes of another number than the box has, or elements that
                were taken before. Nothing was written.
        """
        tensor = self._tensors.get(shard.name)
        if tensor is None:
            raise ValueError(f"{shard.name} is not planned")
        ranges = list(runs(tensor.shape, shard.box))
        data = memoryview(shard.data).cast("B")
        item = ITEM_BYTES[tensor.dtype]
        if data.nbytes != volume(shard.box) * item:
            raise ValueError(f"{shard.name}: {data.nbytes} bytes for {shard.box} of {tensor.dtype}")
        if any(_overlap(box, shard.box) for box in self._taken[shard.name]):
            raise ValueError(f"{shard.name}: {shard.box} came before, whole or in part")
        _copy(tensor, ranges, data, buckets[tensor.bucket], item)
        if ranges:
            self._taken[shard.name].append(shard.box)
            self._open[tensor.bucket] -= volume(shard.box)
        return tensor.bucket

    def missing(self) -> list[str]:
        """The names of tensors that are not whole, in plan order."""
        return [
            name
            for name, tensor in self._tensors.items()
            if sum(map(volume, self._taken[name])) != math.prod(tensor.shape)
        ]


def fill(plan: Plan, shards: Iterable[Shard], buckets: Sequence[memoryview]) -> None:
    """Write all shards of a version into its buckets.

    Raises:
        ValueError: as `Shards.place`; or the shards end before every tensor is whole.
    """
    taken = Shards(plan)
    for shard in shards:
        taken.place(shard, buckets)
    if missing := taken.missing():
        raise ValueError(f"{len(missing)} tensors are not whole, first {missing[0]}")


def _overlap(one: Box, other: Box) -> bool:
    """Boxes of the same tensor share an element."""
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def _copy(tensor: Tensor, ranges: list[tuple[int, int]], data: memoryview, bucket: memoryview, item: int) -> None:
    target = bucket[tensor.offset : tensor.offset + tensor.nbytes]
    done = 0
    for start, count in ranges:
        target[start * item : (start + count) * item] = data[done : done + count * item]
        done += count * item
