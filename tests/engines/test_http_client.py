"""The client of engines that are servers: deadlines, sizes, refusals, streams and what it says of a bad server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from asyncrl.errors import ConfigError, WorkError
from producers.engines.http import HttpClient, Refused

HUNG = web.AppKey("hung", asyncio.Event)
LEFT = web.AppKey("left", asyncio.Event)


async def _echo(request: web.Request) -> web.Response:
    return web.json_response({"got": await request.json(), "auth": request.headers.get("Authorization", "")})


async def _status(request: web.Request) -> web.Response:
    return web.Response(status=int(request.query["is"]), text="words of the server")


async def _hang(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def _garbage(request: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe{", content_type="application/json")


async def _cut(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _events(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in asked["pieces"]:
        if piece == "hang":
            request.app[HUNG].set()
            try:
                await asyncio.sleep(30)
            finally:
                request.app[LEFT].set()
        if piece == "cut":
            assert request.transport is not None
            request.transport.abort()
        await response.write(piece.encode())
    return response


def run(body: Callable[[HttpClient, web.Application], Awaitable[None]], **more: Any) -> None:
    async def whole() -> None:
        app = web.Application()
        app[HUNG], app[LEFT] = asyncio.Event(), asyncio.Event()
        app.router.add_post("/echo", _echo)
        app.router.add_get("/status", _status)
        app.router.add_get("/hang", _hang)
        app.router.add_get("/garbage", _garbage)
        app.router.add_get("/cut", _cut)
        app.router.add_post("/events", _events)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}/", **more)
        try:
            await body(client, app)
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_calls_and_their_answers() -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        answer = await client.post("/echo", {"ids": [1, 2]}, timeout_s=60)
        assert answer == {"got": {"ids": [1, 2]}, "auth": "Bearer secret"}
        assert await client.get("/status", timeout_s=60, params={"is": "200"}) == "words of the server"

    run(body, token="secret")


def test_a_refusal_is_told_from_a_broken_server() -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        with pytest.raises(Refused, match="words of the server") as refused:
            await client.get("/status", timeout_s=60, params={"is": "404"})
        assert (refused.value.status, refused.value.text) == (404, "words of the server")
        for status in ("500", "503", "302", "204"):
            with pytest.raises(WorkError, match=f"answered {status}") as told:
                await client.get("/status", timeout_s=60, params={"is": status})
            assert told.value.code == "engine.broken"
            assert not isinstance(told.value, Refused)
        for path, words in (("/garbage", "no JSON"), ("/cut", "Disconnected|reset")):
            with pytest.raises(WorkError, match=words) as told:
                await client.get(path, timeout_s=60)
            assert told.value.code == "engine.broken"

    run(body)


def test_every_call_ends_in_time() -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        started = time.monotonic()
        with pytest.raises(WorkError, match=r"no answer within 0\.3 s"):
            await client.get("/hang", timeout_s=0.3)
        with pytest.raises(WorkError, match=r"silent for 0\.3 s"):
            async for _ in client.stream("/events", {"pieces": ["data: 1\n\n", "hang"]}, idle_s=0.3):
                pass
        assert time.monotonic() - started < 30

    run(body)


def test_sizes_are_bounded() -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        with pytest.raises(WorkError, match="longer than 100 bytes"):
            await client.post("/echo", "x" * 100, timeout_s=60)
        with pytest.raises(WorkError, match="an event is longer than 100 bytes"):
            async for _ in client.stream("/events", {"pieces": ["data: "] + ["x" * 30] * 9}, idle_s=5):
                pass

    run(body, max_bytes=100)


def test_events_come_however_they_are_cut() -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        pieces = [": hello\n", 'data: {"a"', ":1}\r\n\r\nda", "ta:[2]\n\n", "event: x\ndata: 3\n\ndata: [DO", "NE]\n\n"]
        assert [event async for event in client.stream("/events", {"pieces": pieces}, idle_s=5)] == [{"a": 1}, [2], 3]

    run(body)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["data: 1\n\n"], "ended without"),
        (["data: 1\n\n", "cut"], "Payload|Disconnected|reset|ended"),
        (["data: 1\n\n", "data: {\n\n"], "no JSON"),
    ],
)
def test_a_stream_that_goes_wrong_is_said_after_what_came(pieces: list[str], words: str) -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        came = []
        with pytest.raises(WorkError, match=words) as told:
            async for event in client.stream("/events", {"pieces": pieces}, idle_s=5):
                came.append(event)
        assert (came, told.value.code) == ([1], "engine.broken")

    run(body)


def test_leaving_a_stream_closes_its_connection() -> None:
    async def body(client: HttpClient, app: web.Application) -> None:
        events = client.stream("/events", {"pieces": ["data: 1\n\n", "hang"]}, idle_s=20)
        assert await anext(events) == 1
        await events.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(app[LEFT].wait(), 60)

    run(body)


def test_a_server_that_is_not_there_and_an_address_that_is_none() -> None:
    async def body() -> None:
        client = HttpClient("http://127.0.0.1:1")
        with pytest.raises(WorkError, match=r"127\.0\.0\.1:1") as told:
            await client.get("/health", timeout_s=60)
        assert told.value.code == "engine.broken"
        await client.close()
        for url in ("", "127.0.0.1:30000", "ftp://host", "http://"):
            with pytest.raises(ConfigError, match="is not an http address"):
                HttpClient(url)

    asyncio.run(body())
