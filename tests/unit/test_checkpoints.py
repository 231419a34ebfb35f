"""Checkpoints of samples under way: which pieces are taken, which are handed out, and what they do to deadlines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.versions import Runs, cut_runs, joined_runs
from buffers.client import partial_samples as begun
from buffers.groups.machine import GroupMachine, finish_group
from buffers.groups.partial_samples import MAX_PIECES
from buffers.groups.records import Ledger, Record, Settings, State
from buffers.payloads import partial_samples as checkpoints
from buffers.payloads.segments import Segments

LEARNER: dict[str, Any] = {"name": "l", "pid": 1, "host": "h", "step": 0, "ledger": Ledger(), "takeover": False}


class Book:
    """A state machine, its pieces, and the rows that a store would hold."""

    def __init__(self, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "group_size": 2,
            "batch_groups": 1,
            "max_staleness": 2,
            "depth": 2,
            "total_groups": 20,
            "lease_timeout_s": 10.0,
        }
        self.settings = Settings(**settings | changes)
        self.groups = GroupMachine(self.settings)
        self.epoch = self.groups.register(**LEARNER, now=0.0)
        self.rows: dict[str, bytes] = {}
        self.events: list[Any] = []
        self.freed: list[Record] = []
        self.requests = self.records = 0

    def lease(self, name: str = "p", version: int = 0, count: int = 1, now: float = 0.0) -> list[wire.Lease]:
        self.requests += 1
        self.groups.workers.see("producer", name, now)
        found = self.groups.lease(name, engine_version=version, max_groups=count, request=self.requests, now=now)
        return list(found)

    def keep(self, _item: wire.Piece) -> Record:
        self.records += 1
        return Record(1, self.records, 1, 1, self.records)

    def piece(
        self,
        lease: wire.Lease,
        start: int,
        runs: Runs,
        *,
        index: int = 0,
        name: str = "p",
        wrong: str = "",
        digests: dict[int, str] | None = None,
    ) -> wire.PiecesReply:
        item = wire.Piece(index, start, sum(count for _, count in runs), runs)
        head = wire.Pieces(name, lease.group, lease.token, (item,), digests or {}, ())
        return self.groups.pieces(head, invalid=lambda: wrong, keep=self.keep, now=0.0)

    def sample(self, lease: wire.Lease, index: int, version: int, name: str = "p") -> wire.SamplesReply:
        head = wire.Samples(
            name,
            lease.group,
            lease.token,
            (wire.SampleHead(index, 1, "stop", ((version, 1),)),),
            {},
            (),
            "",
            1,
            rewards={index: 1.0},
        )
        self.records += 1
        mark = self.records
        return self.groups.samples(head, checksum=mark, invalid=str, keep=lambda: Record(1, mark, 1, 1, mark), now=0.0)

    def step(self) -> None:
        """Train one step with whatever is ready, to move the frontier."""
        step = self.groups.table.meta.version + 1
        assert self.groups.claim(epoch=self.epoch, step=step, version=step - 1, now=0.0) is not None
        self.groups.commit(epoch=self.epoch, step=step, version=step, digest="", now=0.0)

    def train(self, count: int) -> None:
        """Lease, finish and train so many groups, by a producer at the newest version."""
        for _ in range(count):
            (lease,) = self.lease("q", self.groups.table.meta.version)
            finish_group(self.groups, lease.group, now=0.0)
            self.step()

    def take(self) -> list[str]:
        """Persist; the names of what happened since."""
        taken = self.groups.take()
        for change in taken.rows:
            self.rows.update({change.key: change.value} if change.value is not None else {})
        self.freed += taken.freed
        self.events += taken.events
        return [event["e"] for event in taken.events if isinstance(event, dict)]

    def again(self) -> None:
        """The service is killed and starts from its rows."""
        self.take()
        other = GroupMachine(self.settings, epoch=self.groups.service_epoch + 1)
        other.load(self.rows.items())
        self.groups = other

    def lose(self, lease: wire.Lease, name: str = "p") -> None:
        self.groups.give_back(wire.LeaseReturn(name, ((lease.group, lease.token),), "stop"), now=0.0)

    def begun(self, lease: wire.Lease) -> dict[int, tuple[int, Runs]]:
        found = self.groups.table.groups[lease.group].partial
        return {index: (one.length, one.runs) for index, one in found.items()}


def test_pieces_follow_each_other_and_a_piece_sent_again_changes_nothing() -> None:
    book = Book()
    (lease,) = book.lease()
    assert book.piece(lease, 0, ((0, 4),)).kept == {0: 4}
    assert book.piece(lease, 0, ((0, 4),)).kept == {0: 4}
    assert book.piece(lease, 6, ((0, 4),)).kept == {0: 4}  # one is missing between: the answer says where to go on
    assert book.piece(lease, 2, ((0, 4),)).kept == {0: 4}
    assert book.records == 1
    assert book.piece(lease, 4, ((0, 1), (1, 2))).kept == {0: 7}
    assert book.piece(lease, 4, ((0, 1), (1, 2))).kept == {0: 7}
    assert book.begun(lease) == {0: (7, ((0, 5), (1, 2)))}
    assert book.piece(lease, 5, ((0, 1),), index=1).kept == {1: 0}
    assert book.records == 2 and book.groups.table.groups[lease.group].deadline == 2


def test_a_lost_lease_hands_on_what_was_begun_and_the_old_holder_is_refused() -> None:
    book = Book()
    (old,) = book.lease()
    book.piece(old, 0, ((0, 4),))
    book.sample(old, 1, 0)
    book.lose(old)
    assert book.groups.table.groups[old.group].deadline == 2
    (new,) = book.lease("q")
    assert new.missing == (0,) and book.begun(new) == {0: (4, ((0, 4),))} and "continue" in book.take()
    late = book.piece(old, 4, ((0, 4),))
    assert late.refused == {0: "token: the lease was lost"} and not late.kept
    assert book.piece(new, 4, ((0, 2),), name="q").kept == {0: 6}
    assert book.sample(new, 0, 0, "q").accepted == (0,)
    book.take()
    assert [record.offset for record in book.freed] == [1, 3] and not book.groups.table.groups[old.group].partial
    assert book.groups.table.groups[old.group].state == State.READY


def test_a_new_holder_may_begin_anew() -> None:
    book = Book()
    (old,) = book.lease()
    book.piece(old, 0, ((0, 4),))
    book.piece(old, 4, ((0, 4),))
    book.lose(old)
    (new,) = book.lease("q")
    assert book.piece(new, 0, ((0, 3),), name="q").kept == {0: 3}
    book.take()
    assert book.begun(new) == {0: (3, ((0, 3),))} and len(book.freed) == 2
    assert book.groups.partial.discarded == {"replaced": 1}
    assert book.piece(new, 0, ((0, 3),), name="q").kept == {0: 3} and book.records == 3


def test_another_attempt_does_not_repeat_what_an_environment_failed_on() -> None:
    book = Book()
    old, other = book.lease(count=2)
    for lease in (old, other):
        book.piece(lease, 0, ((0, 4),))
    leases = ((old.group, old.token), (other.group, other.token + 1))  # the second is no lease of this producer
    book.groups.give_back(wire.LeaseReturn("p", leases, "environment.raised: ValueError"), now=0.0)
    assert book.groups.partial.discarded == {"failed": 1} and book.begun(old) == {} and book.begun(other)
    (new,) = book.lease("q")
    assert new.group == old.group and "continue" not in book.take() and new.attempt == old.attempt + 1


def test_what_waits_is_not_discarded_by_a_word() -> None:
    """A group that waits has no holder and token 0."""
    book = Book()
    (lease,) = book.lease()
    book.piece(lease, 0, ((0, 4),))
    book.groups.give_back(wire.LeaseReturn("p", ((lease.group, lease.token),), "stop"), now=0.0)
    assert book.groups.table.groups[lease.group].token == 0
    book.groups.give_back(wire.LeaseReturn("evil", ((lease.group, 0),), "environment.raised"), now=0.0)
    assert book.groups.partial.discarded == {} and book.begun(lease)


def test_what_was_begun_outlives_the_service() -> None:
    book = Book()
    (lease,) = book.lease()
    book.piece(lease, 0, ((0, 4),), digests={0: "d0"})
    book.again()
    assert book.groups.table.groups[0].partial[0].digests == {0: "d0"}
    assert book.piece(lease, 4, ((0, 4),)).kept == {0: 8}  # the lease is still this producer's
    book.lose(lease)
    book.again()
    (new,) = book.lease("q")
    assert book.begun(new) == {0: (8, ((0, 8),))}
    book.groups.check()


def test_a_store_that_went_back_asks_for_what_it_lost() -> None:
    book = Book()
    (lease,) = book.lease()
    book.piece(lease, 0, ((0, 4),))
    book.take()
    old = dict(book.rows)
    book.piece(lease, 4, ((0, 4),))
    book.again()
    book.rows = old
    book.groups = GroupMachine(book.settings, epoch=9)
    book.groups.load(old.items())
    assert book.piece(lease, 8, ((0, 4),)).kept == {0: 4}
    assert book.piece(lease, 4, ((0, 8),)).kept == {0: 12}


def test_an_older_beginning_lowers_the_deadline_when_it_is_handed_out() -> None:
    book = Book()
    (long,) = book.lease()
    book.piece(long, 0, ((0, 4),))
    book.train(1)
    book.lose(long)
    assert book.groups.table.groups[long.group].deadline is None  # without samples it counts for nothing while it waits
    (new,) = book.lease("q", version=1)
    assert new.group == long.group and new.deadline_version == 2  # 0 + 2, not 1 + 2
    assert book.begun(new) and book.groups.table.groups[long.group].deadline == 2
    book.groups.check()


def test_a_beginning_that_no_step_may_train_is_discarded() -> None:
    book = Book(max_staleness=1, depth=1, group_size=1)
    long, quick = book.lease(count=2)
    book.piece(long, 0, ((0, 4),))
    book.sample(quick, 0, 0)
    book.step()
    (younger,) = book.lease("q", version=1)
    book.sample(younger, 0, 1, "q")
    book.lose(long)
    book.step()
    book.take()
    (new,) = book.lease("q", version=2)
    assert new.group == long.group and new.deadline_version == 3 and book.begun(new) == {}
    assert book.take() == ["discard", "lease"] and book.groups.partial.discarded == {"stale": 1}
    assert [record.offset for record in book.freed] == [1]
    assert [event["why"] for event in book.events if event_name(event) == "discard"] == ["stale"]


def test_a_beginning_for_which_there_is_no_room_is_discarded() -> None:
    """B = 1, bound 2: when it is leased again, the claim from version 2 has to hold another group already."""
    book = Book(group_size=1)
    long, quick, slow = book.lease(count=3)
    book.piece(long, 0, ((0, 4),))
    book.sample(quick, 0, 0)
    book.step()
    (younger,) = book.lease("q", version=1)
    book.sample(younger, 0, 1, "q")
    book.lose(long)
    book.step()
    assert book.groups.table.groups[slow.group].deadline == 2
    (new,) = book.lease("q", version=2)
    assert new.group == long.group and new.deadline_version == 4 and book.begun(new) == {}
    assert book.groups.partial.discarded == {"room": 1}
    book.sample(slow, 0, 0)
    book.step()
    assert not any(event_name(event) == "drop" for event in book.events)


def test_weights_that_were_not_published_are_neither_kept_nor_continued() -> None:
    book = Book()
    book.groups.table.add_digest(0, "d0")
    (lease,) = book.lease()
    reply = book.piece(lease, 0, ((0, 4),), digests={0: "others"})
    assert "published was d0" in reply.refused[0] and not reply.kept and book.records == 0
    assert not book.lease(version=0)  # as for finished samples: this producer must sync
    assert "not kept: logprobs" in book.piece(lease, 0, ((0, 4),), wrong="logprobs: x").refused[0]
    assert book.groups.table.groups[lease.group].holder == "p"
    # A version of which the buffer hears later: it is judged when it is handed out.
    assert book.piece(lease, 0, ((1, 4),), digests={1: "mine"}).kept == {0: 4}
    book.groups.table.add_digest(1, "d1")
    book.lose(lease)
    (new,) = book.lease("q", version=1)
    assert book.begun(new) == {} and book.groups.partial.discarded == {"not_published": 1}


def test_a_learner_that_goes_back_takes_the_beginnings_of_its_versions_with_it() -> None:
    book = Book()
    book.train(1)
    book.groups.batches.checkpointed(epoch=book.epoch, step=1)
    (lease,) = book.lease(version=1)
    book.piece(lease, 0, ((0, 2), (1, 2)))
    book.piece(lease, 0, ((0, 2),), index=1)
    book.groups.register(**LEARNER | {"pid": 2, "takeover": True}, now=0.0)
    assert book.begun(lease) == {1: (2, ((0, 2),))} and book.groups.partial.discarded == {"abandoned": 1}


def test_beginnings_go_with_their_group() -> None:
    book = Book(over_issue=1)
    (lease, dead) = book.lease(count=2)
    book.piece(lease, 0, ((0, 4),), index=2)
    book.piece(dead, 0, ((0, 4),))
    for index in (0, 1):
        book.sample(lease, index, 0)
    assert not book.groups.table.groups[lease.group].partial
    assert "group is complete" in book.piece(lease, 4, ((0, 4),), index=2).refused[2]
    book.groups.give_back(wire.LeaseReturn("p", ((dead.group, dead.token),), "too long", dead=True), now=0.0)
    book.take()
    assert len(book.freed) == 2
    assert book.piece(dead, 4, ((0, 4),)).refused[0].startswith("gone: dead")
    assert book.sample(lease, 0, 0).duplicate == () and book.piece(lease, 0, ((0, 1),)).refused


def test_a_sample_that_is_there_needs_no_pieces_and_there_is_a_limit() -> None:
    book = Book()
    (lease,) = book.lease()
    book.sample(lease, 1, 0)
    assert book.piece(lease, 0, ((0, 4),), index=1).refused == {1: "not kept: the sample is there"}
    for at in [*range(MAX_PIECES), MAX_PIECES, MAX_PIECES]:
        reply = book.piece(lease, at, ((0, 1),))
    assert reply.kept == {0: MAX_PIECES} and f"{MAX_PIECES} pieces" in reply.refused[0]


def test_damaged_bytes_are_discarded() -> None:
    book = Book()
    (lease,) = book.lease()
    book.piece(lease, 0, ((0, 4),))
    book.piece(lease, 4, ((0, 4),))
    book.piece(lease, 0, ((0, 4),), index=1)
    book.groups.partial.discard_damaged({Record(1, 2, 1, 1, 2)})
    assert book.begun(lease) == {1: (4, ((0, 4),))} and book.groups.partial.discarded == {"damaged": 1}
    book.again()
    assert book.begun(lease) == {1: (4, ((0, 4),))}


def event_name(event: Any) -> str:
    return event["e"] if isinstance(event, dict) else "sample"


# ---------------------------------------------------------------- bytes


def pieces(*parts: tuple[int, int, int], version: int = 3, **arrays: Any) -> tuple[wire.Pieces, bytes]:
    """A message of pieces (index, start, count), tokens counting up from their place in the sample."""
    data = [
        begun.PieceData(
            index,
            start,
            np.arange(start, start + count, dtype=np.int32) + 100 * index,
            np.full(count, -0.5, np.float32),
            ((version, count),),
        )
        for index, start, count in parts
    ]
    if arrays:
        data = [begun.PieceData(0, 0, arrays["tokens"], arrays["logprobs"], ((version, len(arrays["tokens"])),))]
    return begun.pack_pieces("p", wire.Lease(7, 2, 0, (0, 1), 9, 4), data, {version: f"d{version}", 99: "unused"})


def verdict(head: wire.Pieces, payload: bytes) -> str:
    return checkpoints.check(head, payload, group_size=2, max_tokens=10, newest_version=3)[1]


def test_pieces_are_checked_like_samples() -> None:
    head, payload = pieces((0, 0, 4), (1, 6, 4))
    assert verdict(head, payload) == "" and head.digests == {3: "d3"}
    assert verdict(*pieces((0, 7, 4))).startswith("length: tokens 7 .. 11 of at most 10")
    assert verdict(*pieces((2, 0, 4))).startswith("index: sample 2")
    assert verdict(*pieces((1, 0, 4), (1, 4, 4))).startswith("index: a sample stands there twice")
    assert verdict(*pieces((0, -1, 4))).startswith("length")
    assert verdict(*pieces((0, 0, 4), version=4)).startswith("version: 4 was never published")
    assert verdict(*pieces((0, 0, 4), version=-1)).startswith("runs")
    nan = np.array([-0.5, np.nan], np.float32)
    assert verdict(*pieces(tokens=np.zeros(2, np.int32), logprobs=nan)).startswith("logprobs")
    assert verdict(head, payload[:8]).startswith("layout")
    short = wire.Pieces("p", 7, 2, (wire.Piece(0, 0, 3, ((3, 3),)),), {}, head.fields)
    assert verdict(short, payload).startswith("length: the arrays do not hold the 3 tokens")
    runs = wire.Pieces("p", 7, 2, (wire.Piece(0, 0, 8, ((3, 7),)),), {}, head.fields)
    assert verdict(runs, payload).startswith("length: the runs")
    assert verdict(wire.Pieces("p", 7, 2, (), {}, head.fields), payload).startswith("length")
    other, bytes_ = wire.pack_arrays({"response": np.zeros(4, np.float32), "logprobs": np.zeros(4, np.float32)})
    assert verdict(wire.Pieces("p", 7, 2, (wire.Piece(0, 0, 4, ((3, 4),)),), {}, other), bytes_).startswith("layout")


def test_bytes_come_back_joined_and_what_does_not_fit_or_is_damaged_is_left_out(tmp_path: Path) -> None:
    segments = Segments(tmp_path, segment_bytes=1 << 20, cache_bytes=0)
    book = Book()
    (lease,) = book.lease()
    for parts in ([(0, 0, 3), (1, 0, 2)], [(1, 2, 5), (0, 3, 4)]):
        head, payload = pieces(*parts, version=0)
        head = wire.Pieces("p", lease.group, lease.token, head.samples, head.digests, head.fields)
        arrays, wrong = checkpoints.check(head, payload, group_size=2, max_tokens=10, newest_version=3)
        keep = lambda item, head=head, arrays=arrays: checkpoints.store(head, item, arrays, segments)  # noqa: E731
        assert book.groups.pieces(head, invalid=lambda wrong=wrong: wrong, keep=keep, now=0.0).refused == {}
    segments.flush()
    heads, payloads, damaged = checkpoints.load([lease], book.groups, segments, max_bytes=1 << 20)
    assert not damaged
    found = begun.unpack_begun(wire.Leases((lease,), 0, begun=heads), payloads)[lease.group, lease.token]
    assert [(one.index, one.runs, one.digests) for one in found] == [
        (0, ((0, 7),), {0: "d0"}),
        (1, ((0, 7),), {0: "d0"}),
    ]
    for one in found:
        np.testing.assert_array_equal(one.token_ids, np.arange(7) + 100 * one.index)
        np.testing.assert_array_equal(one.logprobs, np.full(7, -0.5, np.float32))
    # one sample of 128 bytes fits into half of 400
    assert [head.index for head in checkpoints.load([lease], book.groups, segments, max_bytes=300)[0]] == [0]
    record = book.groups.table.groups[lease.group].partial[0].pieces[1]
    with (tmp_path / f"{record.segment:08d}.seg").open("r+b") as file:
        file.seek(record.offset + 60)
        file.write(b"\xff\xff")
    heads, payloads, damaged = checkpoints.load([lease], book.groups, segments, max_bytes=1 << 20)
    assert [head.index for head in heads] == [1] and len(payloads) == 1 and record in damaged
    segments.close()


def test_an_answer_whose_parts_disagree_is_refused() -> None:
    lease = wire.Lease(7, 2, 0, (0, 1), 9, 4)
    fields, payload = wire.pack_arrays({"response": np.zeros(4, np.int32), "logprobs": np.zeros(4, np.float32)})
    head = wire.Begun(7, 0, 4, ((0, 4),), {}, fields)
    assert len(begun.unpack_begun(wire.Leases((lease,), 0, begun=(head,)), [payload])[7, 2]) == 1
    for heads, payloads in (
        ((head,), []),
        ((), [payload]),
        ((wire.Begun(8, 0, 4, ((0, 4),), {}, fields),), [payload]),
        ((wire.Begun(7, 0, 5, ((0, 5),), {}, fields),), [payload]),
        ((wire.Begun(7, 0, 4, ((0, 4),), {}, fields[:1]),), [payload]),
    ):
        with pytest.raises(WireError):
            begun.unpack_begun(wire.Leases((lease,), 0, begun=heads), payloads)


def test_runs_are_joined_and_cut() -> None:
    assert joined_runs((), ((4, 2),)) == ((4, 2),)
    assert joined_runs(((4, 2),), ((5, 1),)) == ((4, 2), (5, 1))
    runs = ((4, 3), (5, 2), (4, 1))
    for at in range(7):
        assert joined_runs(cut_runs(runs, 0, at), cut_runs(runs, at, 6)) == runs
    assert cut_runs(runs, 3, 3) == () and cut_runs(runs, 5, 6) == ((4, 1),)
