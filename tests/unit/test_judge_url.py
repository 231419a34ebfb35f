"""A judge behind a URL, against a real HTTP server that is slow, refuses, breaks off and answers nonsense."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from PIL import Image

from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.errors import ConfigError
from asyncrl.images.digests import image_digest
from producers.rewards.judges import rate_limit as pace
from producers.rewards.judges.remote import Remote, read_api_key
from producers.rewards.judges.templates import judge_messages, open_references
from producers.rewards.outcome import JudgeSettings, Outcome, Problem, Verdict
from producers.rewards.pipe import FunctionSpec, Result
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer

Handler = Callable[[int, dict[str, Any]], Awaitable[web.StreamResponse]]


def sample(text: str) -> RewardSample:
    return RewardSample.from_row(
        {"answer": "4"}, prompt="2+2=", response=text, prompt_ids=[1], response_ids=[2], finish="stop"
    )


def answer(text: str, **more: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}, **more}], "usage": {}})


class Server:
    """Counts requests, and how many are under way at once."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.under_way = self.most = 0

    async def take(self, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.times.append(time.monotonic())
        self.keys.append(request.headers.get("Authorization"))
        body = await request.json()
        self.bodies.append(body)
        try:
            return await self.handler(len(self.bodies), body)
        finally:
            self.under_way -= 1


def judge(
    handler: Handler, texts: list[str], *, timeout_s: float = 30.0, **settings: Any
) -> tuple[list[Outcome], Server, Remote]:
    """What the judge says of these responses."""
    server = Server(handler)

    async def whole() -> tuple[list[Outcome], Remote]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server.take)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        given = {"model": "big", "prompt": "Grade {response}", "url": f"http://127.0.0.1:{port}/v1/", **settings}
        table = JudgeConfig("grader", kind="url", **given)
        remote = Remote(JudgeSettings(table, timeout_s, "policy", "float32", "prompt"))
        await remote.start()
        found: dict[int, Outcome] = {}
        try:
            await remote.score([sample(text) for text in texts], lambda place, what: found.update({place: what}))
        finally:
            await remote.close()
            await runner.cleanup()
        assert sorted(found) == list(range(len(texts))), "one outcome for every sample"
        return [found[place] for place in range(len(texts))], remote

    outcomes, remote = asyncio.run(whole())
    return outcomes, server, remote


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FIRST_S", 0.01)


async def good(_: int, body: dict[str, Any]) -> web.StreamResponse:
    return answer(f"Score: {len(body['messages'][-1]['content'])}")


def test_every_sample_is_asked_and_its_number_is_read() -> None:
    outcomes, server, remote = judge(good, ["a", "bb", "ccc"], system="Be strict.", max_new_tokens=9)
    assert [outcome.value for outcome in outcomes if isinstance(outcome, Verdict)] == [7, 8, 9]
    assert server.bodies[0] == {
        "model": "big",
        "temperature": 0.0,
        "n": 1,
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Grade a"}],
    }
    assert server.keys == [None] * 3 and remote.requests == 3 and len(remote.version()) == 16


def test_what_may_pass_is_tried_again() -> None:
    async def shaky(number: int, body: dict[str, Any]) -> web.StreamResponse:
        if number == 1:
            return web.Response(status=429, text="slow down")
        if number == 2:
            return web.Response(status=503)
        if number == 3:
            return web.Response(text="<html>")
        return await good(number, body)

    outcomes, server, remote = judge(shaky, ["a"])
    assert isinstance(outcomes[0], Verdict) and outcomes[0].value == 7
    assert len(server.bodies) == 4 and remote.retries == 3


def test_a_refusal_is_a_failure_and_never_a_number() -> None:
    async def forbidden(number: int, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=401, text="no such key")

    outcomes, server, _ = judge(forbidden, ["a", "b"])
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Problem)] == ["refused"] * 2
    assert "HTTP 401: no such key" in str(outcomes[0]) and len(server.bodies) == 2, "it is not asked again"


def test_a_redirect_is_a_refusal_and_the_key_stays_here() -> None:
    async def elsewhere(number: int, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/v1/chat/completions"})

    outcomes, server, _ = judge(elsewhere, ["a"])
    assert isinstance(outcomes[0], Problem) and outcomes[0].reason == "refused" and "HTTP 307" in str(outcomes[0])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("<html>", "refused"),
        ('{"choices": []}', "refused"),
        ('{"choices": [{"message": {"content": null}}]}', "refused"),
        ("[" * 3000, "refused"),
        ('{"choices": [{"message": {"content": "good"}}]}', "unparsed"),
    ],
)
def test_garbage_is_a_failure(reply: str, reason: str) -> None:
    async def garbage(number: int, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=reply)

    outcomes, server, _ = judge(garbage, ["a"], attempts=2)
    assert isinstance(outcomes[0], Problem) and outcomes[0].reason == reason
    assert len(server.bodies) == (1 if reason == "unparsed" else 2)


def test_an_answer_without_a_number_is_asked_again_where_it_may_change() -> None:
    async def unsure(number: int, body: dict[str, Any]) -> web.StreamResponse:
        return answer("well" if number < 3 else "5")

    outcomes, server, _ = judge(unsure, ["a"], temperature=0.7)
    assert isinstance(outcomes[0], Verdict) and outcomes[0].value == 5 and len(server.bodies) == 3


def test_a_cut_answer_has_no_number() -> None:
    async def long(number: int, body: dict[str, Any]) -> web.StreamResponse:
        return answer("1. first, 2. second", finish_reason="length" if number == 1 else "stop")

    outcomes, _, _ = judge(long, ["a", "b"], concurrency=1)
    assert isinstance(outcomes[0], Problem) and outcomes[0].reason == "unparsed"
    assert isinstance(outcomes[1], Verdict) and outcomes[1].value == 2


def test_retry_after_holds_all_requests_back() -> None:
    async def busy(number: int, body: dict[str, Any]) -> web.StreamResponse:
        if number == 1:
            return web.Response(status=429, headers={"Retry-After": "0.6"})
        return await good(number, body)

    outcomes, server, _ = judge(busy, ["a", "b", "c"], concurrency=1)
    assert all(isinstance(outcome, Verdict) for outcome in outcomes)
    assert server.times[1] - server.times[0] >= 0.6
    outcomes, server, _ = judge(busy, ["a"] * 8, concurrency=2)
    assert all(isinstance(outcome, Verdict) for outcome in outcomes)
    assert server.times[2] - server.times[0] >= 0.6, "other samples wait too, but for the one under way"
    outcomes, server, _ = judge(busy, ["a"], timeout_s=0.5)
    assert isinstance(outcomes[0], Problem) and len(server.bodies) == 1, "longer than the sample has"


def test_a_server_that_hangs_is_a_timeout_of_the_attempt_and_of_the_sample() -> None:
    async def hang(number: int, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(30 if number == 1 or body["messages"][-1]["content"] == "Grade b" else 0)
        return await good(number, body)

    outcomes, server, _ = judge(hang, ["a"], attempt_timeout_s=0.3)
    assert isinstance(outcomes[0], Verdict) and len(server.bodies) == 2
    outcomes, _, _ = judge(hang, ["b"], timeout_s=0.5)
    assert isinstance(outcomes[0], Problem) and outcomes[0].reason == "timeout"


def test_nobody_there_is_unreachable() -> None:
    outcomes, _, _ = judge(good, ["a"], url="http://127.0.0.1:9/v1", attempts=2)
    assert isinstance(outcomes[0], Problem) and outcomes[0].reason == "unreachable" and "2 of 2" in str(outcomes[0])


def test_rate_and_concurrency_are_kept() -> None:
    async def slow(number: int, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await good(number, body)

    outcomes, server, _ = judge(slow, ["a"] * 12, concurrency=3)
    assert all(isinstance(outcome, Verdict) for outcome in outcomes) and server.most == 3
    outcomes, server, _ = judge(good, ["a"] * 6, max_requests_per_s=20.0)
    assert server.times[-1] - server.times[0] >= 5 / 20 - 0.01


def test_a_slow_call_is_asked_a_second_time() -> None:
    async def stuck(number: int, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(60 if number == pace.ENOUGH + 5 else 0.01)
        return await good(number, body)

    count = pace.ENOUGH + 10
    outcomes, server, remote = judge(stuck, ["a"] * count, concurrency=2, hedge=True, timeout_s=40)
    assert all(isinstance(outcome, Verdict) for outcome in outcomes)
    assert remote.hedges >= 1 and len(server.bodies) == count + remote.hedges


def test_yes_and_no_are_read_from_the_likeliest_words() -> None:
    async def likely(number: int, body: dict[str, Any]) -> web.StreamResponse:
        assert body["logprobs"] is True and body["max_tokens"] == 1
        if number == 2:
            return answer("yes")
        top = [{"token": " yes", "logprob": -0.2876820724517809}, {"token": "no", "logprob": -1.3862943611198906}]
        return answer("yes", logprobs={"content": [{"token": "yes", "logprob": -0.28, "top_logprobs": top}]})

    outcomes, _, _ = judge(likely, ["a", "b"], answer="yes_no", concurrency=1)
    assert isinstance(outcomes[0], Verdict) and outcomes[0].value == pytest.approx(0.75)
    assert isinstance(outcomes[1], Problem) and outcomes[1].reason == "refused"


def test_the_key_comes_from_the_environment_or_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_KEY", "s3cret")

    async def leaky(number: int, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=400, text="bad request")

    outcomes, server, _ = judge(leaky, ["a"], api_key_env="GRADER_KEY")
    assert server.keys == ["Bearer s3cret"] and "s3cret" not in str(outcomes[0]) + json.dumps(server.bodies)

    def key(**settings: str) -> str:
        return read_api_key(JudgeSettings(JudgeConfig("g", kind="url", **settings), 1.0, "", "", ""))

    path = tmp_path / "key"
    path.write_text("other\n")
    path.chmod(0o600)
    assert key(api_key_file=str(path)) == "other" and key() == ""
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        key(api_key_file=str(path))
    with pytest.raises(ConfigError, match="No such file"):
        key(api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="NOT_THERE is not set"):
        key(api_key_env="NOT_THERE")


def test_pictures_stand_in_the_question(tmp_path: Path) -> None:
    """Those of the row and of later turns, as a reward worker's child gets them: by digest, with the bytes apart."""
    pictures = [picture(colour) for colour in ("red", "blue", "green")]
    digests = [image_digest(data) for data in pictures]
    row = {"answer": "4", "images": digests[:2]}
    asked = msgspec.structs.replace(sample("two"), row=row, images=[digests[2]])
    shown = open_references(asked, dict(zip(digests, pictures, strict=True)))
    table = JudgeConfig("grader", kind="url", model="big", url="http://h/v1", prompt="See {images}: is it {response}?")
    [message] = judge_messages(table, shown)
    first, *middle, last = message["content"]
    assert (first["text"], last["text"]) == ("See ", ": is it two?")
    for part, data in zip(middle, pictures, strict=True):
        kind, _, coded = part["image_url"]["url"].partition(";base64,")
        assert kind == "data:image/png" and base64.b64decode(coded) == data
    assert table.sees_images and not JudgeConfig("g", kind="url", prompt="{response}").sees_images
    assert not JudgeConfig("g", kind="classifier", prompt="{images}").sees_images
    with pytest.raises(Problem, match="missing"):
        judge_messages(table, open_references(asked, {}))


def picture(colour: str) -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(made, "PNG")
    return made.getvalue()


def test_the_child_of_a_worker_hands_the_pictures_over() -> None:
    bodies: list[Any] = []

    async def look(request: web.Request) -> web.Response:
        bodies.append((await request.json())["messages"])
        return answer("Score: 7")

    data = picture("red")
    digest = image_digest(data)
    results: list[Result] = []

    async def whole() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", look)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        table = JudgeConfig("grader", kind="url", model="big", url=url, prompt="{images}{response}?")
        settings = JudgeSettings(table, 30.0, "policy", "float32", "prompt")
        scorer = Scorer([FunctionSpec("", "grader")], prompt_key="prompt", timeout_s=30.0, judge=settings)
        assert scorer.sees_images
        with ThreadPoolExecutor(1) as pool:  # the child ends with the thread that made it
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(pool, scorer.start)
            asked = msgspec.structs.replace(sample("red"), row={"images": [digest]})
            await loop.run_in_executor(pool, scorer.score, [asked], results.append, {digest: data})
            scorer.close()
        await runner.cleanup()

    asyncio.run(whole())
    assert [one.reward for one in results] == [7.0], results
    [[message]] = bodies
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
