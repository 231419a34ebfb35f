"""Environments of OpenEnv, over its WebSocket interface: a small server of the same messages, and its own if it is
installed (`make test-openenv`)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncrl.environment import EnvironmentFailure, Step, Turn
from asyncrl.errors import ConfigError
from producers.environments.openenv import OpenEnvironment, object_in, one_text, text_field

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / ".venv-openenv" / "bin" / "python"
START_S = 120
LONGEST = 12


def answer_of(message: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """What tests/unit/openenv_server.py answers."""
    data = message.get("data", {})
    if message["type"] == "reset":
        words[:] = ["apple" if data.get("seed") == 1 else "plum"]
        hint = f"a fruit of {data.get('letters', len(words[0]))} letters"
        return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": None, "done": False}}
    word = data.get("word", "")
    if len(word) > LONGEST:
        why = {"loc": ["word"], "msg": f"String should have at most {LONGEST} characters"}
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [why]}}
    if word == "crash":
        return {"type": "error", "data": {"message": "the environment broke", "code": "EXECUTION_ERROR"}}
    if word == "skip":
        return {"type": "observation", "data": {"observation": {"hint": "go on"}, "reward": None, "done": False}}
    right = word == words[0]
    hint = "yes" if right else f"not {word}"
    return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": float(right), "done": right}}


@asynccontextmanager
async def small_server(silent: bool = False) -> AsyncIterator[str]:
    async def schema(_: web.Request) -> web.Response:
        action = {"properties": {"word": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["word"]}
        return web.json_response({"action": action})

    async def talk(request: web.Request) -> web.WebSocketResponse:
        line, words = web.WebSocketResponse(), [""]
        await line.prepare(request)
        async for message in line:  # bounded: by the client's connection
            asked = message.json()
            if asked["type"] == "close":
                break
            if not silent or asked["type"] == "reset":
                await line.send_json(answer_of(asked, words))
        return line

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", talk)])
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def real_server() -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([str(REAL), str(ROOT / "tests/unit/openenv_server.py"), str(port)]) as server:
        try:
            until = time.monotonic() + START_S
            async with aiohttp.ClientSession() as session:
                while True:  # bounded: START_S
                    try:
                        async with session.get(f"{url}/health"):
                            break
                    except aiohttp.ClientError:
                        assert time.monotonic() < until and server.poll() is None, "the server did not start"
                        await asyncio.sleep(0.2)
            yield url
        finally:
            server.terminate()


SERVERS = [
    small_server,
    pytest.param(real_server, marks=pytest.mark.skipif(not REAL.exists(), reason="make test-openenv")),
]


def said(text: str) -> Turn:
    return Turn(text, (1,), "stop")


def talked(server: Any, talk: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with server() as url:
            await talk(url)

    asyncio.run(asyncio.wait_for(run(), START_S + 60))


@pytest.mark.parametrize("server", SERVERS)
def test_an_episode_and_what_is_no_action(server: Any) -> None:
    async def talk(url: str) -> None:
        one, other = OpenEnvironment(url, intro="Guess: "), OpenEnvironment(f"{url}/")
        assert await one.reset({"seed": 1, "options": {"letters": 9}}) == "Guess: a fruit of 9 letters"
        assert await other.reset({}) == "a fruit of 4 letters"
        assert await one.step(said("plum")) == Step("not plum", 0.0, False)  # sessions are apart
        assert await other.step(said("plum")) == Step("yes", 1.0, True)
        refused = await one.step(said("a sentence of many words"))
        assert refused == Step("not an action: word: String should have at most 12 characters", 0.0, False)
        assert (await one.step(said("apple"))).done
        with pytest.raises(EnvironmentFailure, match="the environment broke"):
            await one.step(said("crash"))
        await one.close()
        await other.close()

    talked(server, talk)


def test_a_reward_of_null_is_none() -> None:
    async def talk(url: str) -> None:
        found = OpenEnvironment(url)
        await found.reset({})
        assert await found.step(said("skip")) == Step("go on", None, False)  # reward workers may score the sample
        await found.close()

    talked(small_server, talk)


def upper(seen: Any) -> str:
    return str(seen["hint"]).upper()


def last_word(text: str) -> dict[str, str]:
    if not text:
        raise ValueError("nothing was said")
    return object_in(text) if text.startswith("{") else {"word": text.rsplit(maxsplit=1)[-1]}


@pytest.mark.parametrize("server", SERVERS)
def test_functions_of_the_user_convert_texts(server: Any) -> None:
    async def talk(url: str) -> None:
        found = OpenEnvironment(url, observe=f"{__name__}:upper", act=f"{__name__}:last_word")
        assert await found.reset({"seed": 1}) == "A FRUIT OF 5 LETTERS"
        assert await found.step(said("")) == Step("not an action: nothing was said", 0.0, False)
        deep = await found.step(said('{"word": ' * 9999 + "}"))
        assert deep.observation.startswith("not an action: maximum recursion depth") and deep.reward == 0.0
        assert await found.step(said("I say apple")) == Step("YES", 1.0, True)
        await found.close()

    talked(server, talk)


def test_a_session_outlives_the_limit_of_an_answer() -> None:
    async def talk(url: str) -> None:
        found = OpenEnvironment(url, timeout_s=1)
        await found.reset({})
        await asyncio.sleep(1.2)
        assert (await found.step(said("plum"))).done
        await found.close()

    talked(small_server, talk)


def test_a_server_that_is_silent_or_gone_fails_the_sample() -> None:
    async def silent(url: str) -> None:
        found = OpenEnvironment(url, timeout_s=0.3)
        await found.reset({})
        with pytest.raises(EnvironmentFailure, match=r"no answer to 'step' within 0\.3 s"):
            await found.step(said("plum"))
        await found.close()

    talked(lambda: small_server(silent=True), silent)

    async def gone() -> None:
        async with small_server() as url:
            found = OpenEnvironment(url, timeout_s=5)
            await found.reset({})
        with pytest.raises((EnvironmentFailure, ConnectionError)):
            await found.step(said("plum"))
        await found.close()

    asyncio.run(asyncio.wait_for(gone(), 60))


def test_a_wrong_address_is_an_error_of_the_settings() -> None:
    with pytest.raises(ConfigError, match="address") as caught:
        OpenEnvironment("127.0.0.1:8000")
    assert caught.value.code == "config.environment"


def test_texts_and_objects() -> None:
    assert one_text({"hint": "a", "length": None}) == "a" and one_text({"n": 3}) == '{"n": 3}'
    assert object_in('I take {"move": {"x": 1}} now') == {"move": {"x": 1}}
    for text in ("none", "} {", "{not json}"):
        with pytest.raises(ValueError):
            object_in(text)
    assert text_field({"required": ["a"], "properties": {"a": {"type": "string"}}}) == "a"
    assert text_field({"required": ["a"], "properties": {"a": {"type": "integer"}}}) == ""
    assert text_field({"required": ["a", "b"], "properties": {}}) == text_field({}) == ""
