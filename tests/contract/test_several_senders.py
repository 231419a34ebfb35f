"""Transport `direct` from several ranks of a learner: each sends its buckets in a lane of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transport_rigs import DEADLINE_S, DirectReader, DirectRig, as_tensor, digests_from, reply_of

from weightsync.publisher.direct import Direct
from weightsync.publisher.senders import CoSender, Peers
from weightsync.transports.base import TransportError
from weightsync.transports.collective_inbox import CollectiveInbox
from weightsync.transports.kept_groups import Groups

ENGINES = 2


class Ranks:
    """The ranks of a learner as threads; `broken` is the number of a sender whose tensors end by an error."""

    def __init__(self, rig: DirectRig, senders: int) -> None:
        self.rig, self.senders = rig, senders
        self.direct = Direct()
        self.others = [CoSender(number) for number in range(1, senders)]
        self.broken = -1
        self._told: Future[bytes] = Future()
        self._meet = threading.Barrier(senders)
        self._errors = [""] * senders
        self._generation = 0
        self._held = [Groups() for _ in range(ENGINES)]

    def tensors(self, sender: int) -> Iterator[tuple[str, Any]]:
        buckets = self.rig.slot.buckets(self.rig.plan.bucket_bytes)
        for number, place in enumerate(self.rig.plan.tensors):
            if place.bucket % self.senders == sender:
                if sender == self.broken and number >= len(self.rig.plan.tensors) // 2:
                    raise TransportError("this rank fails here")
                yield place.name, as_tensor(buckets[place.bucket], place)

    def agree(self, sender: int, error: str) -> str:
        self._errors[sender] = error
        self._meet.wait(DEADLINE_S * 4)
        found = next(filter(None, self._errors), "")
        self._meet.wait(DEADLINE_S * 4)
        return found

    def publish(self, pool: ThreadPoolExecutor) -> list[Future[str]]:
        """Send a version to all engines; the word of every sender."""
        self._generation += 1
        self._told = Future()
        outbox: Any = self.rig.outbox
        reply = msgspec.structs.replace(reply_of(ENGINES, self._generation), digest=self.rig.manifest.digest)
        self.direct.open(reply.digest)
        pool.submit(self.direct.hand_over, reply, outbox, limit_s=DEADLINE_S)
        peers = Peers(self.senders, self._told.set_result, lambda error: self.agree(0, error))

        def lead() -> str:
            assert self.direct.wait_group()
            return self.direct.send(self.tensors(0), self.rig.plan, outbox, limit_s=DEADLINE_S, peers=peers)

        def follow(number: int) -> str:
            told = self._told.result(DEADLINE_S * 2)
            agree = lambda error: self.agree(number, error)  # noqa: E731
            return self.others[number - 1].send(told, self.tensors(number), self.rig.plan, agree)

        return [pool.submit(lead), *(pool.submit(follow, number) for number in range(1, self.senders))]

    def receive(self, pool: ThreadPoolExecutor) -> list[Future[list[str]]]:
        orders = [self.rig.instruction(rank, ENGINES + 1, self._generation) for rank in range(1, ENGINES + 1)]
        inboxes = [CollectiveInbox(one, groups=held) for one, held in zip(orders, self._held, strict=True)]
        return [pool.submit(digests_from, self.rig, DirectReader(inbox)) for inbox in inboxes]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectRig]:
    """Listeners stay open: here all processes of all lanes are threads of one, and each would close those of others."""
    monkeypatch.setattr("weightsync.transports.process_groups.closed_afterwards", lambda report: nullcontext())
    rig = DirectRig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.parametrize("senders", [2, 3])
def test_buckets_of_all_senders_arrive_in_order_by_kept_lanes(rig: DirectRig, senders: int) -> None:
    ranks, outbox = Ranks(rig, senders), rig.outbox
    assert len(rig.plan.bucket_bytes) > senders
    for _ in range(3):
        with ThreadPoolExecutor(2 * senders + ENGINES) as pool:
            sent = ranks.publish(pool)
            assert [one.result(60) for one in ranks.receive(pool)] == [rig.expected()] * ENGINES
            assert [one.result(60) for one in sent] == ["sent", *[""] * (senders - 1)]
    assert outbox.formed == 1  # type: ignore[attr-defined]


def test_one_sender_that_fails_ends_all_lanes_and_the_next_version_has_new_ones(rig: DirectRig) -> None:
    ranks, outbox = Ranks(rig, 2), rig.outbox
    with ThreadPoolExecutor(8) as pool:
        ranks.broken = 1
        sent = ranks.publish(pool)
        received = ranks.receive(pool)
        assert [one.result(60) for one in sent] == ["failed: this rank fails here", "this rank fails here"]
        for one in received:
            with pytest.raises(TransportError):
                one.result(60)
        ranks.broken = -1
        sent = ranks.publish(pool)
        assert [one.result(60) for one in ranks.receive(pool)] == [rig.expected()] * ENGINES
        assert [one.result(60) for one in sent] == ["sent", ""]
    assert outbox.formed == 2  # type: ignore[attr-defined]


def test_no_group_is_told_to_all_senders(rig: DirectRig) -> None:
    """No engine comes: rank 0 passes on nothing, and no lane is built."""
    ranks = Ranks(rig, 2)
    with ThreadPoolExecutor(4) as pool:
        lead, follow = ranks.publish(pool)
        assert lead.result(60).startswith("failed: no member came")
        assert ranks._told.result(1) == b""
        with pytest.raises(msgspec.DecodeError):
            follow.result(60)
