"""Judges on the real vLLM, in its environment: a server that is asked as OpenAI's, and an engine of the judge's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_lab import model_of, save_model
from rigs import lacks
from vllm_served import Server

from asyncrl.config.sections.reward import JudgeConfig
from producers.rewards.judges.remote import Remote
from producers.rewards.judges.teacher import make_teacher
from producers.rewards.outcome import JudgeSettings, Outcome, TeacherSettings, Verdict
from producers.rewards.pipe import FunctionSpec
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(lacks("vllm", "vllm")()), reason="no vLLM here")]
LAST = r"t(\d+)"  # the number of the last token of an answer
ANSWER = 6  # tokens
TEXTS = [[5, 9, 7], [40, 3], [64, 65, 66, 67]]  # no t1.. or t2..: special tokens begin so for transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("judge-model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder, longest=64, slots=4)
    try:
        made.wait()
        yield made
    finally:
        made.kill()


def sample(ids: list[int]) -> RewardSample:
    text = " ".join(f"t{token}" for token in ids)
    return RewardSample.from_row({}, prompt="t4", response=text, prompt_ids=[4], response_ids=ids, finish="stop")


@torch.inference_mode()
def next_logprobs(ids: list[int]) -> Any:
    """Of the token that follows, by a plain forward of the judge's weights, f4 `[V]`."""
    return model_of(0)(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)


def greedy(ids: list[int], count: int) -> list[int]:
    said: list[int] = []
    for _ in range(count):
        said.append(int(next_logprobs([*ids, *said]).argmax()))
    return said


def asked_of_the_server(table: JudgeConfig, texts: list[list[int]]) -> list[Outcome]:
    async def whole() -> list[Outcome]:
        judge = Remote(JudgeSettings(table, 60.0, "policy", "float32", "prompt"))
        await judge.start()
        found: dict[int, Outcome] = {}
        try:
            await judge.score([sample(ids) for ids in texts], lambda place, what: found.update({place: what}))
        finally:
            await judge.close()
        return [found[place] for place in range(len(texts))]

    return asyncio.run(whole())


def test_the_number_in_the_answer_of_a_server(server: Server, folder: Path) -> None:
    table = JudgeConfig(
        "grader",
        kind="url",
        url=f"{server.url}/v1",
        model=str(folder),
        prompt="t8 {response}",
        pattern=LAST,
        max_new_tokens=ANSWER,
    )
    for ids, found in zip(TEXTS, asked_of_the_server(table, TEXTS), strict=True):
        assert isinstance(found, Verdict), found
        assert found.value == greedy([8, *ids], ANSWER)[-1]


def test_how_likely_a_server_finds_yes(server: Server, folder: Path) -> None:
    for ids in TEXTS:
        logs = next_logprobs([8, *ids])
        first, third = (int(token) for token in logs.topk(3).indices[[0, 2]])
        table = JudgeConfig(
            "grader",
            kind="url",
            url=f"{server.url}/v1",
            model=str(folder),
            prompt="t8 {response}",
            answer="yes_no",
            yes=(f"t{third}",),
            no=(f"t{first}",),
        )
        (found,) = asked_of_the_server(table, [ids])
        assert isinstance(found, Verdict), found
        yes, no = float(logs[third].exp()), float(logs[first].exp())
        assert found.value == pytest.approx(yes / (yes + no), abs=1e-4)


def test_a_judge_with_a_vllm_of_its_own(folder: Path) -> None:
    table = JudgeConfig(
        "grader",
        kind="generative",
        engine="vllm",
        model=str(folder),
        prompt="t8 {response}",
        pattern=LAST,
        max_tokens=64,
        max_new_tokens=ANSWER,
        concurrency=4,
    )
    asked = JudgeSettings(table, 60.0, "policy", "float32", "prompt")
    scorer = Scorer([FunctionSpec("", "grader", 1.0, ())], prompt_key="prompt", timeout_s=60.0, judge=asked)
    try:
        scorer.start()
        found: dict[int, Any] = {}
        scorer.score([sample(ids) for ids in TEXTS], lambda result: found.update({result.place: result}))
    finally:
        scorer.close()
    for place, ids in enumerate(TEXTS):
        assert not found[place].reason, found[place]
        assert found[place].reward == greedy([8, *ids], ANSWER)[-1]


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_teacher_on_a_server_says_what_its_model_says(server: Server, folder: Path, top_k: int) -> None:
    teacher = TeacherSettings("vllm", 1.0, top_k)
    table = JudgeConfig("big", kind="url", url=f"{server.url}/v1", model=str(folder), max_tokens=64)
    found: dict[int, Outcome] = {}

    async def whole() -> None:
        model = make_teacher(JudgeSettings(table, 60.0, str(folder), "float32", "prompt", teacher), teacher)
        await model.start()
        try:
            await model.score([sample(ids) for ids in TEXTS], lambda place, what: found.update({place: what}))
        finally:
            await model.close()

    asyncio.run(whole())
    for place, ids in enumerate(TEXTS):
        outcome = found[place]
        assert isinstance(outcome, Verdict), outcome
        told = np.frombuffer(outcome.arrays["teacher_logprobs"], np.float32)
        rows = torch.stack([next_logprobs([4, *ids[:at]]) for at in range(len(ids))])
        assert np.abs(told - rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()).max() < 1e-4
        if top_k:
            top = np.frombuffer(outcome.arrays["teacher_top"], np.float32).reshape(len(ids), top_k)
            assert np.abs(top - rows.topk(top_k).values.numpy()).max() < 1e-4
