"""Both ends of every transport as real processes that are killed and stopped at every blob, and what they hold.

A stand-in of the receiver reports each blob by its digest and waits for a word before it goes on, so that a fault falls
where the test wants it.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transport_rigs import RIGS, digest_of, make_inbox, run_round

from weightsync.plan import TensorSpec, plan_buckets
from weightsync.transports.base import TransportError

SMALL = plan_buckets([TensorSpec(f"t{i}", "F32", (1000 + i,)) for i in range(3)], bucket_bytes=4000)
LARGE = plan_buckets([TensorSpec(f"t{i}", "F32", (1 << 20,)) for i in range(24)], bucket_bytes=4 << 20)
BLOBS = len(SMALL.bucket_bytes)
NAMES = list(RIGS)


class Rigged:
    """What `digest_of` needs of a rig, at a reader."""

    def __init__(self, instruction: Any) -> None:
        from weightsync.plan import Plan

        self.hops = instruction.hops
        self.plan = Plan(instruction.tensors, instruction.manifest.bucket_bytes, instruction.manifest.plan)


def anonymous_kb() -> int:
    """Memory of this process alone; mapped files (slots) are not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    return 0


def read_all(pipe: Connection, order: bytes, gates: tuple[int, ...]) -> None:
    """A reader: `("blob", k, digest)` for every blob, at a gate it waits for a word; then `("end", error, growth)`."""
    from asyncrl.wire import Instruction

    instruction = msgspec.msgpack.decode(order, type=Instruction)
    inbox = make_inbox(instruction)
    rig, error, growth, base = Rigged(instruction), "", 0, anonymous_kb()
    try:
        inbox.open()
        for number in range(sum(1 for _ in instruction.manifest.bucket_bytes)):
            view = inbox.read(number)
            pipe.send(("blob", number, digest_of(rig, number, view)))
            growth = max(growth, anonymous_kb() - base)
            if number in gates:
                pipe.poll(20)
                pipe.recv()
    except TransportError as caught:
        error = caught.message
    inbox.close()
    pipe.send(("end", error, growth))


def hold(pipe: Connection, name: str, folder: str) -> None:
    """A publisher: its instruction, then it leads a round for two members at every word."""
    rig = RIGS[name](Path(folder), plan=SMALL, deadline_s=2.0)
    pipe.send(msgspec.msgpack.encode(rig.instruction()))
    generation = 0
    while pipe.poll(30) and pipe.recv():
        generation += 1
        try:
            rig.send(2, generation)
        except TransportError:
            continue


class Child:
    """A forked process and its pipe. Forks come from a parent that has imported everything and has no threads."""

    def __init__(self, context: Any, target: Callable[..., None], *args: Any) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *args), daemon=True)
        self.process.start()
        other.close()
        self.said: list[Any] = []

    def next(self, within_s: float = 10.0) -> Any:
        """Its next word; None where it has ended or says nothing."""
        try:
            self.said.append(self.pipe.recv() if self.pipe.poll(within_s) else None)
        except (EOFError, OSError):
            self.said.append(None)
        return self.said[-1]

    def rest(self, within_s: float = 10.0) -> Any:
        """Read on to its last word."""
        while (word := self.next(within_s)) is not None and word[0] != "end":
            pass
        return word

    def digests(self) -> list[str]:
        return [word[2] for word in self.said if word is not None and word[0] == "blob"]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(5)
        self.pipe.close()


@pytest.fixture(scope="module")
def context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["transport_rigs", "weightsync.transports.collective", "weightsync.transports.stream",
         "weightsync.transports.disk", "weightsync.transports.local"]
    )  # fmt: skip
    return context


@pytest.fixture
def start(context: Any) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(target: Callable[..., None], *args: Any) -> Child:
        children.append(Child(context, target, *args))
        return children[-1]

    yield make
    for child in children:
        child.end()


def reader(start: Any, rig: Any, rank: int, size: int, generation: int, gates: tuple[int, ...] = ()) -> Child:
    child: Child = start(read_all, msgspec.msgpack.encode(rig.instruction(rank, size, generation)), gates)
    return child


@pytest.mark.parametrize("action", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("name", NAMES)
def test_a_member_that_dies_or_stops_at_any_blob(name: str, action: int, tmp_path: Path, start: Any) -> None:
    """Of two members one goes at blob k, for all k. The other has the right bytes or an error in time, the publisher
    is held up no longer than its deadline + 1 s, and the next round brings everything."""
    rig = RIGS[name](tmp_path, plan=SMALL, deadline_s=2.0)
    expected = rig.expected()
    for index in range(BLOBS):
        generation = 2 * index + 1
        victim = reader(start, rig, 1, 3, generation, gates=(index,))
        healthy = reader(start, rig, 2, 3, generation)
        started = time.monotonic()
        sender = threading.Thread(target=quiet, args=(rig, 2, generation))
        sender.start()
        for _ in range(index + 1):
            assert victim.next()[0] == "blob"
        victim.signal(action)
        error = healthy.rest()[1]
        sender.join(5)
        assert not sender.is_alive() and time.monotonic() - started < rig.deadline_s + 1
        found = healthy.digests()
        assert found == expected[: len(found)]
        assert found == expected if rig.pulls else (error or found == expected)
        if action == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
            victim.pipe.send("go")
            victim.rest()
            assert victim.digests() == expected[: len(victim.digests())]
        assert run_round(rig, 2, generation + 1) == [expected] * 2
    rig.close()


def quiet(rig: Any, ranks: int, generation: int) -> None:
    try:
        rig.send(ranks, generation)
    except TransportError:
        return


@pytest.mark.parametrize("action", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("name", NAMES)
def test_a_publisher_that_dies_or_stops_at_any_blob(name: str, action: int, tmp_path: Path, start: Any) -> None:
    """Two members in step at blob k: each gets the right bytes, or an error in time; they never wait for ever."""
    for index in range(BLOBS):
        source = start(hold, name, str(tmp_path / str(index)))
        order = source.next()
        source.pipe.send("go")
        members = []
        for rank in (1, 2):
            from asyncrl.wire import Instruction

            told = msgspec.structs.replace(
                msgspec.msgpack.decode(order, type=Instruction), rank=rank, world_size=3, generation=1
            )
            members.append(start(read_all, msgspec.msgpack.encode(told), (index,)))
        for member in members:
            for _ in range(index + 1):
                assert member.next()[0] == "blob"
        source.signal(action)
        started = time.monotonic()
        for member in members:
            member.pipe.send("go")
        ends = [member.rest() for member in members]
        assert time.monotonic() - started < 2.0 + 1
        expected = list(told.manifest.bucket_digests)
        for member, end in zip(members, ends, strict=True):
            assert member.digests() == expected[: len(member.digests())]
            assert end[1] or member.digests() == expected
            if name in ("local", "disk"):
                assert member.digests() == expected  # nobody is needed to read what lies there
        source.end()


def test_a_source_that_stops_for_a_moment_costs_only_the_moment(tmp_path: Path, start: Any) -> None:
    source = start(hold, "stream", str(tmp_path))
    order = source.next()
    member = start(read_all, order, (0,))
    member.next()
    source.signal(signal.SIGSTOP)
    member.pipe.send("go")
    time.sleep(0.4)
    source.signal(signal.SIGCONT)
    assert member.rest()[1] == ""
    assert len(member.digests()) == BLOBS


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_memory_of_a_reader_is_bounded(name: str, tmp_path: Path, start: Any, figure: Any) -> None:
    """96 MiB in buckets of 4 MiB, pieces of 1 MiB: two or three buckets and the window, never the version."""
    rig = RIGS[name](tmp_path, plan=LARGE, deadline_s=20.0)
    sender = threading.Thread(target=quiet, args=(rig, 1, 1))
    sender.start()
    member = reader(start, rig, 1, 2, 1)
    word = member.rest(20)
    sender.join(5)
    assert word[1] == "" and member.digests() == list(rig.manifest.bucket_digests)
    figure(f"{name}: reading {sum(rig.sizes) >> 20} MiB, a reader grows by {word[2] >> 10} MiB")
    assert word[2] < 40 << 10
    rig.close()


def test_memory_of_a_source_is_bounded_while_a_reader_stands_still(tmp_path: Path, start: Any, figure: Any) -> None:
    rig = RIGS["stream"](tmp_path, plan=LARGE, deadline_s=20.0)
    run_round(rig, 1, 1)
    before = anonymous_kb()
    stopped = [reader(start, rig, 1, 2, 1, gates=(0,)) for _ in range(3)]
    for one in stopped:
        one.next()
        one.signal(signal.SIGSTOP)
    time.sleep(0.5)
    growth = anonymous_kb() - before
    figure(f"stream: three readers stopped after a blob, the source grew by {growth >> 10} MiB")
    assert growth < 24 << 10
    for one in stopped:
        one.signal(signal.SIGCONT)
        one.pipe.send("go")
        assert one.rest()[1] == ""
    rig.close()
