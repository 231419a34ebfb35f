"""Codes and scales of quantised weights: their bounds, which tensors have them, and what a learner publishes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_lent_weights import backend_of, gang, model_dir

from asyncrl.config import parse
from asyncrl.errors import AsyncRLError
from learners.backends.base import DTYPES
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from weightsync.encoding.quantised import FORMATS, SUFFIX, decode, dequantise, is_matrix, quantise, quantise_all
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import bucket_digest
from weightsync.staging import Staging

assert gang and model_dir  # fixtures


def rows() -> torch.Tensor:
    """Rows of very different sizes, one of zeros, one of denormal numbers, one with an outlier."""
    made = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 64)[:, None]
    made[3] = 0
    made[4] = 1e-44
    made[5, 7] = 1e6 * made[5].abs().max()
    return made


def test_int8_errs_by_half_a_step_at_most() -> None:
    matrix = rows()
    codes, scale = quantise(matrix, "int8")
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (64, 1)
    off = (dequantise(codes, scale, torch.float32).double() - matrix.double()).abs()
    assert bool((off <= scale.double() * 0.500001).all())
    assert codes.abs().amax(1).tolist() == [127 if row not in (3, 4) else 0 for row in range(64)]


def test_fp8_errs_by_its_precision_at_most() -> None:
    matrix = rows()
    codes, scale = quantise(matrix, "fp8")
    assert codes.dtype == torch.float8_e4m3fn
    off = (dequantise(codes, scale, torch.float32).double() - matrix.double()).abs()
    bound = torch.maximum(matrix.double().abs() / 16, scale.double() / 1024)
    assert bool((off <= bound * 1.00001).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_zeros_stay_and_numbers_that_are_none_are_refused(kind: str) -> None:
    codes, scale = quantise(torch.zeros(3, 4), kind)
    assert not dequantise(codes, scale, torch.bfloat16).any() and bool((scale > 0).all())
    assert quantise(torch.zeros(0, 4), kind)[1].shape == (0, 1)
    for bad in (torch.inf, -torch.inf, torch.nan):
        matrix = torch.ones(3, 4)
        matrix[1, 2] = bad
        with pytest.raises(AsyncRLError, match=r"layers\.0\.up\.weight: a weight is not finite") as raised:
            list(quantise_all([("layers.0.up.weight", matrix), ("model.layers.0.up.weight", matrix)][1:], kind))
        assert raised.value.code == "learner.nonfinite"


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_have_the_same_codes_however_they_are_split(kind: str) -> None:
    matrix = rows().bfloat16()
    whole = quantise(matrix, kind)
    parts = [quantise(part, kind) for part in matrix.split((5, 1, 58))]
    for one, several in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in several]))


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("model.layers.7.self_attn.q_proj.weight", (8, 4), True),
        ("model.layers.7.mlp.experts.3.up_proj.weight", (8, 4), True),
        ("model.layers.7.mlp.experts.gate_up_proj", (2, 8, 4), True),
        ("model.visual.blocks.0.attn.qkv.weight", (8, 4), True),
        ("model.layers.7.mlp.experts.gate_up_proj_bias", (2, 8), False),
        ("model.layers.7.mlp.gate.weight", (8, 4), False),
        ("model.layers.7.mlp.shared_expert_gate.weight", (1, 4), False),
        ("model.layers.7.self_attn.q_proj.bias", (8,), False),
        ("model.layers.7.input_layernorm.weight", (8,), False),
        ("model.layers.7.mixer.A_log", (8, 4), False),
        ("model.layers.7.mixer.conv1d.weight", (8, 1, 4), False),
        ("model.embed_tokens.weight", (8, 4), False),
        ("lm_head.weight", (8, 4), False),
    ],
)
def test_matrices_of_layers_alone_are_quantised(name: str, shape: tuple[int, ...], taken: bool) -> None:
    assert is_matrix(name, shape) is taken


def test_adapters_are_merged_and_then_quantised(model_dir: Path, gang: Gang) -> None:
    text = f'model.path="{model_dir}"\nmodel.dtype="float32"\ndata.source="a:b"\nlearner.lora.rank=4\n'
    text += '[[reward]]\nfunction="a:b"'
    sent = {}
    for dtype in ("auto", "int8"):
        config = parse(text, overrides=[f"weightsync.dtype={dtype}", "learner.lora.publish=merged"])
        backend = FSDP2Backend(config, gang)
        assert backend.adapters is None
        sent[dtype] = dict(backend.iter_hf_weights())
        assert list(sent[dtype]) == [spec.name for spec in backend.weight_specs()]
        shapes = {spec.name: spec.shape for spec in backend.weight_specs()}
    for name, data in sent["auto"].items():
        if is_matrix(name, shapes[name]):
            codes, scale = quantise(torch.from_numpy(data).view(torch.float32).view(shapes[name]), "int8")
            assert sent["int8"][name].tobytes() == codes.numpy().tobytes()
            assert sent["int8"][name + SUFFIX].tobytes() == scale.numpy().tobytes()
        else:
            assert sent["int8"][name].tobytes() == data.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_learner_publishes_codes_and_their_digests(
    model_dir: Path, gang: Gang, tmp_path: Path, dtype: str, kind: str
) -> None:
    plain = backend_of(model_dir, gang, dtype=dtype)
    backend = backend_of(model_dir, gang, dtype=dtype, sent=kind)
    plan = plan_buckets([TensorSpec(*spec) for spec in backend.weight_specs()], bucket_bytes=1 << 14)
    assert backend.own_rows() is None
    staging = Staging(tmp_path, folders=[tmp_path])
    try:
        slot, digests = staging.fill(plan, backend.iter_hf_weights(staging.settle))
        buckets = [bytes(bucket) for bucket in slot.buckets(plan.bucket_bytes)]
    finally:
        staging.close()
    groups = [[one for one in plan.tensors if one.bucket == number] for number in range(len(buckets))]
    assert digests == tuple(bucket_digest(*pair) for pair in zip(groups, buckets, strict=True))
    sent = {one.name: (one, buckets[one.bucket][one.offset : one.offset + one.nbytes]) for one in plan.tensors}
    wide, quantised = DTYPES[dtype][1], 0
    for (name, kept, shape), (_, data) in zip(plain.weight_specs(), plain.iter_hf_weights(), strict=True):
        tensor, raw = sent[name]
        assert tensor.shape == shape
        if tensor.dtype == kept:
            assert raw == data.tobytes()
            continue
        quantised += 1
        target = bytearray(data.nbytes)
        scale = sent[name + SUFFIX][1]
        codes, rows_ = (memoryview(bytearray(one)) for one in (raw, scale))
        decode(codes, rows_, memoryview(target), sent=tensor.dtype, held=kept)
        matrix = torch.frombuffer(bytearray(data.tobytes()), dtype=wide).view(shape)
        wanted = dequantise(*quantise(matrix, kind), wide)
        assert torch.equal(torch.frombuffer(target, dtype=wide).view(shape), wanted)
        assert not torch.equal(wanted, matrix)
    assert quantised == 3 * 7 and len(sent) == len(plain.weight_specs()) + quantised
