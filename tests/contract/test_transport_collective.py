"""Transport `collective` beyond the contract: who forms a group, what a member that stops costs, backends by name."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import warm
from transport_rigs import DEADLINE_S, CollectiveRig, digests_from, reply_of, run_round

from asyncrl.errors import ConfigError
from weightsync.transports.base import UNUSABLE, TransportError, TransportUnusable
from weightsync.transports.collective import CollectiveOutbox
from weightsync.transports.collective_inbox import CollectiveInbox

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CollectiveRig]:
    rig = CollectiveRig(tmp_path)
    yield rig
    rig.close()


def test_absent_member_is_left_out_and_the_others_get_it(rig: CollectiveRig) -> None:
    """Two of three come: the group is built from those, after a quarter of the deadline."""
    with ThreadPoolExecutor(3) as pool:
        started = time.monotonic()
        reading = [pool.submit(digests_from, rig, rig.inbox(rank, 4, 1)) for rank in (1, 3)]
        pool.submit(rig.send, 3, 1).result(60)
        assert [future.result(60) for future in reading] == [rig.expected()] * 2
        assert time.monotonic() - started >= DEADLINE_S / 4
    with pytest.raises(TransportError, match="too late"):
        digests_from(rig, rig.inbox(2, 4, 1))


def test_member_that_stops_in_the_middle_fails_the_generation_and_the_next_works(rig: CollectiveRig) -> None:
    hold = threading.Event()

    def stop(number: int) -> None:
        if number == 1:
            hold.wait(DEADLINE_S * 3)

    big = rig.slot.buckets(rig.plan.bucket_bytes)
    with ThreadPoolExecutor(4) as pool:
        stopped = pool.submit(digests_from, rig, rig.inbox(1, 3, 1), stop)
        healthy = pool.submit(digests_from, rig, rig.inbox(2, 3, 1))
        started = time.monotonic()
        # Many buckets: a few would fit into the socket buffers, and the sender would not notice.
        sent = pool.submit(rig.outbox.send, reply_of(2, 1), big * 200, deadline_s=DEADLINE_S)
        with pytest.raises(TransportError):
            sent.result(DEADLINE_S * 2)
        assert time.monotonic() - started < DEADLINE_S + 30
        hold.set()
        for future in (healthy, stopped):
            with_outcome(future.result, DEADLINE_S * 2)
    assert run_round(rig, 2, 2) == [rig.expected()] * 2


def with_outcome(result: Callable[[float], Any], timeout_s: float) -> None:
    """It ends within the time, with bytes or with a transport error."""
    try:
        result(timeout_s)
    except TransportError:
        return


def test_a_generation_is_never_used_again(rig: CollectiveRig) -> None:
    assert run_round(rig, 1, 7) == [rig.expected()]
    for generation in (7, 6):
        with pytest.raises(TransportError, match="each is sent once"):
            rig.send(1, generation)
    assert run_round(rig, 2, 8) == [rig.expected()] * 2


def test_store_listens_at_its_host_alone(rig: CollectiveRig) -> None:
    port = int(rig.address.rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines[1:] if line.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    with pytest.raises(ConfigError, match="cannot listen"):
        CollectiveOutbox("192.0.2.1", timeout_s=1.0).open()


def test_a_work_that_hangs_is_left_at_the_deadline(rig: CollectiveRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that cannot be interrupted (NCCL's broadcast has no limit of its own): both ends go on in time."""
    ended = threading.Event()

    def hang(self: Any, *args: Any) -> None:
        ended.wait(20)

    monkeypatch.setattr("weightsync.transports.collective.Sending._gather", hang)
    monkeypatch.setattr("weightsync.transports.collective_inbox.CollectiveInbox._meet", hang)
    instruction = msgspec.structs.replace(rig.instruction(), deadline_s=0.5)
    started = time.monotonic()
    inbox = CollectiveInbox(instruction)
    with pytest.raises(TransportError, match="not done within"):
        rig.outbox.send(reply_of(1, 1), [], deadline_s=0.5)
    with pytest.raises(TransportError):
        inbox.open()
    inbox.close()
    assert time.monotonic() - started < 15
    ended.set()


def test_a_backend_that_this_host_lacks_is_named_and_members_say_so(rig: CollectiveRig) -> None:
    """A member that cannot speak it asks for another transport."""
    for backend in ("hccl", "nccl", "smoke"):
        with pytest.raises(ConfigError, match=backend):
            CollectiveOutbox("127.0.0.1", timeout_s=1.0, backend=backend)
    for backend in ("hccl", "nccl", "smoke"):
        address = rig.address.replace("gloo", backend)
        inbox = CollectiveInbox(msgspec.structs.replace(rig.instruction(), address=address))
        with pytest.raises(TransportUnusable) as caught:
            inbox.open()
        assert caught.value.message.startswith(UNUSABLE)
        inbox.close()


HCCL = """
import sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, "tests/contract")
from transport_rigs import CollectiveRig, digests_from
from weightsync.transports.collective import CollectiveOutbox
from weightsync.transports.collective_inbox import CollectiveInbox

made = []
def plain(store, rank, size, timeout):
    made.append((rank, size))
    return dist.ProcessGroupGloo(store, rank, size, timeout)
def extended(given, options):
    return plain(given.store, given.group_rank, given.group_size, given.timeout)
dist.Backend.register_backend("hccl", {maker}, extended_api={extended}, devices=["cpu"])

class Rig(CollectiveRig):
    name = "collective"
    def make_outbox(self):
        return CollectiveOutbox("127.0.0.1", timeout_s=self.deadline_s, backend="hccl", device="cpu")

rig = Rig(Path(tempfile.mkdtemp()), hops={hops})
assert rig.address.startswith("hccl://"), rig.address
with ThreadPoolExecutor(3) as pool:
    reading = [
        pool.submit(digests_from, rig, CollectiveInbox(rig.instruction(rank, 3, 1), device="cpu")) for rank in (1, 2)
    ]
    pool.submit(rig.send, 2, 1).result(60)
    assert [one.result(60) for one in reading] == [rig.expected()] * 2
assert sorted(made) == [(0, 3), (1, 3), (2, 3)], made
print("all by hccl")
rig.close()
"""


@pytest.mark.parametrize(("maker", "extended", "hops"), [("plain", False, False), ("extended", True, True)])
def test_hccl_is_chosen_by_name_over_a_stand_in(maker: str, extended: bool, hops: bool) -> None:
    """A backend registered with torch under that name, Gloo inside: selection, staging to and from tensors, rounds."""
    code = HCCL.format(maker=maker, extended=extended, hops=hops)
    done = warm.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "all by hccl" in done.stdout
