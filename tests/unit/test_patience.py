"""Waiting for a service that is away, with its words on the log, and leaving it when asked to end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from asyncrl.errors import Unavailable
from asyncrl.net.requester import Requester
from asyncrl.runtime.role import Stop
from asyncrl.wire import Ok
from learners.heartbeat import Patience as OverduePatience
from producers.support import retry as module
from producers.support.retry import Bell, Patience


async def never() -> int:
    await asyncio.sleep(60)
    return 0


def test_silence_is_said_once_and_so_is_the_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAY_S", 0.1)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    said: list[str] = []
    patience = Patience("buffer ipc://x", limit_s=9, say=said.append)

    async def slow() -> int:
        await asyncio.sleep(0.4)
        return 7

    async def both() -> list[int]:
        return list(await asyncio.gather(patience.ask(slow), patience.ask(slow)))

    assert asyncio.run(both()) == [7, 7]
    assert len(said) == 2
    assert said[0] == "warning: the buffer ipc://x does not answer since 0.1 s; giving up after 9 s"
    assert "answers again" in said[1]


def test_a_standstill_of_this_process_is_not_the_silence_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAY_S", 0.3)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "STOOD_S", 0.2)
    said: list[str] = []
    tries = []

    async def stands_still() -> int:
        tries.append(1)
        await asyncio.sleep(0.1)
        if len(tries) == 1:
            time.sleep(1.0)  # as under SIGSTOP: nothing of this process runs
            raise Unavailable("net.unreachable", "no answer in time")
        return 7

    assert asyncio.run(Patience("buffer", limit_s=0.8, say=said.append).ask(stands_still)) == 7
    assert said == []


def test_a_request_without_answer_is_given_up_once_the_end_was_asked_for() -> None:
    stop = Stop()
    patience = Patience("buffer", limit_s=60, stop=stop)

    async def ask() -> Any:
        asyncio.get_running_loop().call_later(0.3, stop.set, "SIGTERM")
        return await patience.ask(never)

    started = time.monotonic()
    with pytest.raises(Unavailable):
        asyncio.run(ask())
    assert patience.gave_up and time.monotonic() - started < 30


def test_refusals_are_tried_again_until_the_limit() -> None:
    tries = []

    async def refused() -> int:
        tries.append(1)
        raise Unavailable("store.unreachable", "Redis is away")

    patience = Patience("buffer", limit_s=0.5)
    with pytest.raises(Unavailable, match="Redis is away"):
        asyncio.run(patience.ask(refused))
    assert len(tries) >= 2 and not patience.gave_up


def test_cancelling_the_asker_cancels_the_request() -> None:
    cancelled = []

    async def call() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def whole() -> None:
        asking = asyncio.create_task(Patience("buffer", limit_s=60).ask(call))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(whole())
    assert cancelled == [1]


def test_a_bell_is_heard_before_and_during_the_wait_and_missed_after_the_limit() -> None:
    async def whole() -> list[bool]:
        bell = Bell()
        bell.ring()
        heard = [await bell.wait(timeout_s=60), await bell.wait(timeout_s=0.02)]
        asyncio.get_running_loop().call_later(0.02, bell.ring)
        return [*heard, await bell.wait(timeout_s=60)]

    assert asyncio.run(whole()) == [True, False, True]


def test_the_learner_leaves_a_blocking_request_when_it_is_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("learners.heartbeat.SILENT_S", 0.3)
    monkeypatch.setattr("learners.heartbeat.LEAVE_S", 0.8)
    stop = Stop()
    stop.set("SIGTERM")
    asker = Requester(
        "tcp://127.0.0.1:9", on_silence=OverduePatience("buffer tcp://127.0.0.1:9", limit_s=60, stop=stop)
    )
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no answer to Ok"):
        asker.request(Ok(), timeout_s=60)
    asker.close()
    assert 0.8 <= time.monotonic() - started < 30  # closing does not linger for a service that is not there
    assert capsys.readouterr().out.count("has not answered for 0.3 s; the request gives up after 60 s") == 1
