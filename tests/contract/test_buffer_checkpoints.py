"""Checkpoints of samples under way over real ZeroMQ: sent, kept through a kill of the service, handed to another."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_lab import Make, Producer, claim, history, learner, sample

from asyncrl import wire
from asyncrl.errors import WireError
from buffers.client.partial_samples import BegunSample, PieceData


def piece(index: int, start: int, count: int, version: int = 0) -> PieceData:
    """Tokens that count up from their place in the sample."""
    tokens = np.arange(start, start + count, dtype=np.int32)
    return PieceData(index, start, tokens, np.full(count, -0.25, np.float32), ((version, count),))


def check(found: BegunSample, length: int) -> None:
    np.testing.assert_array_equal(found.token_ids, np.arange(length))
    np.testing.assert_array_equal(found.logprobs, np.full(length, -0.25, np.float32))
    assert found.token_ids.dtype == np.int32 and found.logprobs.dtype == np.float32


async def handed(quick: Producer, group: int) -> tuple[wire.Lease, tuple[BegunSample, ...]]:
    """The group once its first holder was silent for 2 s, with what was begun of it."""
    for _ in range(20):
        answer = await quick.lease(0, 1, wait_s=0.5)
        await quick.client.heartbeat({})
        for lease in answer.leases:
            if lease.group == group:
                return lease, quick.client.begun.get((lease.group, lease.token), ())
    raise AssertionError(f"group {group} is not leased again")


@pytest.mark.long_cases("redis")
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_what_was_begun_survives_a_kill_of_the_service_and_goes_to_another(make: Make, store: str) -> None:
    service = make(store=store).start()
    client = learner(service.address)

    async def before() -> wire.Lease:
        slow = Producer(service.address, "slow")
        await slow.client.hello("model")
        lease = (await slow.lease(0, 1)).leases[0]
        assert slow.client.begun == {}
        reply = await slow.client.keep(lease, [piece(0, 0, 5), piece(1, 0, 3)], {0: "d0"})
        assert reply.kept == {0: 5, 1: 3} and not reply.refused
        reply = await slow.client.keep(lease, [piece(0, 5, 4)], {0: "d0"})
        assert reply.kept == {0: 9}
        assert (await slow.client.keep(lease, [piece(0, 5, 4)], {0: "d0"})).kept == {0: 9}  # the same once more
        slow.client.close()
        return lease

    lease = asyncio.run(before())
    service.kill()
    service.start()

    async def after() -> None:
        quick, slow = Producer(service.address, "quick"), Producer(service.address, "slow")
        await quick.client.hello("model")
        new, begun = await handed(quick, lease.group)
        assert [(one.index, one.runs, one.digests) for one in begun] == [
            (0, ((0, 9),), {0: "d0"}),
            (1, ((0, 3),), {0: "d0"}),
        ]
        for one, length in zip(begun, (9, 3), strict=True):
            check(one, length)
        late = await slow.client.keep(lease, [piece(0, 9, 1)], {0: "d0"})
        assert late.refused == {0: "token: the lease was lost"}
        assert (await quick.client.keep(new, [piece(0, 9, 2)], {0: "d0"})).kept == {0: 11}
        assert (await quick.answer(new)).accepted == (0, 1)
        assert (await quick.client.keep(new, [piece(0, 11, 2)], {0: "d0"})).refused[0].startswith("cancelled")
        for other in (await quick.lease(0, 1)).leases:
            await quick.answer(other)
        quick.client.close()
        slow.client.close()

    asyncio.run(after())
    batch = claim(client, 1)
    assert lease.group in [group.group for group in batch.groups]
    assert [line["tokens"] for line in history(service, "continue")] == [{"0": 9, "1": 3}]
    client.close()


def test_supports_of_pieces_survive_a_kill_of_the_service(make: Make) -> None:
    """Draws are cut in this run: pieces and samples come with their supports, or are refused."""
    service = make(sampling__top_k="2", sampling__truncation="exact").start()
    client = learner(service.address)

    def held(start: int, count: int) -> wire.Support:
        ids = [(token, token + 300) if token % 2 else () for token in range(start, start + count)]
        counts = np.array([len(one) for one in ids], np.int32)
        return wire.Support(counts, np.array([token for one in ids for token in one], np.int32))

    def cut(start: int, count: int) -> PieceData:
        return msgspec.structs.replace(piece(0, start, count), support=held(start, count))

    async def before() -> wire.Lease:
        slow = Producer(service.address, "slow")
        await slow.client.hello("model")
        lease = (await slow.lease(0, 1)).leases[0]
        assert (await slow.client.keep(lease, [cut(0, 5)], {0: "d0"})).kept == {0: 5}
        assert (await slow.client.keep(lease, [cut(5, 4)], {0: "d0"})).kept == {0: 9}
        refused = await slow.client.keep(lease, [piece(0, 9, 2)], {0: "d0"})
        assert "support: it is missing" in refused.refused[0]
        wrong = msgspec.structs.replace(cut(9, 2), support=held(10, 2))
        assert "is not among the ids" in (await slow.client.keep(lease, [wrong], {0: "d0"})).refused[0]
        slow.client.close()
        return lease

    lease = asyncio.run(before())
    service.kill()
    service.start()

    async def after() -> None:
        quick = Producer(service.address, "quick")
        await quick.client.hello("model")
        _, (begun,) = await handed(quick, lease.group)
        check(begun, 9)
        assert begun.support is not None
        for one, other in zip(begun.support, held(0, 9), strict=True):
            np.testing.assert_array_equal(one, other)
        quick.client.close()

    asyncio.run(after())
    client.close()


def test_pieces_that_may_not_be_kept_are_refused_and_change_nothing(make: Make) -> None:
    service = make().start()
    client = learner(service.address)

    async def work() -> None:
        producer = Producer(service.address)
        await producer.client.hello("model")
        lease = (await producer.lease(0, 1)).leases[0]
        long = service.config.sampling.max_new_tokens

        async def refusal(data: PieceData, digests: dict[int, str] | None = None) -> str:
            reply = await producer.client.keep(lease, [data], {0: "d0"} if digests is None else digests)
            assert not reply.kept
            return reply.refused[data.index]

        assert "of at most" in await refusal(piece(0, long - 1, 2))
        assert "never published" in await refusal(piece(0, 0, 2, version=5), {5: "d5"})
        assert "published was d0" in await refusal(piece(0, 0, 2), {0: "other"})
        assert "index" in await refusal(piece(7, 0, 2))
        bad = msgspec.structs.replace(piece(0, 0, 2), logprobs=np.array([np.nan, 0], np.float32))
        assert "logprobs" in await refusal(bad)
        with pytest.raises(WireError, match="one payload frame"):
            message = wire.Pieces("p0", lease.group, lease.token, (wire.Piece(0, 0, 2, ((0, 2),)),), {}, ())
            await producer.client._ask(message)
        assert (await producer.client.keep(lease, [piece(0, 3, 2)], {0: "d0"})).kept == {0: 0}
        assert (await producer.answer(lease)).accepted == lease.missing
        producer.client.close()

    asyncio.run(work())
    assert service.status()["counters"]["refused_pieces"] == 5
    client.close()


def test_damaged_bytes_are_found_and_the_sample_starts_anew(make: Make) -> None:
    service = make().start()
    client = learner(service.address)

    async def before() -> wire.Lease:
        slow = Producer(service.address, "slow")
        await slow.client.hello("model")
        lease = (await slow.lease(0, 1)).leases[0]
        await slow.client.keep(lease, [piece(0, 0, 16), piece(1, 0, 12)], {0: "d0"})
        slow.client.close()
        return lease

    lease = asyncio.run(before())
    service.kill()
    damage(service)
    service.start()

    async def after() -> None:
        quick = Producer(service.address, "quick")
        await quick.client.hello("model")
        new, begun = await handed(quick, lease.group)
        assert [one.index for one in begun] == [1]
        check(begun[0], 12)
        samples = [sample(index) for index in new.missing]
        reply = await quick.client.submit(
            new, prompt_ids=np.array([1], np.int32), samples=samples, digests={0: "d0"}, row={}
        )
        assert reply.accepted == (0, 1)
        quick.client.close()

    asyncio.run(after())
    assert [(line["i"], line["why"], line["tokens"]) for line in history(service, "discard")] == [(0, "damaged", 16)]
    client.close()


def damage(service: Any) -> None:
    """Overwrite a token of the first piece in the newest segment file."""
    (path,) = service.run.segments.glob("*.seg")
    data = bytearray(path.read_bytes())
    at = data.find(np.arange(16, dtype=np.int32).tobytes())
    assert at > 0
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
