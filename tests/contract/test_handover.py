"""Payloads that producers write into files of their own: the service reads them, believes nothing, loses nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import buffer_lab as base
import numpy as np
import pytest
import test_buffer_service as whole
import warm

from asyncrl import wire
from asyncrl.engine import GenDelta
from asyncrl.errors import AsyncRLError
from asyncrl.wire.batch_arrays import ClaimedBatch
from buffers.client.learner import LearnerClient
from buffers.client.place_writer import FAILURES, PlaceWriter
from buffers.client.producer import ProducerClient
from buffers.payloads.record_format import GUEST, NONCE


@pytest.fixture(autouse=True)
def every_payload_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerClient, "place_from", 0)


def guest_files(service: base.Service) -> list[str]:
    names = sorted(path.name for path in service.run.segments.iterdir() if path.name != NONCE)
    return [name for name in names if int(name.split(".")[0]) >= GUEST]


def own_bytes(service: base.Service) -> int:
    """Payload bytes that the service itself was sent."""
    found: int = service.status()["counters"].get("ingest_bytes", 0) - by_place(service)
    return found


def by_place(service: base.Service) -> int:
    found: int = service.status()["counters"].get("place_bytes", 0)
    return found


async def answered(producer: base.Producer, version: int = 0, count: int = 2) -> list[wire.Lease]:
    leases = (await producer.lease(version, count)).leases
    for lease in leases:
        assert (await producer.answer(lease, version)).accepted == lease.missing
    return list(leases)


def train(client: LearnerClient, step: int) -> list[int]:
    """Claim, look at the bytes, commit."""
    batch = base.claim(client, step)
    for group in batch.groups:
        assert group.prompt_ids.tolist() == [group.group, 7]
        assert [s.response.tolist() for s in group.samples] == [[0, 1, 2], [1, 2, 3]]
    client.commit(step=step, version=step, digest=f"d{step}")
    return base.ids(batch)


@pytest.mark.parametrize("fsync", ["everysec", "always", "never"])
def test_payloads_cross_no_socket_and_their_files_go(make: base.Make, fsync: str) -> None:
    service = make(buffer__fsync=fsync, buffer__segment_bytes="400").start()  # one record per file
    client = base.learner(service.address)

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        await answered(producer)
        assert by_place(service) > 0 and own_bytes(service) == 0
        assert train(client, 1) == [0, 1]
        await answered(producer, 1)
        assert train(client, 2) == [2, 3]
        assert len([name for name in guest_files(service) if name.endswith(".seg")]) == 4
        client.checkpointed(step=2)
        service.status()  # files are freed after the answer
        # the newest file waits for its next record, the others may be written over
        assert [name[-4:] for name in guest_files(service)].count(".seg") == 1
        await answered(producer, 2)
        assert [name[-4:] for name in guest_files(service)].count(".seg") == 2
        assert train(client, 3) == [4, 5]
        producer.client.close()

    asyncio.run(work())
    client.close()
    assert service.stop() == 0


def test_everything_else_holds_by_place_too(make: base.Make) -> None:
    whole.test_kill_and_restart_lose_nothing(make, "sqlite")


def test_history_is_whole_by_place_too(make: base.Make) -> None:
    whole.test_history_is_whole_after_kills_at_any_moment(make)


def test_rewards_and_redis_by_place_too(make: base.Make) -> None:
    whole.test_a_group_goes_all_the_way(make, "redis")


KILLED = """
import asyncio, sys
sys.path[:0] = {places!r}
import buffer_lab as base
from asyncrl.runtime.failpoints import arm
from buffers.client.producer import ProducerClient
arm()
ProducerClient.place_from = 0
base.produce({address!r}, 2)
"""


def test_producer_killed_between_write_and_word(make: base.Make) -> None:
    service = make().start()
    client = base.learner(service.address)
    program = KILLED.format(places=[str(Path(__file__).parents[up]) for up in (0, 1)], address=service.address)
    ended = warm.run(
        [sys.executable, "-c", program],
        cwd=base.ROOT,
        timeout=60,
        check=False,
        env={**os.environ, "ASYNCRL_FAILPOINT": "producer.after_place:kill:2", "PYTHONPATH": str(base.ROOT)},
    )
    assert ended.returncode == -9
    orphans = guest_files(service)
    assert len(orphans) == 1  # one group of it is in the index, the other's bytes belong to nobody
    assert sorted(base.produce(service.address, 1)) == [1]  # the next life of that name
    assert set(orphans) < set(guest_files(service))  # something lives in it
    assert train(client, 1) == [0, 1]
    base.produce(service.address, 1, version=1)
    client.checkpointed(step=1)
    service.status()
    assert not set(orphans) & set(guest_files(service))
    client.close()
    assert service.stop() == 0


@pytest.mark.parametrize("place", ["buffer.before_apply", "buffer.before_segments", "buffer.before_answer"])
def test_service_killed_before_the_answer(make: base.Make, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whether its bytes were in the index or not: the same call of the producer ends with the samples in, once."""
    service = make(buffer__lease_timeout_s="30.0").start()
    client = base.learner(service.address)

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        leases = (await producer.lease(0, 2)).leases
        await producer.answer(leases[0])
        before = guest_files(service)
        service.kill()
        monkeypatch.setenv("ASYNCRL_FAILPOINT", f"{place}:kill:1")
        if place != "buffer.before_segments":  # the row of the start itself passes the others
            monkeypatch.setenv("ASYNCRL_FAILPOINT", f"{place}:kill:2")
        service.start(wait=False)
        asked = asyncio.ensure_future(producer.answer(leases[1]))
        assert service.process is not None
        async with asyncio.timeout(30):
            while service.process.poll() is None:
                await asyncio.sleep(0.02)
        assert service.process.returncode == -9
        monkeypatch.delenv("ASYNCRL_FAILPOINT")
        service.start(wait=False)
        reply = await asked
        assert (reply.accepted or reply.duplicate) == (0, 1), reply
        assert set(before) <= set(guest_files(service))  # what was answered before lives in it
        producer.client.close()

    asyncio.run(work())
    client.close()
    client = base.learner(service.address, takeover=True)
    assert train(client, 1) == [0, 1]
    client.close()
    assert service.stop() == 0
    assert len(base.history(service, "ready")) == 2


def test_damaged_places_are_refused_and_the_payload_is_sent(make: base.Make, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make(buffer__max_staleness="8", buffer__batch_groups="1", learner__steps="20").start()
    write = PlaceWriter.write
    harm: list[Any] = []

    def damaged(self: PlaceWriter, header: bytes, payload: Any) -> wire.Place | None:
        place = write(self, header, payload)
        if place is not None and harm:
            path = service.run.segments / f"{place.segment:08d}.seg"
            harm[0](path, place)
        return place

    def flip(path: Path, place: wire.Place) -> None:
        with path.open("r+b") as file:
            file.seek(place.offset + 40)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(PlaceWriter, "write", damaged)

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        await answered(producer, count=1)
        taken = by_place(service)
        kinds: list[Any] = [
            flip,
            lambda path, place: os.truncate(path, place.offset + 50),
            lambda path, place: path.unlink(),
        ]
        for kind in kinds[: FAILURES - 1]:
            harm[:] = [kind]
            await answered(producer, count=1)  # accepted all the same
            assert by_place(service) == taken
        harm.clear()
        await answered(producer, count=1)
        assert by_place(service) > taken  # a new file, and all is well
        taken = by_place(service)
        for kind in kinds:
            harm[:] = [kind]
            await answered(producer, count=1)
        harm.clear()
        await answered(producer, count=1)
        assert by_place(service) == taken  # it has given up
        producer.client.close()

    asyncio.run(work())
    status = service.status()
    assert status["ledger"]["ready"] == 8 and status["counters"]["refused:wire.place"] == FAILURES * 2 - 1
    assert service.stop() == 0


@pytest.mark.parametrize("restart", [True, False])
def test_what_is_cut_after_it_was_accepted_is_never_trained_on(make: base.Make, restart: bool) -> None:
    service = make().start()
    client = base.learner(service.address)

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        await answered(producer)
        (name,) = guest_files(service)
        os.truncate(service.run.segments / name, 100)
        if restart:  # found at the start: generated again
            service.kill()
            service.start()
            assert {lease.group for lease in await answered(producer)} == {0, 1}
        else:  # found by the claim: what is claimed is dead
            batch = client.claim(step=1, version=0, wait_s=3.0)
            assert isinstance(batch, ClaimedBatch) and not batch.groups
            assert service.status()["dead"] == {"payload_lost": 2}
        producer.client.close()

    asyncio.run(work())
    if restart:
        assert train(client, 1) == [0, 1]
    client.close()
    assert service.stop() == 0
    assert [line["why"] for line in base.history(service, "lost")] == ["payload_lost"] * 2 * restart


def test_two_lives_of_one_name(make: base.Make) -> None:
    service = make(buffer__max_staleness="8").start()

    async def work() -> None:
        old, new = base.Producer(service.address), base.Producer(service.address)
        await old.client.hello("model")
        leases = (await old.lease(0, 2)).leases
        assert (await old.answer(leases[0])).accepted == (0, 1)
        await new.client.hello("model")  # what the name held is lost
        await answered(new, count=2)
        assert len(guest_files(service)) == 2
        late = await old.answer(leases[1])
        assert set(late.refused.values()) <= {"token: the lease was lost", "already there with other content"}
        assert not late.accepted
        await answered(new, count=1)
        assert service.status()["ledger"]["ready"] == 4
        old.client.close()
        new.client.close()

    asyncio.run(work())
    assert service.stop() == 0


def test_another_folder_gets_frames(make: base.Make, tmp_path: Path) -> None:
    service = make().start()
    folder = str(service.run.segments.resolve())
    welcome = wire.Welcome("r", 1, 1, 0, {}, folder, (service.run.segments / NONCE).read_text(), 4096)
    assert PlaceWriter.open(welcome) is not None
    elsewhere = shutil.copytree(service.run.segments, tmp_path / "mounted")
    (elsewhere / NONCE).write_text("0" * 32)
    for segments, nonce in ((str(elsewhere), welcome.nonce), ("", ""), (folder, ""), ("/nonexistent", "x")):
        assert PlaceWriter.open(wire.Welcome("r", 1, 1, 0, {}, segments, nonce, 4096)) is None

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        producer.client._writer = None  # as where the folder is another
        await answered(producer)
        producer.client.close()

    asyncio.run(work())
    assert by_place(service) == 0 and own_bytes(service) > 0 and not guest_files(service)
    assert service.stop() == 0


def test_a_folder_that_cannot_be_written_gets_frames(make: base.Make) -> None:
    service = make().start()

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        assert producer.client._writer is not None
        producer.client._writer._folder = Path("/nonexistent")
        await answered(producer)
        producer.client.close()

    asyncio.run(work())
    assert by_place(service) == 0 and own_bytes(service) > 0
    assert service.stop() == 0


def test_hostile_places_are_refused_and_the_service_lives(make: base.Make) -> None:
    service = make().start()
    folder, number = service.run.segments, 77 * GUEST + 1
    os.mkfifo(folder / f"{number:08d}.seg")
    (folder / f"{number + 1:08d}.seg").symlink_to("/dev/zero")
    (folder / f"{number + 2:08d}.seg").mkdir()
    (folder / f"{number + 3:08d}.seg").write_bytes(b"ASEG" + bytes(5000))
    places = [
        wire.Place(*numbers)
        for numbers in (
            (1, 0, 10, 10, 1),
            (0, 0, 10, 10, 1),
            (-1, 0, 10, 10, 1),
            (1 << 63, 0, 10, 10, 1),
            (number, 0, 10, 10, 1),
            (number + 1, 0, 10, 10, 1),
            (number + 2, 0, 10, 10, 1),
            (number + 3, 0, 10, 10, 1),
            (number + 3, -5, 10, 10, 1),
            (number + 3, 0, -1, 10, 1),
            (number + 3, 1 << 63, 10, 10, 1),
            (number + 3, 0, 10, 1 << 19, 1),
            (number + 3, 0, 10, 1 << 40, 1),
            (number + 3, 0, 10, 10, (1 << 64) - 1),
            (number + 3, 0, 10, 10, -1),
            (number + 4, 0, 10, 10, 1),
            (number + 3, 4990, 10, 10, 1),
            (number + 3, 0, 0, 0, 0),
        )
    ]

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        for place in places:
            with pytest.raises(AsyncRLError) as error:
                await producer.client._ask(wire.SamplesAt("p0", place))
            assert error.value.code in ("wire.place", "wire.size"), place
        writer = producer.client._writer
        assert writer is not None
        hello = writer.write(wire.encode_header(wire.Hello("producer", "p0", 1, "h")), b"x" * 64)
        other = writer.write(wire.encode_header(wire.Samples("p1", 0, 1, (), {}, (), "", 1)), b"x" * 64)
        for made, code in ((hello, "wire.decode"), (other, "wire.unexpected")):
            with pytest.raises(AsyncRLError) as error:
                assert made is not None
                await producer.client._ask(wire.SamplesAt("p0", made))
            assert error.value.code == code
        await answered(producer)
        # what agrees with its checksum is still validated
        lease = (await producer.lease(0, 1)).leases[0]
        poisoned = await producer.answer(lease, logprob=1.0)
        assert all(why.startswith("poison: logprobs") for why in poisoned.refused.values()) and poisoned.refused
        producer.client.close()

    asyncio.run(work())
    assert service.status()["ledger"]["ready"] == 2 and len(list(service.run.dead.glob("*.frames"))) == 1
    assert service.stop() == 0


def test_arrays_are_what_was_made(make: base.Make) -> None:
    """Lists, other dtypes and strided arrays arrive as by frames."""
    service = make(buffer__batch_groups="1").start()
    client = base.learner(service.address)

    async def work() -> None:
        producer = base.Producer(service.address)
        await producer.client.hello("model")
        lease = (await producer.lease(0, 1)).leases[0]
        made = [
            GenDelta("0", 0, [5, 6], [-1.0, -2.0], ((0, 2),), "stop"),  # type: ignore[arg-type]
            GenDelta("1", 1, np.arange(6)[::2], np.full(3, -0.5), ((0, 3),), "length"),
        ]
        masks = {1: np.array([1, 0, 1], np.uint8)}
        reply = await producer.client.submit(
            lease,
            prompt_ids=np.arange(4)[::2],
            samples=made,
            digests={0: "d0"},
            row={},
            rewards={0: 1.0, 1: 2.0},
            masks=masks,
        )
        assert reply.accepted == (0, 1), reply
        producer.client.close()

    asyncio.run(work())
    (group,) = base.claim(client, 1).groups
    assert group.prompt_ids.tolist() == [0, 2]
    assert [s.response.tolist() for s in group.samples] == [[5, 6], [0, 2, 4]]
    assert [s.logprobs.tolist() for s in group.samples] == [[-1.0, -2.0], [-0.5] * 3]
    assert [s.mask.tolist() for s in group.samples] == [[1, 1], [1, 0, 1]]
    client.close()
    assert service.stop() == 0
