"""What a round of weight sync carries if parts of a vision-language model are frozen: a hop without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_image_turns import configured
from vision_models import png, vision_folder

from asyncrl.images.model_inputs import ImageInputs
from asyncrl.wire import Manifest
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.backends.vision import vision_part
from learners.batch.micro_batches import Sample, packed_row
from learners.gang.gang import Gang
from weightsync.encoding.delta import encode
from weightsync.plan.buckets import Plan, TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import version_digest
from weightsync.publisher.delta_chain import DeltaChain, Staged
from weightsync.staging import Staging

FAMILY = "qwen2_5_vl"  # of the demonstration of images


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    joined = Gang.join(configured(vision_folder(FAMILY)))
    yield joined
    joined.leave()


def one_sample(inputs: ImageInputs) -> Sample:
    image = png(48, 48)
    prompt = inputs.expand([5, inputs.token, 7], (image,))
    ones = np.ones(4, np.uint8)
    ids = np.concatenate([prompt, [8, 9, 10, 11]]).astype(np.int32)
    return Sample(ids, len(prompt), -ones.astype(np.float32), ones, 1.0, images=(image,))


NOTHING = len(encode(b"", b"", ()))  # bytes of a hop without a change


def hop_bytes(tmp_path: Path, gang: Gang, *settings: str) -> tuple[Plan, dict[str, int], int]:
    """The plan, and the bytes of the hop over one step of the optimizer: by part of the model, and as it is sent."""
    folder = vision_folder(FAMILY)
    backend = FSDP2Backend(configured(folder, "model.dtype=bfloat16", *settings), gang)
    plan = plan_buckets([TensorSpec(*spec) for spec in backend.weight_specs()], bucket_bytes=1 << 18)
    staging = Staging(tmp_path, folders=[tmp_path])
    chain = DeltaChain(limit=4, deadline_s=60.0, threads=1)
    versions: list[list[bytes]] = []

    def publish() -> Staged:
        slot, digests = staging.fill(plan, backend.iter_hf_weights())
        head = Manifest(len(versions), plan.digest, plan.bucket_bytes, digests, version_digest(digests))
        staged = Staged(head, plan, staging, slot, slot.order)
        chain.extend(staged)
        versions.append([bytes(bucket) for bucket in slot.buckets(plan.bucket_bytes)])
        return staged

    publish()
    backend.train([packed_row([one_sample(ImageInputs(folder))])], lambda logprobs, *_: (-logprobs.sum(), {}))
    backend.step(lr=1e-4, max_norm=1e9)
    [hop] = publish().hops
    chain.close()
    parts = dict.fromkeys(("", "projector", "tower"), 0)
    buckets = zip(*versions, group_by_bucket(plan.tensors, len(plan.bucket_bytes)), strict=True)
    for old, new, tensors in buckets:
        for part in parts:
            mine = [tensor for tensor in tensors if vision_part(tensor.name) == part]
            parts[part] += len(encode(old, new, mine)) - NOTHING
    return plan, parts, sum(hop.nbytes)


@pytest.mark.parametrize(
    ("settings", "moved", "share"),
    [
        ((), {"", "projector", "tower"}, 0.31),
        (("learner.vision.tower=false",), {"", "projector"}, 0.25),
        (("learner.vision.tower=false", "learner.vision.projector=false"), {""}, 0.19),
        (("learner.lora.rank=2",), {""}, 0.17),  # merged
    ],
    ids=["all", "no tower", "language", "adapters"],
)
def test_a_hop_carries_what_trains(
    tmp_path: Path, gang: Gang, settings: tuple[str, ...], moved: set[str], share: float
) -> None:
    """`share`: of the bytes of the whole weights, as docs/weightsync.md has it."""
    plan, parts, sent = hop_bytes(tmp_path, gang, *settings)
    assert {part for part, nbytes in parts.items() if nbytes} == moved
    assert sent == pytest.approx(sum(parts.values()), rel=0.02)  # and nothing for the rest
    assert sent / plan.nbytes == pytest.approx(share, abs=0.03)
