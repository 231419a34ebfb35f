"""One contract for every transport: bytes arrive, failures are bounded and named, and the next round works."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.wire import Instruction, Manifest, RoundReply
from weightsync.digest import bucket_digest, whole_digest
from weightsync.plan import TensorSpec, by_bucket, plan_buckets
from weightsync.receiver import built_in_transports
from weightsync.staging import Slot, Staging
from weightsync.transports.base import Inbox, TransportError, TransportUnusable
from weightsync.transports.collective import CollectiveInbox, CollectiveOutbox
from weightsync.transports.local import LocalInbox

PLAN = plan_buckets([TensorSpec(f"t{i}", "F32", (1000 + i,)) for i in range(9)], bucket_bytes=10_000)
DEADLINE_S = 4.0


class Rig(Protocol):
    """What the contract needs of a transport: both ends of one round."""

    name: str

    def inbox(self, rank: int, size: int, generation: int) -> Inbox: ...

    def send(self, ranks: int, generation: int) -> None: ...


class Base:
    """A publisher with one staged version."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.staging = Staging(folder, folders=[folder])
        self.slot, self.manifest = self.stage(1)

    def stage(self, seed: int) -> tuple[Slot, Manifest]:
        random = np.random.default_rng(seed)
        chunks = [(tensor.name, random.integers(0, 256, tensor.nbytes, dtype=np.uint8)) for tensor in PLAN.tensors]
        slot, digests = self.staging.fill(PLAN, chunks)
        return slot, Manifest(seed, PLAN.digest, PLAN.bucket_bytes, digests, whole_digest(digests))

    def instruction(self, address: str, rank: int = 1, size: int = 2, generation: int = 1) -> Instruction:
        return Instruction(
            "receive", 1, self.manifest, PLAN.tensors, self.name, address, rank, size, generation, DEADLINE_S
        )

    def close(self) -> None:
        self.staging.close()


class LocalRig(Base):
    name = "local"

    def inbox(self, rank: int, size: int, generation: int) -> Inbox:
        return LocalInbox(self.instruction(str(self.slot.path)))

    def send(self, ranks: int, generation: int) -> None:
        """Members read by themselves."""


class CollectiveRig(Base):
    name = "collective"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.outbox = CollectiveOutbox("127.0.0.1", timeout_s=DEADLINE_S)
        self.address = self.outbox.open()

    def inbox(self, rank: int, size: int, generation: int) -> Inbox:
        return CollectiveInbox(self.instruction(self.address, rank, size, generation))

    def send(self, ranks: int, generation: int) -> None:
        reply = RoundReply(1, "transferring", generation, {}, {f"m{rank}": rank for rank in range(1, ranks + 1)})
        self.outbox.send(reply, self.slot.buckets(PLAN.bucket_bytes), deadline_s=DEADLINE_S)

    def close(self) -> None:
        self.outbox.close()
        super().close()


@pytest.fixture(params=[LocalRig, CollectiveRig], ids=["local", "collective"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    rig = request.param(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def collective(tmp_path: Path) -> Iterator[CollectiveRig]:
    rig = CollectiveRig(tmp_path)
    yield rig
    rig.close()


def digests_from(inbox: Inbox, each: Callable[[int], None] = lambda number: None) -> tuple[str, ...]:
    """Read every bucket as a receiver does."""
    found = []
    try:
        inbox.open()
        for number, group in enumerate(by_bucket(PLAN.tensors, len(PLAN.bucket_bytes))):
            view = inbox.read(number)
            each(number)
            found.append(bucket_digest(group, view))
    finally:
        inbox.close()
    return tuple(found)


def run_round(rig: Any, members: int, generation: int) -> list[tuple[str, ...]]:
    with ThreadPoolExecutor(members + 1) as pool:
        inboxes = [rig.inbox(rank, members + 1, generation) for rank in range(1, members + 1)]
        reading = [pool.submit(digests_from, inbox) for inbox in inboxes]
        pool.submit(rig.send, members, generation).result(DEADLINE_S * 2)
        return [future.result(DEADLINE_S * 2) for future in reading]


@pytest.mark.parametrize("members", [1, 2, 3])
def test_every_member_gets_the_bytes(rig: Any, members: int) -> None:
    assert run_round(rig, members, 1) == [rig.manifest.bucket_digests] * members


def test_rounds_follow_one_another(rig: Any) -> None:
    for version in (2, 3, 4):
        rig.slot, rig.manifest = rig.stage(version)
        assert run_round(rig, 2, version) == [rig.manifest.bucket_digests] * 2


def test_a_corrupt_bucket_shows(rig: Any) -> None:
    rig.slot.view[PLAN.bucket_bytes[0] // 2] ^= 0x10
    (found,) = run_round(rig, 1, 1)
    assert found[0] != rig.manifest.bucket_digests[0] and found[1:] == rig.manifest.bucket_digests[1:]


def test_a_publisher_that_is_not_there_is_an_error_in_time(rig: Any) -> None:
    inbox = rig.inbox(1, 2, 1)
    if rig.name == "local":
        rig.slot.path.unlink()
    started = time.monotonic()
    with pytest.raises(TransportError):
        digests_from(inbox)
    assert time.monotonic() - started < DEADLINE_S
    inbox.close()


def test_a_slot_overwritten_while_it_is_read_shows(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    old = rig.manifest

    def overwrite(number: int) -> None:
        if number == 1:
            rig.stage(2)
            assert rig.stage(3)[0] is rig.slot

    found = digests_from(rig.inbox(1, 2, 1), overwrite)
    assert found[0] == old.bucket_digests[0]
    assert set(found[1:]).isdisjoint(old.bucket_digests)
    rig.close()


def test_local_refuses_files_that_are_not_slots(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    strange, small, link = tmp_path / "secret", tmp_path / "asyncrl-small", tmp_path / "asyncrl-link"
    strange.write_bytes(bytes(100_000))
    small.write_bytes(b"x")
    link.symlink_to(rig.slot.path)
    for path in (strange, small, link, tmp_path / "asyncrl-none"):
        with pytest.raises(TransportUnusable, match=path.name):
            LocalInbox(rig.instruction(str(path))).open()
    rig.close()


def test_absent_member_is_left_out_and_the_others_get_it(collective: CollectiveRig) -> None:
    """Two of three come: the group is built from those, after a quarter of the deadline."""
    with ThreadPoolExecutor(3) as pool:
        started = time.monotonic()
        reading = [pool.submit(digests_from, collective.inbox(rank, 4, 1)) for rank in (1, 3)]
        pool.submit(collective.send, 3, 1).result(DEADLINE_S)
        assert [future.result(DEADLINE_S) for future in reading] == [collective.manifest.bucket_digests] * 2
        assert DEADLINE_S / 4 <= time.monotonic() - started < DEADLINE_S
    with pytest.raises(TransportError, match="too late"):
        digests_from(collective.inbox(2, 4, 1))


def test_member_that_stops_in_the_middle_fails_the_generation_and_the_next_works(collective: CollectiveRig) -> None:
    hold = threading.Event()

    def stop(number: int) -> None:
        if number == 1:
            hold.wait(DEADLINE_S * 3)

    big = collective.slot.buckets(PLAN.bucket_bytes)
    with ThreadPoolExecutor(4) as pool:
        stopped = pool.submit(digests_from, collective.inbox(1, 3, 1), stop)
        healthy = pool.submit(digests_from, collective.inbox(2, 3, 1))
        started = time.monotonic()
        # Many buckets: a few would fit into the socket buffers, and the sender would not notice.
        sent = pool.submit(collective.outbox.send, reply_of(2, 1), big * 200, deadline_s=DEADLINE_S)
        with pytest.raises(TransportError):
            sent.result(DEADLINE_S * 2)
        assert time.monotonic() - started < DEADLINE_S + 1
        hold.set()
        for future in (healthy, stopped):
            with_outcome(future.result, DEADLINE_S * 2)
    assert run_round(collective, 2, 2) == [collective.manifest.bucket_digests] * 2


def reply_of(ranks: int, generation: int) -> RoundReply:
    return RoundReply(1, "transferring", generation, {}, {f"m{rank}": rank for rank in range(1, ranks + 1)})


def with_outcome(result: Callable[[float], Any], timeout_s: float) -> None:
    """It ends within the time, with bytes or with a transport error."""
    try:
        result(timeout_s)
    except TransportError:
        return


def test_store_listens_at_its_host_alone(collective: CollectiveRig) -> None:
    port = int(collective.address.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines[1:] if line.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_a_backend_that_this_build_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="hccl"):
        CollectiveOutbox("127.0.0.1", timeout_s=1.0, backend="hccl")
    with pytest.raises(ConfigError, match="cannot listen"):
        CollectiveOutbox("192.0.2.1", timeout_s=1.0).open()


def test_built_in_transports() -> None:
    assert set(built_in_transports()) == {"local", "collective"}
