"""Prompts with images on engines that expand the placeholders themselves: stand-ins of SGLang and vLLM, and vLLM."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from engine_lab import MAX_NEW, MAX_PROMPT, SLOTS, Bench, all_of, config_of, request
from served import Served
from vision_models import plain_logprobs, png, vision_folder
from vllm_served import Server

from asyncrl.engine import GenRequest
from asyncrl.errors import WorkError
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.plugins import find
from asyncrl.runtime.model_folder import load_model
from asyncrl.wire import Manifest
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors

HERE = Path(__file__).parent
TWO = (png(48, 32, 1), png(32, 80, 2))
LIMIT, REAL_LIMIT = 1e-4, 1e-3  # against a plain forward; the real one's image processor rounds otherwise
SERVERS = {"sglang": "standin_sglang.py", "vllm_http": "standin_vllm.py"}


class Lab(NamedTuple):
    bench: Bench
    inputs: ImageInputs
    folder: Path
    limit: float


def model_of(folder: Path, seed: int) -> Any:
    """A model of this folder's family with other weights, as the learner holds it."""
    model = load_model(folder, "language", trust_remote_code=False, attn_implementation="sdpa", dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train(False).requires_grad_(False)


async def publish(engine: Any, model: Any, version: int) -> None:
    """What a publisher sends: parameters by transformers' names."""
    held = dict(model.named_parameters())
    plan = plan_buckets([TensorSpec(k, "F32", tuple(v.shape)) for k, v in held.items()], bucket_bytes=40_000)
    raw = {name: value.detach().contiguous().flatten().view(torch.uint8).numpy() for name, value in held.items()}
    digests, whole = digest_tensors(plan.tensors, lambda name: raw[name])
    await engine.begin_update(Manifest(version, plan.digest, tuple(plan.bucket_bytes), digests, whole), plan.tensors)
    for number, size in enumerate(plan.bucket_bytes):
        bucket = bytearray(size)
        for one in plan.tensors:
            if one.bucket == number:
                bucket[one.offset : one.offset + one.nbytes] = raw[one.name].tobytes()
        await engine.apply_bucket(number, memoryview(bucket))
    assert await engine.commit_update() == whole


def blind() -> bool:
    """Whether the real vLLM cannot serve images here."""
    return not all(importlib.util.find_spec(name) for name in ("vllm", "torchvision"))


REAL = (pytest.mark.skipif(blind(), reason="vLLM with torchvision: make vllm"), pytest.mark.timeout(900))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("sglang", "qwen2_vl"), id="sglang-standin-qwen2_vl"),
        pytest.param(("sglang", "qwen3_vl"), id="sglang-standin-qwen3_vl"),
        pytest.param(("vllm_http", "qwen2_5_vl"), id="vllm_http-standin"),
        *(
            pytest.param((engine, "qwen2_5_vl", "real"), id=f"{engine}-real", marks=REAL)
            for engine in ("vllm_http", "vllm")
        ),
    ],
)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    engine, family, *real = request.param
    folder = tmp_path_factory.mktemp(engine) / "model"
    shutil.copytree(vision_folder(family), folder)
    served: Any = None
    if engine == "vllm":
        pass
    elif real:
        served = Server(folder, longest=MAX_PROMPT + MAX_NEW, slots=SLOTS)
        served.wait()
    else:
        command = [sys.executable, str(HERE / SERVERS[engine]), "--model-path", str(folder)]
        served = Served(command, log=folder / "standin.log", environment={"OMP_NUM_THREADS": "1"})
    more = f'url = ["{served.url}"]' if served else ""
    made = find("asyncrl.engines", engine)(config_of(folder, engine=engine, kv="keep", more=more))
    bench = Bench(made)
    try:
        bench.run(made.start(), limit_s=120)
        yield Lab(bench, ImageInputs(folder), folder, REAL_LIMIT if real else LIMIT)
    finally:
        bench.close()
        if served:
            served.kill() if real else served.end()


def asked(lab: Lab, images: tuple[bytes, ...], *more: int, **settings: Any) -> GenRequest:
    ids = lab.inputs.expand([5, *[9, lab.inputs.token, 11] * len(images), 7], images)
    return request(lab.bench.name(), [*ids.tolist(), *more], images=images, **settings)


def test_log_probs_are_those_of_the_weights_and_images(lab: Lab) -> None:
    """Under two versions: features of an image under the first are not used under the second."""
    assert lab.bench.engine.capabilities().images
    for seed in (1, 2):
        model = model_of(lab.folder, seed)
        lab.bench.version += 1
        lab.bench.run(publish(lab.bench.engine, model, lab.bench.version))
        for images in (TWO, (), TWO[1:]):
            wanted = asked(lab, images, indices=(0, 1), max_new_tokens=12)
            for delta in lab.bench.run(all_of(lab.bench.engine, wanted)).values():
                ids = np.concatenate([wanted.prompt_ids, delta.token_ids])
                plain = plain_logprobs(model, lab.inputs, ids, images, np.arange(len(ids)) >= len(wanted.prompt_ids))
                assert np.abs(plain - delta.logprobs).max() < lab.limit, (seed, len(images))
                assert delta.runs == ((lab.bench.version, 12),)


def refused(lab: Lab, wanted: GenRequest) -> str:
    with pytest.raises(WorkError) as error:
        lab.bench.run(all_of(lab.bench.engine, wanted))
    assert error.value.code == "sample.invalid"
    assert lab.bench.engine.health().alive
    return error.value.message


def test_a_prompt_that_the_server_sees_in_another_way_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's processor has another limit of pixels: it makes more tokens of the image."""
    large = png(128, 128, 3)
    engine: Any = lab.bench.engine
    small = ImageInputs(lab.folder, max_pixels=64 * 64)
    monkeypatch.setattr(engine, "_images", small)
    ids = small.expand([5, 9, lab.inputs.token, 11], (large,))
    assert len(ids) < len(lab.inputs.expand([5, 9, lab.inputs.token, 11], (large,)))
    why = refused(lab, request(lab.bench.name(), ids.tolist(), images=(large,)))
    assert "with images that has" in why or "other tokens of the images" in why


def test_a_sampled_placeholder_and_a_damaged_image_end_their_sample_alone(lab: Lab) -> None:
    assert "stand for no image" in refused(lab, asked(lab, TWO, lab.inputs.token, 8))
    damaged = msgspec.structs.replace(asked(lab, TWO), images=(TWO[0], b"\x89PNG"))
    assert "image: " in refused(lab, damaged)
    assert lab.bench.run(all_of(lab.bench.engine, asked(lab, TWO)))
