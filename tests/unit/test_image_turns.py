"""Environments of several turns with images: engine and learner against the plain forward of transformers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from env_lab import SayingEngine
from PIL import Image
from vision_models import plain_logprobs, png, vision_folder

from asyncrl.config import Config, load
from asyncrl.config.model_facts import VISION_MODELS
from asyncrl.demo import squares
from asyncrl.engine import EngineCapabilities, GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure
from asyncrl.images.batches import digests_in
from asyncrl.images.digests import image_digest
from asyncrl.images.model_inputs import ImageInputs, open_inputs
from asyncrl.images.rows import normalise_row
from asyncrl.runtime.model_folder import load_model
from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch.assembly import assemble, image_problem
from learners.batch.micro_batches import decode_share, encode_share
from learners.gang.gang import Gang
from producers.data.prompts import encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.loading import build_decoder
from producers.engines.request_checks import request_problem
from producers.environments.multi_turn import Turns, make_rollout
from producers.environments.scripted_play import play_row
from producers.rollout.rollout import Finished
from producers.rollout.session import Session

ROOT = Path(__file__).parents[2]
LIMIT = 1e-5
GROUP = 3
FIRST = png(32, 48, 9)


def configured(folder: Path, *settings: str) -> Config:
    common = (
        f"model.path={folder}", "run.dir=/nowhere", "evaluation.every=0", "data.max_prompt_tokens=256",
        "sampling.max_new_tokens=400", "learner.micro_batch_tokens=1500", "environment.name=tools",
        'environment.tools=["calculator"]', "environment.max_turns=4", *settings,
    )  # fmt: skip
    return load(ROOT / "configs" / "quickstart.toml", common)


@pytest.fixture(scope="module", params=VISION_MODELS)
def folder(request: pytest.FixtureRequest) -> Path:
    return vision_folder(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    return load_model(folder, "language", trust_remote_code=False, **options).train(False).requires_grad_(False)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    joined = Gang.join(configured(vision_folder("qwen2_vl")))
    yield joined
    joined.leave()


class DecodingEngine:
    """The decode loop of the engine hf, stepped by whoever waits; every request is checked as the engine does it."""

    def __init__(self, decoder: Decoder, config: Config) -> None:
        self.decoder, self.config = decoder, config
        self.asked: list[GenRequest] = []
        self._ready: dict[str, list[GenDelta]] = {}
        decoder.swap(0, lambda: None)

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("hf", 8, 900, images=True, image_turns=True)

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        able = {"images": True, "image_turns": True}
        assert not request_problem(request, self.config, vocab=0, taken=False, version=0, **able)
        self.asked.append(request)
        self.decoder.submit(request)
        left = len(request.indices)
        while left:
            for delta in self.decoder.step():
                self._ready.setdefault(delta.id, []).append(delta)
            for delta in self._ready.pop(request.id, ()):
                left -= bool(delta.finish)
                yield delta
            await asyncio.sleep(0)

    async def abort(self, ids: Any) -> int:
        return self.decoder.abort(ids)


def engine_of(folder: Path, model: Any, config: Config) -> DecodingEngine:
    built = build_decoder(
        model, slots=4, max_prompt=600, max_new=400, recompute=True, where=str(folder), images=open_inputs(config)
    )
    return DecodingEngine(built.decoder, config)


def picture(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(png(48, 16 * (2 + seed % 3), seed)))


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def user(*parts: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts],
    }


async def show_pictures(chat: Any, row: Any) -> float:
    """Two turns behind the prompt, the second with two pictures; then a conversation of its own with one."""
    [first] = row["images"]
    assert first.mode == "RGB" and first.size == (32, 48)
    assert chat.messages[0]["content"][0]["image"] == FIRST
    seed = chat.session.index  # other pictures in every sample
    await chat.say(max_new_tokens=9)
    await chat.say([user("look ", part(picture(seed)))], max_new_tokens=9)
    await chat.say([user(part(png(16, 16, 50)), part(picture(seed + 10)), " and?")], max_new_tokens=9)
    chat.restart([user("another ", part(picture(seed)), "?"), *[user("text")] * bool(seed)])
    await chat.say(max_new_tokens=9)
    return float(seed)


ROW = {"prompt": [user(part(FIRST), "what?")], "ground_truth": ""}


def play(environment: Turns, engine: Any, config: Config, row: Any, *, seed: int = 5) -> list[Finished]:
    found = normalise_row(row, prompt_key="prompt", image_key="images", folder=Path())
    images = tuple(found.images[digest] for digest in found.row["images"]) if found.images else ()
    tokenizer = Tokenizer(config.model.path, trust_remote_code=False)
    ids = encode_prompt(found.row, config.data, tokenizer, inputs=environment.inputs, images=images)
    request = GenRequest(
        "7:1", ids, tuple(range(GROUP)), seed, config.sampling.max_new_tokens, stop_ids=tokenizer.eos_ids, images=images
    )

    async def run() -> list[Finished]:
        found_row = found.row
        return [item async for item in environment.play(engine, request, found_row) if isinstance(item, Finished)]

    done = asyncio.run(asyncio.wait_for(run(), 120))
    return sorted(done, key=lambda item: item.sample.index)


def batch_of(done: list[Finished], row: dict[str, Any], prompt_ids: Any, images: dict[str, bytes]) -> ClaimedBatch:
    """As a learner claims it."""
    samples = tuple(
        SampleData(
            item.sample.index, item.sample.token_ids, item.sample.logprobs, item.mask, item.sample.runs,
            item.sample.finish, float(item.reward or 0.0), {}, {}, item.rows, item.turns,
            images=tuple((place, image_digest(image)) for place, image in item.images),
        )
        for item in done
    )  # fmt: skip
    return ClaimedBatch(1, 0, False, (GroupData(7, 1, row, prompt_ids, samples, {}),), {}, images=images)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_log_probs_of_all_turns_are_those_of_transformers(
    folder: Path, model: Any, gang: Gang, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(folder, f"learner.packing={packing}", f"sampling.group_size={GROUP}")
    tokenizer, inputs = Tokenizer(folder, trust_remote_code=False), ImageInputs(folder)
    environment, engine = Turns(config, tokenizer, show_pictures), engine_of(folder, model, config)
    towers: list[int] = []
    features = model.get_image_features
    monkeypatch.setattr(
        model, "get_image_features", lambda **given: towers.append(len(given["pixel_values"])) or features(**given)
    )
    done = next(
        done
        for done in (play(environment, engine, config, ROW, seed=seed) for seed in range(40))
        if any(inputs.token in item.sample.token_ids[: item.images[0][0]] for item in done)
    )  # a placeholder was sampled before a picture was shown
    assert len(done) == GROUP and len(engine.asked) % (4 * GROUP) == 0
    assert towers[0] == len(inputs.pixels(FIRST).arrays["pixel_values"]), "once for the first turns of all samples"
    prompt = encode_prompt(
        normalise_row(ROW, prompt_key="prompt", image_key="images", folder=Path()).row,
        config.data, tokenizer, inputs=inputs, images=(FIRST,),
    )  # fmt: skip
    images = {image_digest(image): image for item in done for _, image in item.images} | {image_digest(FIRST): FIRST}
    for item in done:
        ids, sampled = item.sample.token_ids, item.mask.astype(bool)
        [(second, _)] = item.rows
        rows = [
            (np.concatenate([prompt, ids[:second]]), (FIRST,), np.concatenate([0 * prompt, sampled[:second]]), 0),
            (ids[second:], (), sampled[second:], second),
        ]
        for tokens, shown, chosen, start in rows:
            stop = start + len(tokens) - (0 if start else len(prompt))
            every = shown + tuple(image for place, image in item.images if start <= place < stop)
            assert len(every) == (1 if start else 4)
            wanted = plain_logprobs(model, inputs, tokens, every, chosen.astype(bool))
            mine = slice(start, stop)
            assert np.abs(wanted - item.sample.logprobs[mine][sampled[mine]]).max() < LIMIT
    batch = batch_of(done, {"images": [image_digest(FIRST)]}, prompt, images)
    assert set(digests_in(batch)) == set(images)
    assert image_problem(batch.groups[0], images, inputs) == ""
    made = assemble(batch, algorithm=config.learner.algorithm, ranks=1, max_tokens=1500, packing=packing == "true")
    [share] = decode_share(encode_share(made.shares[0]))
    backend = FSDP2Backend(config, gang)
    for micro, logprobs in zip(share.micro, backend.forward_logprobs(share.micro), strict=True):
        chosen = micro.mask.astype(bool)
        assert np.abs(logprobs.float().numpy()[chosen] - micro.behaviour[chosen]).max() < LIMIT


# ---------------------------------------------------------------- the example


def test_the_example_shows_the_board_after_every_move() -> None:
    """With a policy that walks: every picture is that of the cells, and the reward is 1 on arrival."""
    folder = vision_folder("qwen2_5_vl")
    config = configured(folder, "environment.name=asyncrl.demo.squares:FindSquare")
    environment = Turns(config, Tokenizer(folder, trust_remote_code=False), make_rollout(config))
    [row] = squares.prompt_rows(1, 3)
    (x, y), (to_x, to_y) = squares.start_cells(3)
    path = [("right" if to_x > x else "left")] * abs(to_x - x) + [("down" if to_y > y else "up")] * abs(to_y - y)
    assert len(path) > 1
    engine = SeeingEngine(environment._tokenizer, lambda index, turn, text: path[turn] if not index else "stay")
    walked, *stood = play(environment, engine, config, row)
    assert walked.reward == pytest.approx(1.0) and [one.reward for one in stood] == [0.0] * (GROUP - 1)
    boards = []
    for word in path[:-1]:
        step = squares.MOVES[word]
        x, y = x + step[0], y + step[1]
        boards.append(squares.draw((x, y), (to_x, to_y)))
    shown = [Image.open(io.BytesIO(image)) for _, image in walked.images]
    assert [one.tobytes() for one in shown] == [one.tobytes() for one in boards]
    asked = [one for one in engine.asked if one.indices == (0,)]
    assert [len(one.images) for one in asked] == list(range(1, len(path) + 1))
    assert [len(one.image_places) for one in asked] == list(range(len(path)))


class SeeingEngine(SayingEngine):
    """Says what a test wants, whatever it sees."""

    sees = True

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("saying", 8, 900, images=self.sees, image_turns=self.sees)


def test_frames_of_a_video_are_shown_as_images() -> None:
    folder = vision_folder("qwen2_5_vl")
    config = configured(folder)
    frames = [picture(seed) for seed in range(3)]
    rollout = saying([user({"type": "video", "video": frames}, "what moves?")])
    environment = Turns(config, Tokenizer(folder, trust_remote_code=False), rollout)
    row = {"prompt": [user(part(FIRST), {"type": "video", "video": [FIRST, png(16, 16)]})], "ground_truth": ""}
    engine = SeeingEngine(environment._tokenizer, lambda *_: "yes")
    done = play(environment, engine, config, row)
    shown = [Image.open(io.BytesIO(image)).tobytes() for _, image in done[0].images]
    assert shown == [frame.tobytes() for frame in frames]
    assert [len(one.images) for one in engine.asked if one.indices == (0,)] == [3, 6]


# ---------------------------------------------------------------- what is refused


def failure_of(rollout: Any, family: str = "qwen2_5_vl", *, row: Any = ROW, sees: bool = True) -> str:
    folder = vision_folder(family)
    config = configured(folder)
    environment = Turns(config, Tokenizer(folder, trust_remote_code=False), rollout)
    engine = SeeingEngine(environment._tokenizer, lambda *_: "yes")
    engine.sees = sees
    with pytest.raises(EnvironmentFailure) as failed:
        play(environment, engine, config, row)
    return failed.value.reason


def saying(*observations: Any) -> Any:
    async def rollout(chat: Any, row: Any) -> float:
        await chat.say()
        for observation in observations:
            await chat.say(observation)
        return 1.0

    return rollout


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part(b"<svg/>")], "no reader of PNG"),
        ([part("/etc/passwd")], "names a file"),
        ([part("https://a.b/c.png")], "names a file"),
        ([{"type": "image"}], "holds none"),
        ([part(png(16, 16)), "<|image_pad|>"], "1 images for 2 placeholders"),
        ([{"type": "video", "video": "v.mp4"}], "'video'"),
        ([{"type": "video", "video": ["v.mp4"]}], "names a file"),
    ],
)
def test_an_image_that_cannot_be_shown_fails_the_sample(parts: list[Any], words: str) -> None:
    reason = failure_of(saying([user(*parts)]))
    assert reason.startswith("environment.observation: ") and words in reason


def test_an_engine_without_images_in_turns_fails_the_sample() -> None:
    plain = {"prompt": [user("what?")], "ground_truth": ""}
    assert "reads text alone" in failure_of(saying([user(part(png(16, 16)))]), row=plain, sees=False)
    assert "the prompt has images" in failure_of(saying(), sees=False)


def test_without_room_for_an_image_the_sample_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vision_folder("qwen2_5_vl")
    config = configured(folder, "sampling.max_new_tokens=40")
    environment = Turns(config, Tokenizer(folder, trust_remote_code=False), saying([user(part(png(128, 128)))]))
    engine = SeeingEngine(environment._tokenizer, lambda *_: "yes")
    done = play(environment, engine, config, ROW)
    assert [(item.sample.finish, item.images, item.mask) for item in done] == [("length", (), None)] * GROUP


# ---------------------------------------------------------------- sessions


def said(*tokens: int) -> GenDelta:
    ids = np.array(tokens, np.int32)
    return GenDelta("7:1", 0, ids, -np.ones(len(ids), np.float32), ((3, len(ids)),), "stop")


def test_a_session_keeps_images_with_their_rows() -> None:
    session = Session(np.array([1, 99, 2], np.int32), index=0, images=(b"a",))
    group = GenRequest("7:1", session.context, (0,), 5, 8, images=(b"a",))
    session.add_turn(said(5))
    session.observe([7, 99, 7], (b"b",), (1,))
    asked = session.request(group, max_prompt_tokens=4, max_new_tokens=4)
    assert (asked.images, asked.image_places) == ((b"a", b"b"), (5,))
    session.add_turn(said(6))
    assert session.extend([*session.context.tolist(), 99], (b"a", b"b", b"c"), (1, 5, 8))  # it goes on
    session.add_turn(said(4))
    other = session.context.tolist()
    assert not session.extend(other, (b"x", b"b", b"c"), (1, 5, 8))  # the same ids, with another image
    session.add_turn(said(4))
    session.observe([99], (b"late",), (0,))
    done = session.finish(1.0)
    first = len(other) - 3
    assert done.rows == ((first, len(other)),)
    begun = [(place + first, image) for place, image in ((1, b"x"), (5, b"b"), (8, b"c"))]
    assert done.images == ((2, b"b"), (5, b"c"), *begun)  # without the one that no turn saw


def test_the_scripted_play_shows_images_to_their_author() -> None:
    folder = vision_folder("qwen2_5_vl")
    config = configured(folder, "environment.name=asyncrl.demo.squares:FindSquare")
    environment = Turns(config, tokenizer := Tokenizer(folder, trust_remote_code=False), make_rollout(config))
    [row] = squares.prompt_rows(1, 3)
    found = normalise_row(row, prompt_key="prompt", image_key="images", folder=Path())
    images = tuple(found.images.values())
    played = asyncio.run(play_row(environment, config, tokenizer, found.row, ["up"], images=images))
    assert not played.failure and len(played.images) == played.turns - 1


def plot(numbers: list[int]) -> Image.Image:
    """Draw numbers.

    Args:
        numbers: to draw.
    """
    return Image.new("RGB", (16 * len(numbers), 16), (200, 10, 10))


def test_a_tool_may_answer_with_a_picture() -> None:
    folder = vision_folder("qwen2_5_vl")
    config = configured(folder, 'environment.tools=["test_image_turns:plot"]')
    environment = Turns(config, Tokenizer(folder, trust_remote_code=False), make_rollout(config))
    call = '<tool_call>{"name": "plot", "arguments": {"numbers": [1, 2, 3]}}</tool_call>'
    engine = SeeingEngine(environment._tokenizer, lambda _, turn, __: "so" if turn else call)
    done = play(environment, engine, config, ROW)
    assert [Image.open(io.BytesIO(image)).size for item in done for _, image in item.images] == [(48, 16)] * GROUP
