"""Vision-language models: inputs, the hf decoder and the learner against the plain forward of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from vision_models import PATCH, plain_logprobs, png, vision_folder

from asyncrl.config import Config, load
from asyncrl.config.model_facts import MROPE_MODELS, VISION_MODELS
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import open_image
from asyncrl.images.digests import image_digest
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.runtime.model_folder import load_image_processor, load_model, load_tokenizer
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.backends.vision import vision_part
from learners.batch.assembly import images_in
from learners.batch.micro_batches import Minibatch, Sample, decode_share, encode_share, packed_row, padded_rows
from learners.gang.gang import Gang
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.loading import build_decoder

ROOT = Path(__file__).parents[2]
TWO = (png(48, 32, 1), png(32, 80, 2))
LIMIT = 1e-5


@pytest.fixture(scope="module", params=VISION_MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return vision_folder(request.param)


@pytest.fixture(scope="module")
def inputs(folder: Path) -> ImageInputs:
    return ImageInputs(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    return load_model(folder, "language", trust_remote_code=False, **options).train(False).requires_grad_(False)


def prompt(inputs: ImageInputs, images: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return inputs.expand([5, *[9, inputs.token, 11] * len(images), 7], images)


def plain(model: Any, inputs: ImageInputs, ids: np.ndarray[Any, Any], images: Sequence[bytes], new: int) -> Any:
    """Log-probs of the last `new` tokens, all sampled, by transformers."""
    return plain_logprobs(model, inputs, ids, images, np.arange(len(ids)) >= len(ids) - new)


# ---------------------------------------------------------------- inputs


def test_positions_are_those_of_transformers(inputs: ImageInputs, model: Any) -> None:
    ids = np.concatenate([prompt(inputs, TWO), [inputs.token, 6, 8]]).astype(np.int32)
    row = inputs.row(ids, TWO)
    assert row.stray.nonzero()[0].tolist() == [len(ids) - 3]
    if not inputs.mrope:  # those of text
        assert row.positions[-1].tolist() == list(range(len(ids)))
        assert inputs.shift(ids, TWO) == 0
        return
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    kinds = (tokens == inputs.token).int()
    kinds[:, -3:] = 0
    grid = torch.tensor([one.grid for one in row.images])
    wanted, delta = model.model.get_rope_index(tokens, mm_token_type_ids=kinds, image_grid_thw=grid)
    assert row.positions.tolist() == wanted[:, 0].tolist()
    assert inputs.shift(ids, TWO) == int(delta)


def test_every_image_needs_its_placeholder() -> None:
    inputs = ImageInputs(vision_folder("qwen2_5_vl"))
    image = inputs.token
    with pytest.raises(ValueError, match="2 images for 1 placeholders"):
        inputs.expand([1, image, 2], TWO)
    with pytest.raises(ValueError, match="has fewer placeholders"):
        inputs.row(np.array([1, image, 2], np.int32), TWO[:1])
    assert len(inputs.expand([1, image, 2], TWO[:1])) == 2 + (48 // 16) * (32 // 16)


@pytest.mark.parametrize("family", MROPE_MODELS)  # those of the engine vllm
def test_collapse_undoes_expand(family: str) -> None:
    inputs = ImageInputs(vision_folder(family))
    image = inputs.token
    for given in ([5, 9, image, 11, 9, image, 11, 7], [image, image]):  # in the second, nothing between them
        ids = np.array(given, np.int32)
        assert inputs.collapse(inputs.expand(ids, TWO), TWO).tolist() == given
        with pytest.raises(ValueError, match="stand for no image"):
            inputs.collapse(np.append(inputs.expand(ids, TWO), image).astype(np.int32), TWO)


def test_large_images_are_scaled_down() -> None:
    large = png(128, 128)
    whole, small = (ImageInputs(vision_folder("qwen3_vl"), max_pixels=most) for most in (0, 64 * 64))
    assert (whole.pixels(large).tokens, small.pixels(large).tokens) == (64, 16)


@pytest.mark.parametrize(("most", "tiles"), [(0, 10), (9 * 48 * 48, 10), (4 * 48 * 48, 5), (48 * 48, 1)])
def test_internvl_gets_tiles(most: int, tiles: int) -> None:
    """As many as its limit allows, and the whole image if there are several."""
    inputs = ImageInputs(vision_folder("internvl"), max_pixels=most)
    assert inputs.pixels(png(128, 128)).arrays["pixel_values"].shape == (tiles, 3, 48, 48)


@pytest.mark.parametrize("family", ["llava", "internvl"])
def test_ids_and_pixels_are_those_of_the_processors_of_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vision_folder(family)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    images = load_image_processor(folder, trust_remote_code=False)
    if family == "llava":
        full = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor: Any = transformers.LlavaProcessor(images, tokenizer, patch_size=PATCH, **full)
    else:  # its check of classes needs torchvision
        made: Any = transformers.InternVLProcessor
        monkeypatch.setattr(made, "check_argument_for_proper_class", lambda *_: None)
        for name, token in (("start", "<img>"), ("end", "</img>"), ("context", "<IMG_CONTEXT>")):
            setattr(tokenizer, f"{name}_image_token", token)
            setattr(tokenizer, f"{name}_image_token_id", tokenizer.convert_tokens_to_ids(token))
        tokenizer.video_token = "<video>"
        processor = made(images, tokenizer, None, image_seq_length=9)
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    wanted = processor(images=[open_image(one) for one in TWO], text=text, return_tensors="np")
    inputs = ImageInputs(folder)
    assert inputs.expand(tokenizer.encode(text), TWO).tolist() == wanted["input_ids"][0].tolist()
    pixels = [inputs.pixels(one).arrays["pixel_values"] for one in TWO]
    assert np.array_equal(np.concatenate(pixels), wanted["pixel_values"])


def test_a_llava_with_another_tower_is_refused(tmp_path: Path) -> None:
    shutil.copytree(vision_folder("llava"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] = {"model_type": "pixtral"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="vision tower 'pixtral'"):
        ImageInputs(tmp_path)


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    with pytest.raises(ConfigError, match="images work with qwen2_vl"):
        ImageInputs(tmp_path)


# ---------------------------------------------------------------- engine


def decode(decoder: Decoder, requests: Sequence[GenRequest], *, swap_at: int = -1) -> dict[str, list[GenDelta]]:
    decoder.swap(0, lambda: None)
    for request in requests:
        decoder.submit(request)
    found: dict[str, list[GenDelta]] = {}
    while not decoder.idle:
        if decoder.steps == swap_at:
            decoder.swap(1, lambda: None)
        for delta in decoder.step():
            found.setdefault(delta.id, []).append(delta)
    decoder.reset()
    return found


@pytest.mark.parametrize("swap_at", [-1, 3], ids=["one version", "recomputed in mid-sample"])
def test_log_probs_of_the_decoder_are_those_of_transformers(
    folder: Path, inputs: ImageInputs, model: Any, swap_at: int
) -> None:
    built = build_decoder(model, slots=8, max_prompt=192, max_new=9, recompute=True, where=str(folder), images=inputs)
    assert built.kind == "slots"
    shown = {"two": TWO, "none": (), "one": TWO[1:]}
    requests = [
        GenRequest(name, prompt(inputs, images), (0, 1, 2), 3, 9, images=images) for name, images in shown.items()
    ]
    for name, samples in decode(built.decoder, requests, swap_at=swap_at).items():
        for sample in samples:
            ids = np.concatenate([prompt(inputs, shown[name]), sample.token_ids])
            wanted = plain(model, inputs, ids, shown[name], len(sample.token_ids))
            assert np.abs(wanted - sample.logprobs).max() < LIMIT, name


def test_images_change_the_answer(folder: Path, inputs: ImageInputs, model: Any) -> None:
    """A decoder that dropped the pixels would pass with equal prompts."""
    built = build_decoder(model, slots=4, max_prompt=192, max_new=6, recompute=False, where=str(folder), images=inputs)
    one, other = (png(48, 48, seed) for seed in (3, 4))
    requests = [
        GenRequest(name, prompt(inputs, (image,)), (0,), 3, 6, images=(image,))
        for name, image in (("one", one), ("other", other))
    ]
    found = decode(built.decoder, requests)
    assert np.abs(found["one"][0].logprobs[:1] - found["other"][0].logprobs[:1]).max() > 1e-4


# ---------------------------------------------------------------- learner


def configured(folder: Path, *settings: str) -> Config:
    common = (f"model.path={folder}", "run.dir=/nowhere", "evaluation.every=0")
    return load(ROOT / "configs" / "quickstart.toml", [*common, *settings])


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    joined = Gang.join(configured(vision_folder("qwen2_vl")))
    yield joined
    joined.leave()


@pytest.fixture(scope="module")
def backend(folder: Path, gang: Gang) -> FSDP2Backend:
    return FSDP2Backend(configured(folder), gang)


def samples(inputs: ImageInputs) -> list[Sample]:
    numbers = np.random.default_rng(0)
    found = []
    for images, new in ((TWO, 5), (TWO, 7), ((), 4), (TWO[:1], 6)):
        start = prompt(inputs, images)
        answer = numbers.integers(3, 40, new)
        answer[1] = inputs.token  # the policy may sample one
        ones = np.ones(new, np.uint8)
        ids = np.concatenate([start, answer]).astype(np.int32)
        found.append(Sample(ids, len(start), -ones.astype(np.float32), ones, 1.0, images=images))
    return found


@pytest.mark.parametrize("cut", [packed_row, padded_rows])
def test_the_learner_agrees_with_transformers(backend: FSDP2Backend, inputs: ImageInputs, model: Any, cut: Any) -> None:
    backend.self_check()
    every = samples(inputs)
    [share] = decode_share(encode_share([Minibatch(10, 4, (cut(every),))]))
    got = backend.forward_logprobs(share.micro)[0].float().numpy()
    wanted = [plain(model, inputs, one.tokens, one.images, one.mask.size) for one in every]
    assert np.abs(got - np.concatenate(wanted)).max() < LIMIT


def test_a_share_holds_each_image_once(inputs: ImageInputs) -> None:
    every = samples(inputs)
    halves = (packed_row(every[:2]), packed_row(every[2:]), packed_row([]))
    data = encode_share([Minibatch(10, 4, halves)])
    assert [data.count(image) for image in TWO] == [1, 1]
    [back] = decode_share(data)
    assert [micro.images for micro in back.micro] == [TWO + TWO, TWO[:1], ()]


def tower_gradients(backend: FSDP2Backend) -> list[torch.Tensor]:
    """Those of tower and projector; LLaVA reads the last layer but one of its tower."""
    found = {name: p.grad for name, p in backend._policy.named_parameters() if vision_part(name)}
    unread = (
        (".encoder.layers.1.", ".post_layernorm.") if any(".multi_modal_projector.linear_1" in n for n in found) else ()
    )
    return [grad for name, grad in found.items() if not any(part in name for part in unread)]


def test_gradients_do_not_depend_on_the_cut_and_reach_the_tower(backend: FSDP2Backend, inputs: ImageInputs) -> None:
    every = samples(inputs)
    norms = []
    for cut in ([packed_row(every)], [padded_rows(every)], [packed_row(every[:1]), packed_row(every[1:])]):
        backend.train(cut, lambda logprobs, *_: (-logprobs.sum(), {}))
        tower = tower_gradients(backend)
        assert min(float(grad.abs().sum()) for grad in tower) > 0
        norms.append(backend.discard())
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_without_an_image_the_tower_has_a_gradient_of_zero(backend: FSDP2Backend, inputs: ImageInputs) -> None:
    backend.train([packed_row(samples(inputs)[2:3])], lambda logprobs, *_: (-logprobs.sum(), {}))
    assert sum(float(grad.abs().sum()) for grad in tower_gradients(backend)) == 0.0
    assert backend.discard() > 0


@pytest.mark.parametrize(
    ("family", "settings", "trained"),
    [
        ("qwen3_vl", ["learner.vision.tower=false"], {"", "projector"}),
        ("llava", ["learner.vision.tower=false"], {"", "projector"}),
        ("internvl", ["learner.vision.tower=false"], {"", "projector"}),
        ("qwen3_vl", ["learner.vision.tower=false", "learner.vision.projector=false"], {""}),
    ],
)
def test_parts_can_be_frozen_and_have_rates_of_their_own(
    gang: Gang, family: str, settings: list[str], trained: set[str]
) -> None:
    folder = vision_folder(family)
    backend = FSDP2Backend(configured(folder, *settings, "learner.vision.projector_lr_scale=0.5"), gang)
    before = {name: p.detach().clone() for name, p in backend._policy.named_parameters()}
    backend.train([packed_row(samples(ImageInputs(folder)))], lambda logprobs, *_: (-logprobs.sum(), {}))
    backend.step(lr=1e-3, max_norm=1e9)
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in backend._policy.named_parameters()}
    assert {vision_part(name) for name, change in moved.items() if change} == trained
    # AdamW's first update is the learning rate for every number with a gradient.
    largest = {part: max(c for n, c in moved.items() if vision_part(n) == part) for part in trained}
    assert largest == pytest.approx({part: 5e-4 if part == "projector" else 1e-3 for part in trained}, rel=0.02)


def test_a_group_without_its_images_is_not_packed_as_text() -> None:
    image, digest = TWO[0], image_digest(TWO[0])
    batch, group = SimpleNamespace(images={digest: image}), SimpleNamespace(row={"images": [digest, digest]})
    assert images_in(batch, group) == (image, image)
    with pytest.raises(KeyError):
        images_in(SimpleNamespace(images={}), group)
