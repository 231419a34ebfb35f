"""Reward functions see the images of a prompt: every form, in the real child process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from small_folder import write_folder
from test_archive import make_claim

from asyncrl.config import parse
from asyncrl.images.digests import image_digest
from asyncrl.images.folder import ImageFolder
from asyncrl.runs.rescore import Plan
from asyncrl.runtime.run_dir import RunDir
from learners.batch.archive import Archive
from producers.rewards.pipe import FunctionSpec, Result
from producers.rewards.rescore import Rescoring
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer

MODULE = """
def red(images):
    assert all(image.mode == "RGB" for image in images)
    return float(sum(image.getpixel((0, 0))[0] for image in images))

def own(sample):
    assert sample.row["images"] == sample.extra_info["images"]
    return red(sample.row["images"])

def vandal(sample):
    found = red(sample.row["images"])
    for image in sample.row["images"]:
        image.putpixel((0, 0), (0, 0, 0))
    return found

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return red(extra_info["images"])

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [red(extra["images"]) for extra in extra_infos]

def trl(prompts, completions, images, **columns):
    assert all(prompt[0]["content"][0] == {"type": "image"} for prompt in prompts)
    return [red(found) for found in images]

def areal(prompt, completions, prompt_ids, completion_ids, images):
    return red(images)

def openrlhf(queries, prompts, labels, images):
    return [red(found) for found in images]

def later(sample):
    return red(sample.images) - red(sample.row["images"])

async def slowly(sample):
    return red(sample.row["images"])
"""
FORMS = ["own", "verl", "verl_batch", "trl", "areal", "openrlhf", "slowly", "vandal"]


def square(red: int) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (3, 2), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = {image_digest(data): data for data in map(square, (1, 10, 100))}
ONE, TEN, HUNDRED = IMAGES


def sample(*digests: str) -> RewardSample:
    prompt = [{"role": "user", "content": [{"type": "image"} for _ in digests]}]
    row = {"prompt": prompt, "images": list(digests), "extra_info": {"index": 3}}
    return RewardSample.from_row(row, prompt="p", response="r", prompt_ids=[1], response_ids=[2], finish="stop")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "picture_rewards.py").write_text(MODULE)
    old = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), old]))


@pytest.fixture
def scorers() -> Iterator[list[Scorer]]:
    made: list[Scorer] = []
    yield made
    for scorer in made:
        scorer.close()


def score(scorers: list[Scorer], names: list[str], *samples: RewardSample, **images: bytes) -> list[Result]:
    specs = [FunctionSpec(name if ":" in name else f"picture_rewards:{name}", name) for name in names]
    scorer = Scorer(specs, prompt_key="prompt", timeout_s=20.0)
    scorers.append(scorer)
    scorer.start()
    results: dict[int, Result] = {}
    scorer.score(samples, lambda result: results.update({result.place: result}), images)
    return [results[place] for place in range(len(samples))]


def test_every_form_sees_the_images_of_its_samples(scorers: list[Scorer]) -> None:
    """`vandal`, the last one, changes the images that it gets: no other sample of the job sees that."""
    found = score(scorers, FORMS, sample(ONE, TEN), sample(HUNDRED), sample(TEN, ONE), **IMAGES)
    assert [result.reason for result in found] == [""] * 3, found
    for result, expected in zip(found, (11.0, 100.0, 11.0), strict=True):
        assert result.parts == dict.fromkeys(FORMS, expected)


def test_images_of_later_turns_are_at_hand(scorers: list[Scorer]) -> None:
    shown = [msgspec.structs.replace(sample(ONE), images=later) for later in ([TEN, HUNDRED], [HUNDRED], ["0" * 64])]
    shown.append(msgspec.structs.replace(sample(), row={"prompt": "p", "images": []}, images=[TEN]))
    found = score(scorers, ["later"], *shown, **IMAGES)
    assert [result.reward for result in found[:2]] == [109.0, 99.0]
    assert found[2].reason == "raised" and "missing" in found[2].detail
    assert found[3].reward == 10.0


def test_an_image_that_is_missing_or_damaged_fails_its_samples(scorers: list[Scorer]) -> None:
    images = {**IMAGES, HUNDRED: square(100)[:45]}
    del images[TEN]
    found = score(scorers, ["own", "trl"], sample(ONE), sample(TEN), sample(ONE, HUNDRED), sample(ONE), **images)
    assert [result.reason for result in found] == ["", "raised", "raised", ""]
    assert "missing" in found[1].detail and "image: " in found[2].detail
    assert [found[place].reward for place in (0, 3)] == [2.0, 2.0]


def test_scorers_that_ship_get_no_images(scorers: list[Scorer]) -> None:
    """They read text: nothing is decoded for them, or fails."""
    row = {"prompt": "p", "images": [ONE], "answer": "r"}
    good = RewardSample.from_row(row, prompt="p", response="r", prompt_ids=[1], response_ids=[2], finish="stop")
    [found] = score(scorers, ["builtin:exact"], good, **{ONE: b"damaged"})
    assert (found.reason, found.reward) == ("", 1.0) and not scorers[0].sees_images


def test_archived_batches_are_scored_again_with_their_images(tmp_path: Path) -> None:
    """A group whose image is gone is left out, with a warning."""
    folder = write_folder(tmp_path / "model")
    toml = f"""
    model.path = "{folder}"
    data.source = "a:b"
    run.dir = "{tmp_path}"
    sandbox.kind = "none"
    log.archive = true
    [[reward]]
    function = "picture_rewards:own"
    """
    config, digests = parse(toml), [TEN, HUNDRED]
    images = ImageFolder(RunDir(tmp_path).images)
    assert [images.put(IMAGES[digest]) for digest in digests] == digests
    archive = Archive(config, say=print)
    archive.put(make_claim(groups=(7,), row=json.dumps({"images": digests})), epoch=1)
    archive.put(make_claim(4, groups=(8,), row=json.dumps({"images": [ONE]})), epoch=1)
    work = Rescoring(config, Plan(run=str(tmp_path), steps=(3, 4), kept={}))
    try:
        [scored] = work.step(3)
        assert scored.group == 7 and scored.rewards == {0: 110.0, 1: 110.0} and not scored.failed
        assert work.step(4) == []
    finally:
        work.close()
