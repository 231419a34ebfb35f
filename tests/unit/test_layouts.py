"""Layouts: layer by layer, and shards in any order."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learners.warm_start.tiny_model import make_tiny_qwen3
from weightsync.plan.buckets import Plan, TensorSpec, bucket_starts, plan_buckets
from weightsync.plan.layouts import Box, Shard, Shards, by_layer, fill, runs, whole


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    box = tuple(tuple(sorted(draw(st.tuples(st.integers(0, side), st.integers(0, side))))) for side in shape)
    return shape, box  # type: ignore[return-value]


def test_the_example_of_the_docstring() -> None:
    assert list(runs((2, 4), ((0, 2), (2, 4)))) == [(2, 2), (6, 2)]


@settings(deadline=None, max_examples=300)
@given(boxes())
def test_runs_are_the_elements_of_the_box(drawn: tuple[tuple[int, ...], Box]) -> None:
    shape, box = drawn
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted = numbers[tuple(slice(*side) for side in box)].reshape(-1)
    ranges = list(runs(shape, box))
    found = [element for start, count in ranges for element in range(start, start + count)]
    assert found == wanted.tolist() and all(count for _, count in ranges)
    if box == whole(shape):
        assert len(ranges) <= 1, "what is whole is one range"


@pytest.mark.parametrize(
    "box", [((0, 2),), ((0, 3), (0, 4)), ((-1, 1), (0, 4)), ((1, 0), (0, 4)), ((0, 2), (0, 4), (0, 1))]
)
def test_a_box_outside_is_refused(box: Box) -> None:
    with pytest.raises(ValueError):
        list(runs((2, 4), box))


def units() -> list[list[TensorSpec]]:
    """A tiny model's parameters as FSDP2 gathers them: what the root owns, then each layer."""
    model = make_tiny_qwen3(16, hidden_size=16, layers=3, heads=2, kv_heads=1, head_dim=8, mlp_size=24)
    named = [TensorSpec(name, "F32", tuple(p.shape)) for name, p in model.named_parameters()]
    layers = [[spec for spec in named if f".layers.{number}." in spec.name] for number in range(3)]
    return [[spec for spec in named if ".layers." not in spec.name], *layers]


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 9000, 1 << 30])
def test_a_bucket_is_complete_as_soon_as_its_last_unit_came(bucket_bytes: int) -> None:
    gathered = units()
    layered = by_layer(gathered, bucket_bytes=bucket_bytes)
    assert [t.name for t in layered.plan.tensors] == [spec.name for unit in gathered for spec in unit]
    for bucket, after in enumerate(layered.complete_after):
        came = {spec.name for unit in gathered[:after] for spec in unit}
        before = {spec.name for unit in gathered[: after - 1] for spec in unit}
        inside = {t.name for t in layered.plan.tensors if t.bucket == bucket}
        assert inside <= came and not inside <= before
    assert list(layered.complete_after) == sorted(layered.complete_after)
    assert layered.complete_after[-1] == len(gathered)
    if bucket_bytes == 1:
        assert layered.complete_after[0] == 1, "the first bucket does not wait for a layer"


# ---------------------------------------------------------------- shards

SPECS = [
    TensorSpec("embed", "BF16", (8, 6)),
    TensorSpec("norm", "F32", (6,)),
    TensorSpec("column", "BF16", (8, 6)),
    TensorSpec("row", "BF16", (4, 8)),
    TensorSpec("experts", "BF16", (4, 6, 2)),
    TensorSpec("scale", "F32", ()),
    TensorSpec("none", "F32", (0, 3)),
]
#: tensor -> the axis that tensor parallelism cuts; experts by their first
AXES = {"embed": 0, "column": 0, "row": 1, "experts": 0}


def model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {s.name: torch.randn(s.shape).to(torch.bfloat16 if s.dtype == "BF16" else torch.float32) for s in SPECS}


def shard_of(name: str, tensor: torch.Tensor, box: Box) -> Shard:
    part = tensor[tuple(slice(*side) for side in box)].clone().reshape(-1)
    return Shard(name, box, part.view(torch.uint8).numpy().data)


def exported(weights: dict[str, torch.Tensor], ranks: int) -> list[Shard]:
    """What each tensor-parallel rank holds; what is not cut comes from one of them."""
    shards = []
    for name, tensor in weights.items():
        if name not in AXES:
            shards.append(shard_of(name, tensor, whole(tensor.shape)))
            continue
        axis = AXES[name]
        step = tensor.shape[axis] // ranks
        for rank in range(ranks):
            box = list(whole(tensor.shape))
            box[axis] = (rank * step, (rank + 1) * step)
            shards.append(shard_of(name, tensor, tuple(box)))
    return shards


def room(plan: Plan) -> list[memoryview]:
    starts, size = bucket_starts(plan.bucket_bytes)
    slot = memoryview(bytearray(size))
    return [slot[start : start + n] for start, n in zip(starts, plan.bucket_bytes, strict=True)]


@settings(deadline=None, max_examples=60)
@given(ranks=st.sampled_from([1, 2, 4]), bucket_bytes=st.sampled_from([1, 100, 10_000]), data=st.data())
def test_shards_in_any_order_make_the_whole_tensors(ranks: int, bucket_bytes: int, data: st.DataObject) -> None:
    weights = model(0)
    plan = plan_buckets(SPECS, bucket_bytes=bucket_bytes)
    shards = data.draw(st.permutations(exported(weights, ranks)))
    buckets = room(plan)
    fill(plan, shards, buckets)
    for tensor in plan.tensors:
        held = bytes(buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes])
        assert held == weights[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_bucket_is_complete_when_its_last_shard_came() -> None:
    plan = plan_buckets(SPECS, bucket_bytes=100)
    shards, taken, buckets = exported(model(0), 2), Shards(plan), room(plan)
    last = {
        plan.tensors[[t.name for t in plan.tensors].index(s.name)].bucket: i for i, s in enumerate(shards) if s.data
    }
    for number, shard in enumerate(shards):
        bucket = taken.place(shard, buckets)
        assert taken.complete(bucket) == (number >= last[bucket])
    assert taken.missing() == []


def test_what_is_missing_is_named() -> None:
    plan = plan_buckets(SPECS, bucket_bytes=100)
    shards = exported(model(0), 2)
    taken = Shards(plan)
    buckets = room(plan)
    for shard in shards[1:-2]:
        taken.place(shard, buckets)
    assert taken.missing() == ["embed", "scale"] and not taken.complete(0)
    with pytest.raises(ValueError, match="2 tensors are not whole, first embed"):
        fill(plan, shards[1:-2], room(plan))


def test_wrong_shards_write_nothing() -> None:
    plan = plan_buckets(SPECS, bucket_bytes=1 << 20)
    weights = model(0)
    taken, buckets = Shards(plan), room(plan)
    taken.place(shard_of("row", weights["row"], ((0, 4), (0, 4))), buckets)
    before = bytes(buckets[0])
    wrong = [
        shard_of("row", weights["row"] + 1, ((0, 4), (0, 4))),  # again
        shard_of("row", weights["row"] + 1, ((3, 4), (3, 8))),  # one element again
        Shard("row", ((0, 4), (4, 9)), bytes(40)), Shard("row", ((0, 4),), bytes(8)), Shard("other", (), bytes(4)),
        Shard("row", ((0, 4), (4, 8)), b"\1" * 31), Shard("row", ((0, 4), (4, 8)), b"\1" * 64),
    ]  # fmt: skip
    for shard in wrong:
        with pytest.raises(ValueError):
            taken.place(shard, buckets)
    assert bytes(buckets[0]) == before
