"""The receiver alone: read ahead, hops, aborts at every point, what waits for a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from receiver_lab import GROUPS, Engine, FakeInbox, buckets_of, hop_of, manifest_of
from test_weightsync_service import PLAN, until

import weightsync.receiver.receiver as receiver_module
from asyncrl.config import WeightSyncConfig
from asyncrl.errors import WorkError
from asyncrl.wire import Hop, Instruction
from weightsync.receiver.receiver import Receiver
from weightsync.receiver.relay_copy import RelayCopy
from weightsync.receiver.transfer import HopsUseless, Transfer
from weightsync.transports.base import TransportError


def instruction(version: int, hops: Sequence[Hop] = (), **more: Any) -> Instruction:
    settings: dict[str, Any] = {"transport": "fake", "deadline_s": 10.0, "round": 1} | more
    return Instruction("receive", manifest=manifest_of(version), tensors=PLAN.tensors, hops=tuple(hops), **settings)


async def load(engine: Engine, version: int) -> None:
    await engine.begin_update(manifest_of(version), PLAN.tensors)
    for number, data in enumerate(buckets_of(version)):
        await engine.apply_bucket(number, data)
    assert await engine.commit_update() == manifest_of(version).digest
    engine.applied.clear()


# ---------------------------------------------------------------- one transfer


def test_one_blob_is_read_ahead_by_one_thread() -> None:
    engine, inbox = Engine(bucket_s=0.02), FakeInbox(buckets_of(1), blob_s=0.02)

    async def main() -> RelayCopy | None:
        await engine.begin_update(manifest_of(1), PLAN.tensors)
        transfer = Transfer(engine, instruction(1), PLAN.tensors, inbox, keep=True)
        await transfer.run()
        assert transfer.waited_s > 0
        return transfer.copy

    taken = asyncio.run(main())
    assert len(inbox.threads) == 1 and threading.get_ident() not in inbox.threads and inbox.closed == 1
    for (_, read_at, _), (_, _, applied) in zip(inbox.reads[1:], engine.applied, strict=False):
        assert read_at < applied, "the next blob is asked for while this one is applied"
    for (_, read_at, _), (_, _, applied) in zip(inbox.reads[2:], engine.applied, strict=False):
        assert read_at >= applied, "no more than one ahead: the buffer may be in use"
    assert taken is not None
    with taken.blobs(()) as blobs:
        assert blobs is not None and [bytes(blob) for blob in blobs] == buckets_of(1)
    with taken.blobs((hop_of(0, 1)[0],)) as blobs:
        assert blobs is None


def test_hops_lead_from_what_the_engine_holds() -> None:
    first, second = hop_of(0, 1), hop_of(1, 2)
    inbox = FakeInbox([*first[1], *second[1]])
    engine = Engine()

    async def main() -> RelayCopy | None:
        await load(engine, 0)
        await engine.begin_update(manifest_of(2), PLAN.tensors)
        transfer = Transfer(engine, instruction(2, (first[0], second[0])), PLAN.tensors, inbox, keep=True)
        await transfer.run()
        assert await engine.commit_update() == manifest_of(2).digest
        return transfer.copy

    taken = asyncio.run(main())
    assert [bytes(engine.held[n]) for n in range(len(GROUPS))] == buckets_of(2)
    assert taken is not None
    with taken.blobs((second[0],)) as blobs:
        assert blobs is not None and [bytes(blob) for blob in blobs] == second[1]
    with taken.blobs((first[0], second[0])) as blobs:
        assert blobs is not None and [bytes(blob) for blob in blobs] == [*first[1], *second[1]]
    with taken.blobs((first[0],)) as blobs:
        assert blobs is None, "the first hop alone does not lead here"


@pytest.mark.parametrize("fault", ["unreadable", "base", "blob"])
def test_useless_hops_are_told_apart(fault: str) -> None:
    hop, blobs = hop_of(0, 1)
    engine = Engine()
    if fault == "blob":
        blobs[2] = blobs[2][:-1] + b"\x00\x00"

    async def main() -> None:
        await load(engine, 0)
        engine.readable = fault != "unreadable"
        if fault == "base":
            engine.held[1][17] ^= 4
        await engine.begin_update(manifest_of(1), PLAN.tensors)
        await Transfer(engine, instruction(1, (hop,)), PLAN.tensors, FakeInbox(blobs)).run()

    words = {"unreadable": "cannot say", "base": "bucket 1 of version 1 has another digest", "blob": "bucket 2"}[fault]
    with pytest.raises(HopsUseless, match=words):
        asyncio.run(main())


# ---------------------------------------------------------------- aborts


class Alone:
    """A receiver whose instructions the test gives itself."""

    def __init__(self, engine: Engine, **sync: Any) -> None:
        self.inbox: FakeInbox = FakeInbox([])
        self.engine = engine
        self.receiver = Receiver(
            "ipc:///none",
            engine=engine,
            name="gen-3",
            keys=None,
            config=WeightSyncConfig(timeout_s=5.0, **sync),
            transports={"fake": lambda _: self.inbox},
        )

    async def receive(self, version: int, inbox: FakeInbox, hops: Sequence[Hop] = (), **more: Any) -> bool:
        self.inbox = inbox
        await self.receiver._execute(instruction(version, hops, **more))
        return self.receiver._pending is not None

    async def commit(self, version: int) -> None:
        await self.receiver._execute(Instruction("commit", round=1, version=version))


@pytest.mark.parametrize("turn_s", [0.0, 30.0])
def test_the_wait_for_a_turn_is_no_part_of_a_commit(turn_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "limit_for", lambda *_: 0.05)

    async def main() -> None:
        engine = Engine()
        commit, engine.commit_turn_s = engine.commit_update, turn_s  # type: ignore[attr-defined]

        async def after_its_turn() -> str:
            await asyncio.sleep(0.5)
            return await commit()

        engine.commit_update = after_its_turn  # type: ignore[method-assign]
        alone = Alone(engine)
        assert await alone.receive(0, FakeInbox(buckets_of(0)))
        if turn_s:
            await alone.commit(0)
            assert alone.receiver.version == 0
        else:
            with pytest.raises(WorkError, match="no commit of version 0"):
                await alone.commit(0)

    asyncio.run(main())


@pytest.mark.long_cases("stuck", "cancelled")
@pytest.mark.parametrize("fault", ["error", "wrong", "stuck", "cancelled"])
def test_aborts_are_clean_at_every_bucket(fault: str) -> None:
    """After a failure at any bucket the old version is whole, and the next transfer is right, whatever a thread that
    was left behind still reads."""

    async def at(number: int) -> None:
        engine, go = Engine(), threading.Event()
        alone = Alone(engine)
        assert await alone.receive(0, FakeInbox(buckets_of(0)))
        await alone.commit(0)
        engine.done.clear()

        def fail(read: int) -> None:
            if read == number and fault == "error":
                raise TransportError("cut")
            if read == number and fault in ("stuck", "cancelled"):
                go.wait(60)

        blobs = buckets_of(1)
        if fault == "wrong":
            blobs[number] = bytes([blobs[number][0] ^ 1]) + blobs[number][1:]
        inbox = FakeInbox(blobs, before=fail)
        if fault == "cancelled":
            task = asyncio.create_task(alone.receive(1, inbox))
            while len(inbox.reads) < number or not inbox.threads:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait([task])
        else:
            assert not await alone.receive(1, inbox, deadline_s=0.3 if fault == "stuck" else 10.0)
            words = {"error": "cut", "wrong": f"bucket {number} ", "stuck": "not complete within"}[fault]
            assert words in alone.receiver._error
        assert engine.done.count("abort") == 1 and "commit" not in engine.done
        assert alone.receiver.version == 0 and await engine.attest() == manifest_of(0).digest
        again = FakeInbox(buckets_of(2))
        assert await alone.receive(2, again)
        go.set()  # what was left behind reads on now
        await alone.commit(2)
        until(lambda: inbox.closed == 1 and again.closed == 1, "both inboxes are closed", 5)
        assert len(inbox.threads) == 1
        assert alone.receiver.digests == {0: manifest_of(0).digest, 2: manifest_of(2).digest}
        assert [bytes(engine.held[n]) for n in range(len(GROUPS))] == buckets_of(2)

    for number in range(len(GROUPS)):
        asyncio.run(at(number))


@pytest.mark.parametrize("fault", ["error", "damaged", "cancelled"])
def test_aborts_of_hops_are_clean_at_every_blob(fault: str) -> None:
    """Two hops, a failure at any of their blobs: the base is whole, and a transfer of whole weights is right then."""
    (first, early), (second, late) = hop_of(0, 1), hop_of(1, 2)

    async def at(number: int) -> None:
        engine = Engine()
        alone = Alone(engine)
        assert await alone.receive(0, FakeInbox(buckets_of(0)))
        await alone.commit(0)
        blobs = [*early, *late]
        reached = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail(read: int) -> None:
            if read == number and fault == "error":
                raise TransportError("cut")
            if read == number:
                loop.call_soon_threadsafe(reached.set)

        if fault == "damaged":
            blobs[number] = blobs[number][:9] + bytes([blobs[number][9] ^ 8]) + blobs[number][10:]
        inbox = FakeInbox(blobs, before=fail)
        task = asyncio.create_task(alone.receive(2, inbox, (first, second)))
        if fault == "cancelled":
            await asyncio.wait_for(reached.wait(), 60)
            task.cancel()
            await asyncio.wait([task])
        else:
            assert not await task
            assert ("delta" in alone.receiver.encodings) == (fault == "error"), (
                "only a blob at fault asks for the whole"
            )
        if not (fault == "cancelled" and alone.receiver._pending is not None):  # else it was faster
            assert engine.done.count("abort") == 1
        assert await engine.attest() == manifest_of(0).digest and alone.receiver.version == 0
        assert await alone.receive(3, FakeInbox(buckets_of(3)))
        await alone.commit(3)
        assert [bytes(engine.held[n]) for n in range(len(GROUPS))] == buckets_of(3)
        until(lambda: inbox.closed == 1, "the inbox is closed", 5)

    for number in range(2 * len(GROUPS)):
        asyncio.run(at(number))


def test_a_delta_from_elsewhere_is_not_even_asked_for() -> None:
    """The hop's base must be what this engine committed, by number and digest; then whole weights are asked for."""
    hop, blobs = hop_of(1, 2)

    async def main() -> None:
        alone = Alone(Engine())
        for held, wanted in ((None, "holds nothing"), (0, "holds version 0")):
            if held is not None:
                assert await alone.receive(held, FakeInbox(buckets_of(held)))
                await alone.commit(held)
            assert "delta" in alone.receiver.encodings
            inbox = FakeInbox(blobs)
            assert not await alone.receive(2, inbox, (hop,))
            assert wanted in alone.receiver._error and not inbox.threads
            assert alone.receiver.encodings == ("full", "adapter")
        lie = msgspec.structs.replace(hop, base=0)  # version 0, but another one
        await alone.receive(0, FakeInbox(buckets_of(0)))
        await alone.commit(0)
        assert not await alone.receive(2, FakeInbox(blobs), (lie,))
        alone.engine.readable = False
        await alone.receive(1, FakeInbox(buckets_of(1)))
        await alone.commit(1)
        assert not await alone.receive(2, FakeInbox(blobs), (hop,))
        await alone.receive(2, FakeInbox(buckets_of(2)))
        await alone.commit(2)
        assert "delta" not in alone.receiver.encodings, "an engine that cannot be read never gets hops again"

    asyncio.run(main())


def test_no_sample_leaves_while_a_commit_is_under_way() -> None:
    """Also where the version number was held before with other weights: its digest is not known until the commit."""

    async def main() -> None:
        engine = Engine()
        alone = Alone(engine)
        for version in (3, 4):
            await alone.receive(version, FakeInbox(buckets_of(version)))
            await alone.commit(version)
        assert await alone.receiver.wait_version(3, 0.05) == 4
        await alone.receive(3, FakeInbox(buckets_of(3)))  # a learner that went back
        slow, right = asyncio.Event(), engine.commit_update

        async def commit() -> str:
            digest = await right()
            await slow.wait()
            return digest

        engine.commit_update = commit
        committing = asyncio.create_task(alone.commit(3))
        await asyncio.sleep(0.01)
        assert engine.health().version == 3
        with pytest.raises(WorkError):
            await alone.receiver.wait_version(3, 0.05)
        slow.set()
        await committing
        assert await alone.receiver.wait_version(3, 0.05) == 3
        assert await alone.receiver.wait_version(4, 0.05) == 3, "samples that version 4 began are known"

    asyncio.run(main())
