"""Turns of learner and engines on a device: the lock, the engine that sleeps, states that rest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.device_turn import DeviceTurn
from asyncrl.engine import GenRequest
from asyncrl.errors import AsyncRLError
from asyncrl.runtime.device import Device
from learners.backends.resting_states import RestingStates
from producers.engines.hf.sleep import RestingWeights
from producers.engines.turns import LINGER_S, TurnTaking

LONG = 30.0


def in_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """An asynchronous test, in a loop of its own."""
    return lambda tmp_path: asyncio.run(test(tmp_path))


def learner(folder: Path, limit_s: float = LONG) -> DeviceTurn:
    return DeviceTurn(folder, together=False, limit_s=limit_s)


def engine(folder: Path, limit_s: float = LONG) -> DeviceTurn:
    return DeviceTurn(folder, together=True, limit_s=limit_s)


def test_engines_share_a_turn_and_the_learner_does_not(tmp_path: Path) -> None:
    one, other = engine(tmp_path), engine(tmp_path)
    one.take()
    other.take()
    one.take()  # it has it
    with pytest.raises(AsyncRLError, match="no turn on the device within 0"):
        learner(tmp_path, 0.0).take()
    one.give()
    other.give()
    first = learner(tmp_path)
    first.take()
    for late in (engine(tmp_path, 0.0), learner(tmp_path, 0.0)):
        with pytest.raises(AsyncRLError, match="no turn"):
            late.take()
        assert not late.held and not late.waiting_for


def waits(turn: DeviceTurn) -> asyncio.Task[None]:
    """A process that asks for its turn."""
    return asyncio.create_task(turn.take_async())


async def seen_waiting(turn: DeviceTurn) -> None:
    while not turn.waiting_for:  # bounded: the test's time limit
        await asyncio.sleep(0)


@in_loop
async def test_nobody_passes_a_process_that_waits(tmp_path: Path) -> None:
    training, waiting = learner(tmp_path), engine(tmp_path)
    training.take()
    task = waits(waiting)
    await seen_waiting(waiting)
    training.give()
    with pytest.raises(AsyncRLError, match="no turn"):  # the engine has the queue, or its turn already
        learner(tmp_path, 0.0).take()
    await task
    assert waiting.held and not waiting.waiting_for


@in_loop
async def test_a_wait_that_is_cancelled_leaves_the_queue(tmp_path: Path) -> None:
    training, waiting = learner(tmp_path), engine(tmp_path)
    training.take()
    task = waits(waiting)
    await seen_waiting(waiting)
    task.cancel()
    await asyncio.wait([task], timeout=LONG)
    training.give()
    training.take()
    assert training.held and not waiting.held


class Sleeper:
    """An engine that notes what happens to it."""

    def __init__(self, *, loads_asleep: bool) -> None:
        self.loads_asleep = loads_asleep
        self.calls: list[str] = []
        self.name = "sleeper"
        self.fails = False
        self.sleeping = self

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self, *, grace_s: float) -> None:
        self.calls.append("close")

    def health(self) -> Any:
        return "well"

    async def sleep(self) -> None:
        if self.fails:
            raise AsyncRLError("engine.broken", "no room in host memory")
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def begin_update(self, manifest: Any, tensors: Any) -> None:
        self.calls.append("begin")

    async def commit_update(self) -> str:
        self.calls.append("commit")
        return "digest"

    async def abort_update(self) -> None:
        self.calls.append("abort")

    async def attest(self) -> str:
        return "digest"

    async def generate(self, request: GenRequest) -> AsyncIterator[Any]:
        self.calls.append(f"generate {request.id}")
        yield request.id


def request(name: str) -> GenRequest:
    return GenRequest(name, np.zeros(1, np.int32), (0,), 0, 1)


async def asleep(taking: TurnTaking) -> None:
    while taking._turn.held:  # bounded: the test's time limit
        await asyncio.sleep(0.01)


@in_loop
async def test_an_engine_is_awake_for_its_requests_alone(tmp_path: Path) -> None:
    inner = Sleeper(loads_asleep=True)
    taking = TurnTaking(inner, engine(tmp_path))
    await taking.start()
    assert inner.calls == ["start", "sleep"] and taking.name == "sleeper"
    training = learner(tmp_path, 0.0)
    training.take()
    training.give()
    assert [one async for one in taking.generate(request("a"))] == ["a"]
    assert [one async for one in taking.generate(request("b"))] == ["b"]
    assert inner.calls[2:] == ["wake", "generate a", "generate b"], "it stays awake for the next request"
    await asleep(taking)
    assert inner.calls[5:] == ["sleep"]
    await taking.begin_update(None, ())  # type: ignore[arg-type]
    moving = asyncio.create_task(anext(taking.generate(request("c"))))
    while not taking._turn.held:  # bounded: the test's time limit
        await asyncio.sleep(0.01)
    assert "wake" not in inner.calls[6:], "it does not move in the middle of an update"
    assert await taking.commit_update() == await taking.attest() == "digest"
    assert await moving == "c"
    assert inner.calls[6:] == ["begin", "commit", "wake", "generate c"]
    await taking.abort_update()
    await taking.close(grace_s=0.0)
    assert not taking._turn.held


@in_loop
async def test_an_engine_that_cannot_load_asleep_wakes_for_a_commit(tmp_path: Path) -> None:
    inner = Sleeper(loads_asleep=False)
    taking = TurnTaking(inner, engine(tmp_path))
    await taking.start()
    await taking.begin_update(None, ())  # type: ignore[arg-type]
    assert await taking.attest() == "", "its weights cannot be read"
    assert await taking.commit_update() == "digest"
    assert inner.calls[2:] == ["begin", "wake", "commit"]
    await asleep(taking)
    assert inner.calls[5:] == ["sleep"]


@in_loop
async def test_a_look_at_the_weights_keeps_the_engine_awake(tmp_path: Path) -> None:
    """Its question is behind the sleep in the engine's queue otherwise, and reads weights that are off the device."""
    inner = Sleeper(loads_asleep=False)
    taking = TurnTaking(inner, engine(tmp_path))
    await taking.start()
    asked = asyncio.Event()

    async def attest() -> str:
        asked.set()
        await asyncio.sleep(3 * LINGER_S)
        inner.calls.append("read")
        return "digest"

    inner.attest = attest  # type: ignore[method-assign]
    assert await taking.commit_update() == "digest"
    looking = asyncio.create_task(taking.attest())
    await asked.wait()
    assert await looking == "digest"
    await asleep(taking)
    assert inner.calls[2:] == ["wake", "commit", "read", "sleep"]
    assert await taking.attest() == ""


@in_loop
async def test_a_request_that_is_given_up_while_the_engine_wakes_ends_the_turn(tmp_path: Path) -> None:
    inner = Sleeper(loads_asleep=True)
    taking = TurnTaking(inner, engine(tmp_path))
    await taking.start()
    waking = asyncio.Event()

    async def wake() -> None:
        waking.set()
        await asyncio.Event().wait()  # bounded: the request is cancelled

    inner.wake = wake  # type: ignore[method-assign]
    asking = asyncio.create_task(anext(taking.generate(request("a"))))
    await waking.wait()
    assert taking._turn.held
    asking.cancel()
    await asleep(taking)
    assert inner.calls[2:] == ["sleep"], "a wake that ended after all is undone"
    learner(tmp_path, 0.0).take()


@in_loop
async def test_an_engine_that_cannot_leave_its_device_ends_its_worker(tmp_path: Path) -> None:
    inner = Sleeper(loads_asleep=True)
    taking = TurnTaking(inner, engine(tmp_path))
    await taking.start()
    assert taking.health() == "well"
    inner.fails = True
    assert [one async for one in taking.generate(request("a"))] == ["a"]
    assert taking._sleeper is not None
    await asyncio.wait_for(taking._sleeper, LONG)
    with pytest.raises(AsyncRLError, match="no room in host memory"):
        taking.health()  # the worker asks before every lease
    assert taking._turn.held, "its weights are still there"


def resident() -> int:
    """Bytes of this process that are in no file."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


@pytest.mark.parametrize("kind", ["states", "weights"])
def test_a_cpu_gets_its_memory_back_and_every_bit_returns(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048, bias=False)  # 16 MiB
    model.bias = nn.Parameter(torch.empty(0))
    tied = nn.ParameterList([model.weight, model.weight, model.bias])
    kept, size = model.weight.detach().clone(), 16 << 20
    resting: Any = RestingWeights(tied, Device("cpu"), tmp_path)
    if kind == "states":
        states = RestingStates(Device("cpu"), tmp_path)
        view = model.weight.detach()[:3]
        resting.move_out = lambda: states.move_out([model.weight.data, view, model.bias.data])
        resting.move_back = states.move_back
    before = resident()
    resting.move_out()
    resting.move_out()  # nothing: it is out
    assert resident() <= before - 0.9 * size
    if kind == "weights":
        assert torch.equal(model.weight, kept), "it can be read"
        with torch.no_grad():
            model.weight[5] = kept[5] = 7.0  # and written, as an update does
    resting.move_back()
    resting.move_back()
    assert torch.equal(model.weight, kept)
    assert os.listdir(tmp_path) == [], "the files have no name"
