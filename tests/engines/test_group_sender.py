"""The producer as rank 0 of a group with other processes: bytes, sizes, members that never come or die."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError, WorkError
from asyncrl.wire import Tensor
from producers.engines.group_sender import GroupSender, pieces

MEMBER = """
import sys, hashlib, os, time
sys.path.insert(0, sys.argv[1])
from standin_group import GroupMember
host, port, rank, size, name, sizes, then = sys.argv[2:9]
member = GroupMember(host=host, port=int(port), rank=int(rank), size=int(size), name=name, timeout_s=60)
for number in filter(None, sizes.split(",")):
    print(hashlib.sha256(member.receive(int(number)).numpy().tobytes()).hexdigest(), flush=True)
if then == "die":
    os._exit(9)
if then == "stop":
    print("stopped", flush=True)
    time.sleep(60)
member.leave()
"""


class Members:
    """Child processes that join groups."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[str]] = []

    def start(self, sender: GroupSender, *, rank: int = 1, sizes: list[int], then: str = "leave") -> None:
        words = [sender.host, sender.port, rank, sender.size, sender.name, ",".join(map(str, sizes)), then]
        command = [sys.executable, "-c", MEMBER, str(Path(__file__).parent), *map(str, words)]
        self.children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def said(self, number: int = 0) -> list[str]:
        """What a child printed to its end."""
        return self.children[number].communicate(timeout=30)[0].split()

    def end(self) -> None:
        for child in self.children:
            child.kill()
            with suppress(ValueError):
                child.communicate(timeout=60)


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.end()


def run(name: str, body: Callable[[GroupSender], Awaitable[None]], *, workers: int = 1, timeout_s: float = 20) -> None:
    async def whole() -> None:
        sender = GroupSender(name, workers=workers, timeout_s=timeout_s)
        try:
            await sender.listen()
            await body(sender)
        finally:
            await sender.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_bytes_arrive_at_every_worker_and_a_group_follows_another(members: Members) -> None:
    data = np.random.default_rng(0).integers(0, 255, 5000, dtype=np.uint8)
    views = [memoryview(data[:1]), memoryview(data[1:1]), memoryview(data[1:]), memoryview(data)]

    async def body(sender: GroupSender) -> None:
        for rank in (1, 2):
            members.start(sender, rank=rank, sizes=[1, 4999, 5000])
        await sender.join()
        for view in views:  # the empty one is no broadcast
            await sender.send(view)

    for turn in (0, 1):
        run(f"group-{turn}", body, workers=2)
        digests = [hashlib.sha256(view).hexdigest() for view in views if view.nbytes]
        assert members.said(2 * turn) == digests
        assert members.said(2 * turn + 1) == digests


def test_a_worker_that_never_comes_is_told_in_time() -> None:
    async def body(sender: GroupSender) -> None:
        started = time.monotonic()
        with pytest.raises(WorkError, match="group lonely: the group was not built") as told:
            await sender.join()
        assert told.value.code == "engine.broken"
        assert time.monotonic() - started < 60
        with pytest.raises(WorkError, match="not built"):
            await sender.send(memoryview(b"x"))

    run("lonely", body, timeout_s=1.0)


@pytest.mark.parametrize("then", ["die", "stop"])
def test_a_worker_that_dies_or_stops_breaks_the_group(members: Members, then: str) -> None:
    async def body(sender: GroupSender) -> None:
        members.start(sender, sizes=[4], then=then)
        await sender.join()
        await sender.send(memoryview(bytearray(b"abcd")))
        if then == "die":
            await asyncio.to_thread(members.said)
        started = time.monotonic()
        room = bytearray(64 << 20)  # more than the socket takes
        with pytest.raises(WorkError, match="were not sent") as told:
            await sender.send(memoryview(room))
        assert told.value.code == "engine.broken"
        assert time.monotonic() - started < 60

    run(f"fails-{then}", body, timeout_s=10.0)


def test_leaving_in_the_middle_of_a_wait_leaves_nothing_behind() -> None:
    async def body(sender: GroupSender) -> None:
        waiting = asyncio.ensure_future(sender.join())
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(WorkError):
            await sender.join()

    run("left", body, timeout_s=3.0)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="'mpi' is not one of"):
        GroupSender("g", workers=1, backend="mpi")

    async def nowhere() -> None:
        sender = GroupSender("g", workers=1, host="192.0.2.1")
        try:
            with pytest.raises(ConfigError, match="cannot listen"):
                await sender.listen()
        finally:
            await sender.close()

    asyncio.run(nowhere())


def _tensor(name: str, dtype: str, offset: int, nbytes: int) -> Tensor:
    return Tensor(name, dtype, (nbytes,), 0, offset, nbytes)


def test_pieces_are_back_to_back_and_aligned() -> None:
    assert pieces([]) == []
    plain = [_tensor("a", "F32", 0, 8), _tensor("b", "F32", 8, 0), _tensor("c", "F32", 8, 4)]
    assert pieces(plain) == [plain]
    padded = [_tensor("a", "U8", 0, 3), _tensor("b", "F32", 4, 8), _tensor("c", "F32", 12, 4)]
    assert pieces(padded) == [padded[:1], padded[1:]]
    # c is aligned in the bucket, but not in a memory that begins with b
    shifted = [_tensor("a", "U8", 0, 1), _tensor("b", "BF16", 2, 2), _tensor("c", "F32", 4, 4)]
    assert pieces(shifted) == [shifted[:1], shifted[1:2], shifted[2:]]
