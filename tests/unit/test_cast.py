"""Cast on send: torch's own rounding, and digests of what is sent."""

from pathlib import Path

import numpy as np
import pytest
import torch

from weightsync.digest import bucket_digest, digest_tensors
from weightsync.encoding.cast import NAMES, cast_bytes, cast_chunks, cast_specs, wire_dtype
from weightsync.plan import ITEM_BYTES, TensorSpec, by_bucket, plan_buckets
from weightsync.staging import Staging

TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def numbers(dtype: str) -> torch.Tensor:
    """Random bit patterns of a dtype, and numbers of usual size between which it must round."""
    bits = np.random.default_rng(0).integers(0, 256, 8 << 14, dtype=np.uint8)
    patterns = torch.tensor(bits).view(TORCH[dtype])
    usual = torch.cat(
        [torch.randn(5000, dtype=torch.float64) * 0.02, torch.tensor([0.0, -0.0, 65519.0, 65520.0, 1e-41])]
    )
    ties = torch.arange(-300, 300, dtype=torch.float64) * 2**-9 + 1
    return torch.cat([patterns, usual.to(TORCH[dtype]), ties.to(TORCH[dtype])])


@pytest.mark.parametrize("have", TORCH)
@pytest.mark.parametrize("want", TORCH)
def test_as_torch_casts(have: str, want: str) -> None:
    source = numbers(have)
    made = torch.tensor(cast_bytes(source.view(torch.uint8).numpy().data, have, want)).view(TORCH[want])
    wanted = source.to(TORCH[want])
    assert made.shape == wanted.shape and torch.equal(made.isnan(), wanted.isnan())
    real = ~wanted.isnan()
    signed = torch.int64 if want == "F64" else torch.int32 if want == "F32" else torch.int16
    assert torch.equal(made[real].view(signed), wanted[real].view(signed))


def test_names_and_sizes() -> None:
    assert wire_dtype("auto", "bfloat16") == "BF16" and wire_dtype("float16", "bfloat16") == "F16"
    assert {ITEM_BYTES[name] for name in NAMES.values()} == {2, 4, 8}
    with pytest.raises(KeyError):
        wire_dtype("auto", "int8")
    with pytest.raises(ValueError, match="I32"):
        cast_bytes(b"\0" * 4, "I32", "BF16")
    made = cast_specs([TensorSpec("a", "F32", (3,)), TensorSpec("b", "I64", (2,))], "BF16")
    assert [(spec.dtype, spec.nbytes) for spec in made] == [("BF16", 6), ("I64", 16)]


def test_the_digest_is_of_what_is_sent(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (300,)), TensorSpec("steps", "I64", (2,)), TensorSpec("b", "F32", (40, 5))]
    values = {"a": torch.randn(300), "steps": torch.tensor([1, 2]), "b": torch.randn(40, 5)}
    chunks = [(name, value.contiguous().view(-1).view(torch.uint8).numpy()) for name, value in values.items()]
    sent = cast_specs(specs, "BF16")
    plan = plan_buckets(sent, bucket_bytes=700)
    staging = Staging(tmp_path, folders=[tmp_path])
    try:
        slot, digests = staging.fill(plan, cast_chunks(chunks, specs, "BF16"))
        groups = by_bucket(plan.tensors, len(plan.bucket_bytes))
        buckets = slot.buckets(plan.bucket_bytes)
        assert digests == tuple(bucket_digest(group, bucket) for group, bucket in zip(groups, buckets, strict=True))
        cast = {k: (v.bfloat16() if v.is_floating_point() else v).contiguous() for k, v in values.items()}
        assert digests == digest_tensors(plan.tensors, lambda n: cast[n].view(-1).view(torch.uint8).numpy().data)[0]
        buckets.clear()
    finally:
        staging.close()


def test_chunks_are_those_that_were_announced() -> None:
    specs = [TensorSpec("a", "F32", (1,))]
    data = np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="announced a"):
        list(cast_chunks([("b", data)], specs, "BF16"))
    with pytest.raises(ValueError):
        list(cast_chunks([("a", data), ("b", data)], specs, "BF16"))
