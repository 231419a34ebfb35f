"""Gives an engine the weights of its model's folder as version 0, for use without a learner: a judge, a benchmark.

Any engine takes them by `begin_update`, `apply_bucket` and `commit_update`, as from weight sync. Guarantees: the
tensors are those of the safetensors files, each read once; the digest of the commit is that of the read bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.engine import Engine
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.images.rows import takes_images
from asyncrl.runtime.model_folder import load_model
from asyncrl.wire import Manifest
from producers.engines.model_files import weight_files
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest

BUCKET_BYTES = 64 << 20
NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


async def commit_folder(engine: Engine, folder: str | Path, *, dtype: str) -> None:
    """Commit the folder's weights, cast to `dtype`, as version 0.

    Raises:
        ConfigError: `config.model` if there are none.
    """
    tensors = _tensors(Path(folder), dtype)
    plan = plan_buckets(
        [TensorSpec(name, NAMES[str(value.dtype)], tuple(value.shape)) for name, value in tensors.items()],
        bucket_bytes=BUCKET_BYTES,
    )
    buckets = _buckets(plan, tensors)
    digests = tuple(
        bucket_digest([tensor for tensor in plan.tensors if tensor.bucket == number], bucket)
        for number, bucket in enumerate(buckets)
    )
    manifest = Manifest(0, plan.digest, plan.bucket_bytes, digests, version_digest(digests))
    await engine.begin_update(manifest, list(plan.tensors))
    for number, bucket in enumerate(buckets):
        await engine.apply_bucket(number, memoryview(bucket))
    await engine.commit_update()


def _tensors(folder: Path, dtype: str) -> dict[str, Any]:
    import torch
    from safetensors import SafetensorError, safe_open

    wanted = getattr(torch, dtype)
    found: dict[str, Any] = {}
    if takes_images(folder):  # engines know such a model by transformers' names, which differ from those of its files
        try:
            return dict(load_model(folder, "language", trust_remote_code=False, dtype=wanted).named_parameters())
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError("config.model", str(error), where=str(folder)) from None
    try:
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
                for name in opened.keys():  # noqa: SIM118
                    value = opened.get_tensor(name)
                    found[name] = value.to(wanted) if value.is_floating_point() else value
    except (OSError, SafetensorError, *UNREADABLE) as error:
        raise ConfigError("config.model", str(error), where=str(folder)) from None
    if not found:
        raise ConfigError("config.model", "it has no *.safetensors (weights)", where=str(folder))
    return found


def _buckets(plan: Plan, tensors: dict[str, Any]) -> list[bytearray]:
    import torch

    buckets = [bytearray(size) for size in plan.bucket_bytes]
    for tensor in plan.tensors:
        raw = tensors[tensor.name].detach().contiguous().flatten().view(torch.uint8).numpy()
        buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = raw.tobytes()
    return buckets
