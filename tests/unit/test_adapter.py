"""Encoding adapter: names, configuration, checks, and the numbers of W0 + (alpha / r) B A."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.errors import HandshakeError
from asyncrl.wire import Manifest, Tensor
from weightsync.encoding.adapter import (
    AdapterConfig,
    adapter_product,
    check_adapter,
    config_text,
    peft_name,
    plan_adapter,
    read_config,
)
from weightsync.plan.buckets import TensorSpec, check_layout, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest

CONFIG = AdapterConfig(r=2, lora_alpha=6.0, target_modules=("v_proj", "q_proj"))
BASE = "ab" * 16
LAYER = "model.layers.0.self_attn"


def specs() -> list[TensorSpec]:
    """As a module of peft names them: B before A, v before q."""
    shapes = {"A": (2, 5), "B": (3, 2)}
    return [
        TensorSpec(f"base_model.model.{LAYER}.{module}.lora_{half}.default.weight", "F32", shapes[half])
        for module in ("v_proj", "q_proj")
        for half in "BA"
    ]


def published(config: AdapterConfig = CONFIG) -> tuple[Manifest, tuple[Tensor, ...], list[bytes]]:
    plan = plan_adapter(specs(), config, bucket_bytes=64)
    rng = np.random.default_rng(0)
    buckets = [rng.normal(size=size // 4).astype(np.float32).tobytes() for size in plan.bucket_bytes]
    digests = [bucket_digest(g, b) for g, b in zip(group_by_bucket(plan.tensors, len(buckets)), buckets, strict=True)]
    text = config_text(config)
    digest = version_digest(digests, base=BASE, adapter=text)
    manifest = Manifest(3, plan.digest, plan.bucket_bytes, tuple(digests), digest, "adapter", BASE, text)
    return manifest, plan.tensors, buckets


def test_names_and_order_are_those_of_a_saved_adapter() -> None:
    plan = plan_adapter(specs(), CONFIG, bucket_bytes=1 << 20)
    assert [tensor.name for tensor in plan.tensors] == [
        f"base_model.model.{LAYER}.{module}.lora_{half}.weight" for module in ("q_proj", "v_proj") for half in "AB"
    ]
    assert plan_adapter(reversed(specs()), CONFIG, bucket_bytes=1 << 20).digest == plan.digest
    assert peft_name("model.x.lora_B.weight") == peft_name("base_model.model.model.x.lora_B.default.weight")


@pytest.mark.parametrize("scale", ["plain", "rslora"])
def test_what_arrives_is_the_low_rank_update(scale: str) -> None:
    """From the received bytes alone: the merged weight acts as the base with the adapter beside it."""
    config = msgspec.structs.replace(CONFIG, use_rslora=scale == "rslora")
    manifest, tensors, buckets = published(config)
    check_layout(manifest, tensors)
    read, pairs = check_adapter(manifest, tensors, held=BASE)
    assert read.scaling == (6.0 / 2**0.5 if scale == "rslora" else 3.0)
    assert [pair.module for pair in pairs] == [f"{LAYER}.q_proj", f"{LAYER}.v_proj"]
    for pair in pairs:
        a, b = (
            np.frombuffer(buckets[t.bucket], np.float32, t.nbytes // 4, t.offset).reshape(t.shape)
            for t in (pair.a, pair.b)
        )
        base, down, up = nn.Linear(5, 3, bias=False), nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
        down.weight.data, up.weight.data = torch.tensor(a), torch.tensor(b)
        x = torch.randn(7, 5)
        beside = base(x) + (config.lora_alpha / (2**0.5 if config.use_rslora else 2)) * up(down(x))
        merged = base.weight + adapter_product(torch.tensor(a), torch.tensor(b), scaling=read.scaling)
        torch.testing.assert_close(x @ merged.T, beside, rtol=1e-5, atol=1e-5)
        want = np.array([[sum(b[i, k] * a[k, j] for k in range(2)) for j in range(5)] for i in range(3)])
        np.testing.assert_allclose(adapter_product(a, b, scaling=read.scaling), want * read.scaling, rtol=1e-5)


def test_the_configuration_is_pefts_in_one_form() -> None:
    text = config_text(CONFIG)
    assert json.loads(text) == {
        "bias": "none",
        "lora_alpha": 6.0,
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    assert config_text(msgspec.structs.replace(CONFIG, target_modules=("q_proj", "v_proj", "q_proj"))) == text
    assert config_text(read_config(text)) == text


def test_the_digest_sees_base_and_configuration() -> None:
    manifest, _, _ = published()
    others = [
        published(msgspec.structs.replace(CONFIG, lora_alpha=7.0))[0].digest,
        version_digest(manifest.bucket_digests, base="cd" * 16, adapter=manifest.adapter),
        version_digest(manifest.bucket_digests),
    ]
    assert len({manifest.digest, *others}) == 4 and manifest.encoding == "adapter"


def altered(**changes: Any) -> Manifest:
    """A manifest of which the digest is right and something else is not."""
    manifest = msgspec.structs.replace(published()[0], **changes)
    digest = version_digest(manifest.bucket_digests, base=manifest.base, adapter=manifest.adapter)
    return msgspec.structs.replace(manifest, digest=digest)


def test_a_wrong_adapter_is_refused() -> None:
    manifest, tensors, _ = published()
    check_adapter(manifest, tensors, held=BASE)
    text = manifest.adapter
    texts = {
        "no json": "{",
        "no text": "",
        "unknown": text[:-1] + ',"x":1}',
        "rank": text.replace('"r":2', '"r":4'),
        "rank 0": text.replace('"r":2', '"r":0'),
        "target": text.replace("v_proj", "k_proj"),
        "no target": text.replace('"q_proj","v_proj"', ""),
        "kind": text.replace("LORA", "IA3"),
        "bias": text.replace("none", "all"),
        "deep": '{"target_modules":' + "[" * 5000,
    }
    wrong = {what: altered(adapter=other) for what, other in texts.items()} | {
        "full": altered(encoding="full"),
        "no base": altered(base=""),
        "another base": altered(base="cd" * 16),
        "digest of the buckets alone": msgspec.structs.replace(
            manifest, digest=version_digest(manifest.bucket_digests)
        ),
        "alpha changed on the way": msgspec.structs.replace(manifest, adapter=text.replace("6.0", "9.0")),
    }
    for what, bad in wrong.items():
        with pytest.raises(HandshakeError) as raised:
            check_adapter(bad, tensors, held=BASE)
        assert raised.value.code == "sync.plan", what
    for kept in (tensors[1:], tensors[:2] + tensors[3:]):
        with pytest.raises(HandshakeError, match="partner"):
            check_adapter(manifest, kept, held=BASE)
    with pytest.raises(HandshakeError, match="none"):
        check_adapter(manifest, tensors, held="")
    plain = plan_buckets([TensorSpec(f"{LAYER}.q_proj.weight", "F32", (3, 5))], bucket_bytes=64)
    with pytest.raises(HandshakeError, match="not a LoRA tensor"):
        check_adapter(manifest, plain.tensors, held=BASE)


@pytest.mark.parametrize(
    "extra",
    [
        TensorSpec("base_model.model.model.embed_tokens.lora_embedding_A", "F32", (2, 5)),
        TensorSpec(f"base_model.model.{LAYER}.q_proj.lora_magnitude_vector.default.weight", "F32", (3,)),
        TensorSpec("base_model.model.lm_head.modules_to_save.default.weight", "F32", (3, 5)),
        TensorSpec(f"base_model.model.{LAYER}.o_proj.lora_A.weight", "F32", (2, 5)),
        TensorSpec(f"{LAYER}.q_proj.lora_A.weight", "F32", (2, 5)),
    ],
)
def test_what_is_not_carried_is_refused_at_the_plan(extra: TensorSpec) -> None:
    with pytest.raises(ValueError):
        plan_adapter([*specs(), extra], CONFIG, bucket_bytes=64)


@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 1), (5,)])
def test_ranks_that_disagree_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rank 2"):
        plan_adapter([*specs()[:-1], TensorSpec(specs()[-1].name, "F32", shape)], CONFIG, bucket_bytes=64)
