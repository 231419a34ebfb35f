"""Judges and teachers on this host that see images, against transformers' plain forward over the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_config import BARE
from vision_models import plain_logprobs, png, vision_folder

from asyncrl.config import parse
from asyncrl.config.model_facts import VISION_MODELS
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.images.digests import image_digest
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.plugins import find
from asyncrl.preflight.code import check_models
from asyncrl.runtime.model_folder import load_model
from producers.data.tokenizer import Tokenizer
from producers.rewards.judges import generative
from producers.rewards.judges.generative import Written, YesNo
from producers.rewards.judges.teacher import make_teacher
from producers.rewards.judges.templates import open_references
from producers.rewards.outcome import JudgeSettings, Outcome, Problem, TeacherSettings, Verdict
from producers.rewards.sample import RewardSample

TWO = (png(48, 32, 1), png(32, 80, 2))
LIMIT = 1e-5
TEXT = "7"


def sample(images: tuple[bytes, ...], *, later: int = 0, **more: Any) -> RewardSample:
    """A sample as a judge's process gets it; `later`: images of later turns."""
    digests = [image_digest(image) for image in images]
    given: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], **more}
    shown = digests[: len(digests) - later]
    made = RewardSample.from_row(
        {"images": shown}, prompt="1+1", response=TEXT, finish="stop", images=digests[len(shown) :], **given
    )
    return open_references(made, dict(zip(digests, images, strict=True)))


def settings(family: str, **more: Any) -> JudgeSettings:
    table: dict[str, Any] = {
        "kind": "generative",
        "model": str(vision_folder(family)),
        "prompt": "{images}{prompt}={response}",
        "device": "cpu",
        "max_tokens": 300,
        "max_new_tokens": 6,
        "concurrency": 3,
        **more,
    }
    return JudgeSettings(JudgeConfig("big", **table), 60.0, table["model"], "float32", "prompt")


def run(model: Any, samples: list[RewardSample]) -> list[Outcome]:
    found: dict[int, Outcome] = {}

    async def whole() -> None:
        await model.start()
        try:
            await model.score(samples, found.__setitem__)
        finally:
            await model.close()

    asyncio.run(asyncio.wait_for(whole(), 120))
    return [found[place] for place in range(len(samples))]


class Plain:
    """Transformers' own forward over the question of a judge."""

    def __init__(self, family: str) -> None:
        folder = vision_folder(family)
        self.inputs, self.tokenizer = ImageInputs(folder), Tokenizer(folder, trust_remote_code=False)
        options = {"attn_implementation": "sdpa", "dtype": torch.float32}
        self.model = load_model(folder, "language", trust_remote_code=False, **options).train(False)

    def question(self, images: tuple[bytes, ...]) -> list[int]:
        parts = [*[{"type": "image"}] * len(images), {"type": "text", "text": f"1+1={TEXT}"}]
        ids = self.tokenizer.encode_chat([{"role": "user", "content": parts}])
        return [int(one) for one in self.inputs.expand(ids, images)]

    def logprobs(self, ids: list[int], images: tuple[bytes, ...], tokens: list[int]) -> list[float]:
        """Of each of `tokens` as the next one."""
        told = [
            plain_logprobs(self.model, self.inputs, [*ids, token], images, [False] * len(ids) + [True])
            for token in tokens
        ]
        return [float(one[0]) for one in told]


SHOWN = (TWO, (), TWO[:1], TWO[1:])


@pytest.mark.parametrize("family", VISION_MODELS)
def test_yes_and_no_are_those_of_a_forward_with_the_images(family: str) -> None:
    plain = Plain(family)
    judge = YesNo(settings(family, answer="yes_no", yes=("1",), no=("2",)))
    outcomes = run(judge, [sample(images, later=len(images) // 2) for images in SHOWN])
    tokens = [judge.first_tokens(word) for word in ("1", "2")]
    assert all(len(one) == 1 for one in tokens)
    values = []
    for images, outcome in zip(SHOWN, outcomes, strict=True):
        yes, no = np.exp(plain.logprobs(plain.question(images), images, [one[0] for one in tokens]))
        assert isinstance(outcome, Verdict), outcome
        assert outcome.value == pytest.approx(yes / (yes + no), abs=LIMIT)
        values.append(round(outcome.value, 4))
    assert len(set(values)) == len(values)  # it looks


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])  # whose files have other names than their parameters
def test_a_judge_writes_what_it_sees(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[GenRequest, GenDelta]] = []
    make = find("asyncrl.engines", "hf")

    class Watched(make):  # type: ignore[misc, valid-type]
        async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
            async for delta in super().generate(request):
                found.append((request, delta))
                yield delta

    monkeypatch.setattr(generative, "find", lambda *_: Watched)
    plain = Plain(family)
    run(Written(settings(family, temperature=1.0)), [sample(images) for images in SHOWN])
    assert sorted(len(request.images) for request, _ in found) == [0, 1, 1, 2]
    for request, delta in found:
        ids, said = request.prompt_ids.tolist(), delta.token_ids.tolist()
        assert ids == plain.question(request.images)
        sampled = [False] * len(ids) + [True] * len(said)
        expected = plain_logprobs(plain.model, plain.inputs, [*ids, *said], request.images, sampled)
        assert np.abs(expected - delta.logprobs).max() < LIMIT


def test_a_judge_fails_a_sample_whose_images_it_cannot_see() -> None:
    judge = YesNo(settings("qwen3_vl", answer="yes_no", yes=("1",), no=("2",), max_tokens=30))
    missing = open_references(sample((), later=0), {})
    missing.row["images"] = ["0" * 64]
    outcomes = run(judge, [missing, sample((b"\x89PNG",)), sample(TWO), sample(())])
    assert [getattr(one, "reason", "") for one in outcomes] == ["raised", "raised", "too_long", ""]
    assert "missing" in str(outcomes[0]) and "image: " in str(outcomes[1])


@pytest.mark.parametrize("family", VISION_MODELS)
def test_a_teacher_reads_the_images_of_a_prompt(family: str) -> None:
    """A sampled placeholder is a plain token, as for the policy."""
    plain = Plain(family)
    inputs = plain.inputs
    samples, wanted = [], []
    for images, response in ((TWO, [8, 9, inputs.token, 2]), ((), [11, 12]), (TWO[:1], [13] * 7)):
        ids = inputs.expand([5, *[9, inputs.token, 11] * len(images), 7], images).tolist()
        samples.append(sample(images, prompt_ids=ids, response_ids=response))
        sampled = [False] * len(ids) + [True] * len(response)
        wanted.append(plain_logprobs(plain.model, inputs, [*ids, *response], images, sampled))
    teacher = TeacherSettings("vllm", 1.0, 2, (), True)
    given = settings(family, kind="classifier", prompt="")
    for outcome, expected in zip(run(make_teacher(given, teacher), samples), wanted, strict=True):
        assert isinstance(outcome, Verdict), outcome
        logs = np.frombuffer(outcome.arrays["teacher_logprobs"], np.float32)
        assert np.abs(logs - expected).max() < LIMIT


def test_a_teacher_refuses_images_that_it_would_read_in_another_way() -> None:
    inputs = ImageInputs(vision_folder("qwen2_5_vl"))
    ids = inputs.expand([5, inputs.token, 7], TWO[:1]).tolist()
    teacher = TeacherSettings("vllm", 1.0, 0, (), True)
    model = make_teacher(settings("qwen2_5_vl", kind="classifier", prompt=""), teacher)
    outcomes = run(
        model,
        [
            sample(TWO[:1], prompt_ids=[*ids, inputs.token], response_ids=[8]),  # more tokens than this one has
            sample(TWO[:1], prompt_ids=[5, inputs.token], response_ids=[8]),
            sample(TWO, later=1, prompt_ids=ids, response_ids=[8]),
            sample(TWO[:1], prompt_ids=ids, response_ids=[8, 9, 4], rows=[(1, 1)]),
            sample(TWO[:1], prompt_ids=ids, response_ids=[8]),
        ],
    )
    assert [isinstance(one, Problem) for one in outcomes] == [True] * 4 + [False], outcomes


def test_check_says_which_judges_and_teachers_see(tmp_path: Path) -> None:
    vision, other, text = vision_folder("qwen2_5_vl"), vision_folder("llava"), tmp_path
    (text / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 80}')
    (text / "model.safetensors").write_bytes(b"")

    def problems(policy: Path, *more: str) -> str:
        config = parse(BARE, overrides=[f'model.path="{policy}"', *more])
        return " ".join(error.message for error in check_models(config))

    def judge(model: Path) -> str:
        return f'judge=[{{name="g", kind="generative", model="{model}", prompt="{{images}}{{response}}"}}]'

    reward = 'reward=[{judge="g"}]'
    assert problems(text, judge(vision), reward) == ""
    assert "reads text alone" in problems(vision, judge(text), reward)
    for policy, teacher in ((vision, vision), (text, text)):
        assert problems(policy, f'teacher=[{{name="t", model="{teacher}"}}]') == ""
    for policy, teacher in ((vision, text), (text, vision), (vision, other)):
        assert "one family" in problems(policy, f'teacher=[{{name="t", model="{teacher}"}}]')
    assert "behind a server" in problems(vision, 'teacher=[{name="t", model="m", url="http://h:1"}]')
