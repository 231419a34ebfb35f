"""Tensors become the buckets of the plan: without a copy if they lie so, through two rooms else."""

from __future__ import annotations

import pytest
import torch

from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.transports.packing import Packing

SPECS = [
    TensorSpec("a", "F32", (10,)), TensorSpec("b", "U8", (3,)), TensorSpec("none", "F32", (0, 2)),
    TensorSpec("c", "F32", (2, 3)), TensorSpec("large", "BF16", (101,)), TensorSpec("d", "F32", ()),
    *(TensorSpec(f"e{n}", "F32", (12,)) for n in range(7)),
]  # fmt: skip
DTYPES = {"F32": torch.float32, "U8": torch.uint8, "BF16": torch.bfloat16}
PLAN = plan_buckets(SPECS, bucket_bytes=100)


class Sent:
    """Where buckets go: each is read when it is waited for, as a device reads it."""

    def __init__(self) -> None:
        self.under_way: list[torch.Tensor] = []
        self.buckets: list[bytes] = []
        self.memory: set[int] = set()

    def begin(self, bucket: torch.Tensor) -> None:
        self.wait(1)
        self.memory.add(bucket.data_ptr())
        self.under_way.append(bucket)

    def wait(self, at_most: int) -> None:
        while len(self.under_way) > at_most:
            self.buckets.append(self.under_way.pop(0).numpy().tobytes())


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: (torch.randn(spec.shape) * 50).abs().to(DTYPES[spec.dtype]) for spec in SPECS}


def check(sent: Sent, found: dict[str, torch.Tensor]) -> None:
    assert [len(bucket) for bucket in sent.buckets] == list(PLAN.bucket_bytes)
    for place in PLAN.tensors:
        data = sent.buckets[place.bucket][place.offset : place.offset + place.nbytes]
        assert data == found[place.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), place.name


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_scattered_tensors_go_through_two_rooms(every: int) -> None:
    """Their memory is used again after every `settle`."""
    sent, found = Sent(), values()
    packing = Packing(PLAN, begin=sent.begin, wait=sent.wait)
    lent: list[torch.Tensor] = []
    for number, (name, value) in enumerate(found.items()):
        lent.append(value.clone())
        packing.add(name, lent[-1])
        if number % every == 0:
            packing.settle()
            for one in lent:
                one.zero_()
            lent.clear()
    packing.end()
    check(sent, found)


def test_a_bucket_that_lies_in_memory_is_sent_from_there() -> None:
    found = values()
    rooms = [torch.zeros(size, dtype=torch.uint8) for size in PLAN.bucket_bytes]
    sent = Sent()
    packing = Packing(PLAN, begin=sent.begin, wait=sent.wait)
    for place in PLAN.tensors:
        part = rooms[place.bucket][place.offset : place.offset + place.nbytes]
        view = part.view(DTYPES[place.dtype]).view(place.shape) if place.nbytes else found[place.name]
        view.copy_(found[place.name])
        packing.add(place.name, view)
    packing.settle()
    assert sent.memory == {room.data_ptr() for room in rooms} and len(sent.buckets) == len(rooms)
    packing.end()
    check(sent, found)


@pytest.mark.parametrize("senders", [2, 3, 20])
def test_each_of_several_senders_packs_its_own_buckets(senders: int) -> None:
    found = values()
    every: dict[int, bytes] = {}
    for sender in range(senders):
        sent = Sent()
        packing = Packing(PLAN, begin=sent.begin, wait=sent.wait, sender=sender, senders=senders)
        for place in PLAN.tensors:
            if place.bucket % senders == sender:
                packing.add(place.name, found[place.name].clone())
                packing.settle()
        packing.end()
        every |= dict(zip(range(sender, len(PLAN.bucket_bytes), senders), sent.buckets, strict=True))
    whole = Sent()
    whole.buckets = [every[number] for number in range(len(PLAN.bucket_bytes))]
    check(whole, found)


def test_other_tensors_are_refused() -> None:
    found = values()
    for names in (["b"], ["a", "a"], ["a", "c"]):
        packing = Packing(PLAN, begin=lambda _: None, wait=lambda _: None)
        with pytest.raises(ValueError, match="where the plan has"):
            for name in names:
                packing.add(name, found[name])
    packing = Packing(PLAN, begin=lambda _: None, wait=lambda _: None)
    with pytest.raises(ValueError, match="end before a"):
        packing.end()
