"""The planner and the digests of weight sync, as properties."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import AsyncRLError
from asyncrl.wire import Manifest
from weightsync.plan.buckets import (
    ITEM_BYTES,
    Plan,
    TensorSpec,
    bucket_starts,
    check_layout,
    group_by_bucket,
    plan_buckets,
)
from weightsync.plan.digest import bucket_digest, digest_tensors, version_digest

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=20).map(
    lambda items: [TensorSpec(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(items)]
)


def manifest_of(plan: Plan, digests: tuple[str, ...] = ()) -> Manifest:
    digests = digests or tuple("0" for _ in plan.bucket_bytes)
    return Manifest(0, plan.digest, plan.bucket_bytes, digests, version_digest(digests))


def test_the_example_of_the_docstring() -> None:
    plan = plan_buckets(
        [
            TensorSpec("a", "F32", (2,)),
            TensorSpec("b", "U8", (3,)),
            TensorSpec("c", "F32", (1,)),
            TensorSpec("d", "F32", (3,)),
        ],
        bucket_bytes=16,
    )
    assert [(t.name, t.bucket, t.offset) for t in plan.tensors] == [("a", 0, 0), ("b", 0, 8), ("c", 0, 12), ("d", 1, 0)]
    assert plan.bucket_bytes == (16, 12) and plan.nbytes == 28


@settings(deadline=None, max_examples=60)
@given(specs=specs, bucket_bytes=st.integers(1, 400))
def test_every_tensor_lies_once_aligned_and_in_order(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert [(t.name, t.dtype, t.shape) for t in plan.tensors] == [(s.name, s.dtype, s.shape) for s in specs]
    for number, group in enumerate(group_by_bucket(plan.tensors, len(plan.bucket_bytes))):
        assert group, "no bucket is empty of tensors"
        end = 0
        for tensor in group:
            assert tensor.offset % ITEM_BYTES[tensor.dtype] == 0 and tensor.offset >= end
            assert tensor.nbytes == math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
            end = tensor.offset + tensor.nbytes
        assert plan.bucket_bytes[number] == end
        large = [tensor for tensor in group if tensor.nbytes]
        assert end <= bucket_bytes or len(large) == 1
    check_layout(manifest_of(plan), plan.tensors)
    starts, size = bucket_starts(plan.bucket_bytes)
    assert all(start % 64 == 0 for start in starts) and size >= plan.nbytes


@settings(deadline=None, max_examples=60)
@given(specs=specs, change=st.sampled_from(["name", "dtype", "shape", "order", "size"]))
def test_the_plan_digest_sees_every_difference(specs: list[TensorSpec], change: str) -> None:
    plan = plan_buckets(specs, bucket_bytes=100)
    first = specs[0]
    other = {
        "name": [TensorSpec("other", first.dtype, first.shape), *specs[1:]],
        "dtype": [TensorSpec(first.name, "I8" if first.dtype != "I8" else "U8", first.shape), *specs[1:]],
        "shape": [TensorSpec(first.name, first.dtype, (*first.shape, 1)), *specs[1:]],
        "order": [*specs[1:], first],
        "size": [*specs, TensorSpec("more", "F32", ())],
    }[change]
    same = change == "order" and len(specs) == 1
    assert (plan_buckets(other, bucket_bytes=100).digest == plan.digest) is same
    assert plan_buckets(specs, bucket_bytes=100).digest == plan.digest


@pytest.mark.parametrize(
    "specs",
    [[], [TensorSpec("a", "Q4", (1,))], [TensorSpec("a", "F32", (1,))] * 2, [TensorSpec("a", "F32", (-1,))]],
    ids=["empty", "dtype", "name", "shape"],
)
def test_bad_specs_are_refused(specs: list[TensorSpec]) -> None:
    with pytest.raises(ValueError):
        plan_buckets(specs, bucket_bytes=10)


@pytest.mark.parametrize("field,value", [("offset", 8), ("offset", -4), ("bucket", 1), ("nbytes", 400), ("name", "x")])
def test_a_layout_that_leaves_its_bucket_is_refused(field: str, value: object) -> None:
    """Also where the plan digest was made for the bad layout, as a hostile sender would."""
    plan = plan_buckets([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (1,))], bucket_bytes=64)
    bad = (msgspec.structs.replace(plan.tensors[0], **{field: value}), plan.tensors[1])
    with pytest.raises(AsyncRLError) as caught:
        check_layout(manifest_of(plan), bad)
    assert caught.value.code == "sync.plan"
    if field != "name":
        from weightsync.plan.buckets import plan_digest

        forged = msgspec.structs.replace(manifest_of(plan), plan=plan_digest(bad, plan.bucket_bytes))
        with pytest.raises(AsyncRLError):
            check_layout(forged, bad)


@settings(deadline=None, max_examples=60)
@given(specs=specs, bucket_bytes=st.integers(1, 400), seed=st.integers(0, 99))
def test_publisher_receiver_and_engine_see_one_digest(specs: list[TensorSpec], bucket_bytes: int, seed: int) -> None:
    plan = plan_buckets(specs, bucket_bytes=bucket_bytes)
    random = np.random.default_rng(seed)
    data = {tensor.name: random.integers(0, 256, tensor.nbytes, dtype=np.uint8) for tensor in plan.tensors}
    by_engine, whole = digest_tensors(plan.tensors, lambda name: data[name].data)
    for padding in (0, 255):
        buckets = [np.full(size, padding, dtype=np.uint8) for size in plan.bucket_bytes]
        for tensor in plan.tensors:
            buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = data[tensor.name]
        groups = group_by_bucket(plan.tensors, len(buckets))
        by_receiver = tuple(bucket_digest(group, bucket.data) for group, bucket in zip(groups, buckets, strict=True))
        assert by_receiver == by_engine and version_digest(by_receiver) == whole
    full = [tensor for tensor in plan.tensors if tensor.nbytes]
    if full:
        data[full[-1].name] = data[full[-1].name].copy()
        data[full[-1].name][-1] ^= 1
        assert digest_tensors(plan.tensors, lambda name: data[name].data)[1] != whole


def test_digest_of_a_tensor_of_another_size_is_refused() -> None:
    plan = plan_buckets([TensorSpec("a", "F32", (4,))], bucket_bytes=64)
    with pytest.raises(ValueError, match="12 bytes, planned 16"):
        digest_tensors(plan.tensors, lambda name: bytes(12))
