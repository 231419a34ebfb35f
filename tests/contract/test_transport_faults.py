"""Both ends of every transport as real processes that are killed and stopped at every blob, and what they hold.

A stand-in of the receiver reports each blob by its digest and waits for a word before it goes on, so that a fault falls
where the test wants it.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked import Child, Forks
from transport_children import SMALL, anonymous_kb
from transport_rigs import KINDS, RIGS, run_round

from asyncrl.wire import Instruction
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.transports.base import TransportError

LARGE = plan_buckets([TensorSpec(f"t{i}", "F32", (1 << 20,)) for i in range(12)], bucket_bytes=4 << 20)
BLOBS = len(SMALL.bucket_bytes)
NAMES = list(RIGS)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(["transport_children"], paths=[Path(__file__).parent])
    yield forks
    forks.close()


@pytest.fixture
def start(forks: Forks) -> Iterator[Callable[..., Child]]:
    def make(function: str, *args: Any) -> Child:
        return forks.start("transport_children", function, *args)

    yield make
    forks.end_children()


def reader(start: Any, told: Instruction, *gates: int, **changes: Any) -> Child:
    """A member that is about to open; it waits after each blob of `gates`."""
    child: Child = start("read_all", msgspec.msgpack.encode(msgspec.structs.replace(told, **changes)), gates)
    assert child.next() == ("up",)
    return child


def rest(child: Child, within_s: float = 20.0) -> Any:
    """Read on to its last word."""
    while (word := child.next(within_s)) is not None and word[0] != "end":
        pass
    assert word is not None, "it says nothing"
    return word


def digests(child: Child) -> list[str]:
    return [word[2] for word in child.said if word is not None and word[0] == "blob"]


#: Longer than a busy host needs to bring everybody together; each stop costs as much.
LIMITS_S = {signal.SIGKILL: 10.0, signal.SIGSTOP: 5.0}
#: Killed with every transport and encoding, stopped with whole versions (a stop costs its deadline).
LOSSES = [(signal.SIGKILL, *kind) for kind in KINDS] + [(signal.SIGSTOP, name, False) for name in NAMES]


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{loss[1]}-{'hops' if loss[2] else 'full'}-{signal.Signals(loss[0]).name}"
)
def test_a_member_that_dies_or_stops_at_any_blob(loss: tuple[int, str, bool], tmp_path: Path, start: Any) -> None:
    """Of two members one goes at blob k, for all k. The other has the right bytes or an error in time, the publisher
    is held up no longer than its deadline + 1 s, and the next round brings everything."""
    action, name, hops = loss
    rig = RIGS[name](tmp_path, hops=hops, plan=SMALL, deadline_s=LIMITS_S[action])
    expected = rig.expected()
    for index in range(len(rig.sizes)):
        generation = 2 * index + 1
        told = rig.instruction(1, 3, generation)
        victim, healthy = reader(start, told, index), reader(start, told, rank=2)
        sender = threading.Thread(target=quiet, args=(rig, 2, generation))
        sender.start()
        for _ in range(index + 1):
            assert victim.next()[0] == "blob"
        victim.signal(action)
        started = time.monotonic()
        error = rest(healthy)[1]
        sender.join(rig.deadline_s + 30)
        assert not sender.is_alive() and time.monotonic() - started < rig.deadline_s + 30
        found = digests(healthy)
        assert found == expected[: len(found)]
        assert found == expected if rig.pulls else (error or found == expected)
        if action == signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
            victim.say("go")
            rest(victim)
            assert digests(victim) == expected[: len(digests(victim))]
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
        source = start("hold", name, str(tmp_path / str(index)), LIMITS_S[action])
        told = msgspec.msgpack.decode(source.next(), type=Instruction)
        members = [reader(start, told, index, rank=rank, world_size=3, generation=1) for rank in (1, 2)]
        source.say("go")
        for member in members:
            for _ in range(index + 1):
                assert member.next()[0] == "blob"
        source.signal(action)
        started = time.monotonic()
        for member in members:
            member.say("go")
        ends = [rest(member) for member in members]
        assert time.monotonic() - started < LIMITS_S[action] + 30
        expected = list(told.manifest.bucket_digests)
        for member, end in zip(members, ends, strict=True):
            assert digests(member) == expected[: len(digests(member))]
            assert end[1] or digests(member) == expected
            if name in ("local", "disk"):
                assert digests(member) == expected  # nobody is needed to read what lies there
        source.end()


def test_a_source_that_stops_for_a_moment_costs_only_the_moment(tmp_path: Path, start: Any) -> None:
    source = start("hold", "stream", str(tmp_path))
    member = reader(start, msgspec.msgpack.decode(source.next(), type=Instruction), 0)
    assert member.next()[0] == "blob"
    source.signal(signal.SIGSTOP)
    member.say("go")
    time.sleep(0.4)
    source.signal(signal.SIGCONT)
    assert rest(member)[1] == ""
    assert len(digests(member)) == BLOBS


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_memory_of_a_reader_is_bounded(name: str, tmp_path: Path, start: Any, figure: Any) -> None:
    """48 MiB in buckets of 4 MiB, pieces of 1 MiB: two or three buckets and the window, never the version."""
    rig = RIGS[name](tmp_path, plan=LARGE, deadline_s=20.0)
    member = reader(start, rig.instruction())
    sender = threading.Thread(target=quiet, args=(rig, 1, 1))
    sender.start()
    word = rest(member, 20)
    sender.join(60)
    assert word[1] == "" and digests(member) == list(rig.manifest.bucket_digests)
    figure(f"{name}: reading {sum(rig.sizes) >> 20} MiB, a reader grows by {word[2] >> 10} MiB")
    assert word[2] < 28 << 10
    rig.close()


def test_memory_of_a_source_is_bounded_while_a_reader_stands_still(tmp_path: Path, start: Any, figure: Any) -> None:
    rig = RIGS["stream"](tmp_path, plan=LARGE, deadline_s=20.0)
    run_round(rig, 1, 1)
    before = anonymous_kb()
    stopped = [reader(start, rig.instruction(), 0) for _ in range(3)]
    for one in stopped:
        one.next()
        one.signal(signal.SIGSTOP)
    time.sleep(0.5)
    growth = anonymous_kb() - before
    figure(f"stream: three readers stopped after a blob, the source grew by {growth >> 10} MiB")
    assert growth < 24 << 10
    for one in stopped:
        one.signal(signal.SIGCONT)
        one.say("go")
        assert rest(one)[1] == ""
    rig.close()
