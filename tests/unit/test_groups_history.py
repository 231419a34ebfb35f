"""What the buffer keeps of prompts at their end does not grow: the check, the ledger and the rows."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from groups_run import settings

from asyncrl.errors import AsyncRLError
from buffers.client.offline_ledger import grown_ledger
from buffers.groups import group_table
from buffers.groups.group_table import GroupTable, ledger_counts
from buffers.groups.machine import GroupMachine, Parts, finish_group
from buffers.groups.records import Ended, Ledger, State, ledger_of
from buffers.values.archive import Archive
from buffers.values.id_set import IdSet, ranges_of

BATCH = 8


class SmallChunks(GroupTable):
    chunk = 32


def drop_sevens(*, rewards: list[float], **_: Any) -> str:
    return "seven" if 7.0 in rewards else ""


class Buffer:
    """A machine whose groups are dropped at random, half of them, and the rows that it has written."""

    def __init__(self, *, parts: Parts = Parts(table=SmallChunks)) -> None:  # noqa: B008
        self.parts = parts
        self.rows: dict[str, bytes] = {}
        self.random = random.Random(1)
        self.now, self.step, self.requests, self.life = 0.0, 0, 0, 0
        self.saved: list[tuple[int, Ledger]] = [(0, Ledger())]
        self.trained: dict[int, list[int]] = {}
        self.start()

    def start(self) -> None:
        """A new service on the rows, and a learner with the newest checkpoint."""
        self.life += 1
        self.machine = GroupMachine(
            settings(group_size=1, batch_groups=BATCH, total_groups=1 << 30),
            epoch=self.life,
            filters=(("sevens", drop_sevens),),
            parts=self.parts,
        )
        self.machine.load(self.rows.items())
        self.machine.note_start(self.now)
        self.machine.check()
        self.register()

    def register(self) -> None:
        self.step, ledger = self.saved[-1]
        self.epoch = self.machine.register(
            name="l", pid=len(self.rows), host="h", step=self.step, ledger=ledger, takeover=True, now=self.now
        )
        self.flush()

    def flush(self) -> None:
        for change in self.machine.take().rows:
            if change.value is None:
                self.rows.pop(change.key, None)
            else:
                self.rows[change.key] = change.value

    def train(self) -> None:
        while self.machine.table.indexes.counts[State.READY] < BATCH:
            self.requests += 1
            got = self.machine.lease(
                "p", engine_version=self.step, max_groups=BATCH, request=self.requests, now=self.now
            )
            for lease in got:
                finish_group(self.machine, lease.group, now=self.now, reward=self.random.choice([0.5, 7.0]))
        self.step, self.now = self.step + 1, self.now + 1.0
        claimed = self.machine.claim(epoch=self.epoch, step=self.step, version=self.step - 1, now=self.now)
        assert claimed is not None
        self.trained[self.step] = list(claimed.batch.groups)
        self.machine.commit(epoch=self.epoch, step=self.step, version=self.step, digest="", now=self.now)
        self.flush()

    def ledger(self) -> Ledger:
        """As it comes back from a checkpoint."""
        return ledger_of(self.machine.batches.ledger(epoch=self.epoch, step=self.step).to_json())

    def save(self) -> None:
        self.saved.append((self.step, self.ledger()))
        self.machine.batches.checkpointed(epoch=self.epoch, step=self.step)
        self.flush()

    def reach(self, issued: int) -> None:
        while self.machine.table.meta.cursor < issued:
            self.train()
            self.train()
            self.save()

    def ends(self) -> dict[int, str]:
        """How every prompt ended that has."""
        table = self.machine.table
        ends = {number: group_table.end_kind(end) for number, end in table.ended.items()}
        ends |= {number: table.archive.kind(number) for number in table.archive.ids}
        return ends | dict.fromkeys(table.retired, "retired")

    def trained_ids(self) -> set[int]:
        """Those of the weights of the learner."""
        return {number for step, groups in self.trained.items() if step <= self.step for number in groups}


def test_check_and_ledger_look_at_live_groups_alone() -> None:
    buffer = Buffer()
    visited, sizes = [], []
    for issued in range(600, 2601, 25):
        buffer.reach(issued)
        table = buffer.machine.table
        visited.append(len(table.groups) + len(table.ended) + len(table.retired))  # what `check_ids` enumerates
        sizes.append(len(buffer.ledger().to_json()))
    early, late = slice(0, 20), slice(-20, None)
    assert max(visited) <= 4 * SmallChunks.chunk and max(sizes) < 2000
    assert sum(visited[late]) <= 1.1 * sum(visited[early]) and sum(sizes[late]) <= 1.1 * sum(sizes[early])
    assert len(buffer.machine.table.archive.ids.ranges()) == 1
    counts = ledger_counts(buffer.machine.table)
    assert counts["dropped"] > 1000 and counts["retired"] > 1000


def test_rows_grow_by_one_for_each_chunk() -> None:
    buffer = Buffer()
    buffer.reach(2000)
    kinds = [key.rstrip("0123456789") for key in buffer.rows]
    assert kinds.count("archive") == len(buffer.machine.table.archive.chunks) >= 60
    assert kinds.count("x") + kinds.count("g") <= 4 * SmallChunks.chunk
    assert max(len(row) for key, row in buffer.rows.items() if key.startswith(("archive", "retired"))) < 400
    assert buffer.rows.items() <= {row.key: row.value for row in buffer.machine.rows()}.items()


def test_a_restart_knows_how_every_prompt_ended() -> None:
    buffer = Buffer()
    buffer.reach(1000)
    before = buffer.ends()
    buffer.start()
    assert buffer.ends() == before and {number for number, kind in before.items() if kind == "retired"} == (
        buffer.trained_ids()
    )
    assert set(before.values()) == {"retired", "dropped:filtered"}
    buffer.reach(1200)
    buffer.machine.check()


def test_an_older_checkpoint_rolls_archived_prompts_back() -> None:
    """The learner returns by far more than a chunk: the prompts of the steps that are gone are dropped, no others."""
    buffer = Buffer()
    buffer.reach(400)
    place = len(buffer.saved)
    kept = {number for number, kind in buffer.ends().items() if kind == "retired"}
    buffer.reach(1000)
    before = buffer.ends()
    del buffer.saved[place:]
    buffer.register()
    after = buffer.ends()
    assert {number for number, kind in after.items() if kind == "retired"} == kept == buffer.trained_ids()
    assert {number for number, kind in after.items() if kind == "dropped:rolled_back"} == {
        number for number, kind in before.items() if kind == "retired" and number not in kept
    }
    assert {n for n, kind in before.items() if kind == "dropped:filtered"} == {
        n for n, kind in after.items() if kind == "dropped:filtered"
    }
    buffer.reach(1200)
    buffer.machine.check()


def test_an_empty_store_takes_the_numbers_of_the_ledger() -> None:
    buffer = Buffer()
    buffer.reach(1000)
    before, known = ledger_counts(buffer.machine.table), set(buffer.ends())
    buffer.rows.clear()
    buffer.start()
    after = ledger_counts(buffer.machine.table)
    assert {name: after[name] for name in ("issued", "retired", "dropped")} == {
        name: before[name] for name in ("issued", "retired", "dropped")
    }
    again = {number for number in buffer.machine.table.groups if number in known}
    assert not again, "prompts at their end are not issued again"
    buffer.reach(1400)
    buffer.start()  # its own rows now, on top of what was adopted
    assert buffer.ledger().archived.ranges[0][0] == 0
    buffer.machine.check()


def test_a_checkpoint_before_the_adopted_one_issues_again_what_it_does_not_know() -> None:
    buffer = Buffer()
    buffer.reach(300)
    place = len(buffer.saved)
    buffer.reach(800)
    buffer.rows.clear()
    buffer.start()
    assert buffer.machine.table.archive.adopted.ranges
    del buffer.saved[place:]
    buffer.register()
    ends, table = buffer.ends(), buffer.machine.table
    assert {n for n, kind in ends.items() if kind == "retired"} | set(IdSet(table.archive.adopted.ranges)) >= (
        buffer.trained_ids()
    )
    assert set(range(table.meta.cursor)) - set(ends) == set(table.groups)
    buffer.reach(1000)
    buffer.machine.check()


def test_a_store_of_an_older_state_is_overruled() -> None:
    """It was restored from a copy: prompts that it has as leased or dropped are at their end by the ledger."""
    buffer = Buffer()
    buffer.reach(300)
    copy = dict(buffer.rows)
    buffer.reach(600)
    counts = ledger_counts(buffer.machine.table)
    buffer.rows = copy
    buffer.start()
    assert ledger_counts(buffer.machine.table)["retired"] == counts["retired"]
    buffer.reach(700)
    buffer.machine.check()


def test_rows_and_ledger_of_an_older_build_are_taken_over() -> None:
    """It has a row for each ended group and all ranges of retired ones, and its ledger has no archive."""

    class NoArchive(GroupTable):
        chunk = 1 << 40

    old = Buffer(parts=Parts(table=NoArchive))
    old.reach(500)
    fields = msgspec.to_builtins(old.ledger())
    assert fields.pop("archived") == {"ranges": (), "counts": {}}
    assert sum(key[0] == "x" for key in old.rows) > 200 and not any(key.startswith("archive") for key in old.rows)
    before = old.ends()
    old.saved[-1] = (old.step, ledger_of(msgspec.json.encode(fields).decode()))
    old.parts = Parts(table=SmallChunks)
    old.start()
    assert old.ends() == before and len(old.machine.table.archive.chunks) >= 10
    assert not any(key[0] == "x" and int(key[1:]) in old.machine.table.archive for key in old.rows)
    old.rows.clear()
    old.start()  # also without its store, by the old ledger alone
    assert old.ends() == before


def test_a_ledger_that_grows_without_the_buffer_keeps_what_is_archived() -> None:
    buffer = Buffer()
    buffer.reach(200)
    ledger = buffer.ledger()
    assert ledger.archived.counts
    text = grown_ledger(ledger.to_json(), epoch=9, step=ledger.step + 1, trained={ledger.step + 1: [900]}, dead={})
    grown = ledger_of(text)
    assert grown.archived == ledger.archived and grown.trained == (*ledger.trained, (900, 901))


def test_few_chunks_move_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_table, "MOST_SEALED", 2)
    buffer = Buffer()
    table = buffer.machine.table
    for number in range(5 * SmallChunks.chunk):
        table.add_ended(Ended(number, State.DROPPED, "late"))
    table.meta.cursor = 5 * SmallChunks.chunk
    for left in (3, 1, 0):
        group_table.seal(table)
        assert len(table.ended) == left * SmallChunks.chunk
        buffer.machine.check()


def test_a_late_sample_of_an_archived_prompt_is_told_its_end() -> None:
    buffer = Buffer()
    buffer.reach(200)
    target, ends = buffer.machine.intake.target, buffer.ends()
    for kind, text in (("retired", "gone: retired"), ("dropped:filtered", "gone: dropped (filtered)")):
        number = next(n for n, end in ends.items() if end == kind and n in buffer.machine.table.archive)
        assert target.gone_reason(number) == text
    assert target.gone_reason(10_000) == "unknown group"


def test_check_finds_a_prompt_that_is_also_archived() -> None:
    buffer = Buffer()
    buffer.reach(200)
    table = buffer.machine.table
    table.archive.seal(1000, dict.fromkeys(range(32_000, 32_032), "retired"))
    table.meta.cursor += 32
    with pytest.raises(Exception, match="two states"):
        buffer.machine.check()
    table.archive.open(1000)
    table.meta.cursor -= 32
    buffer.machine.check()
    table.archive.counts["dropped:filtered"] += 1
    table.meta.cursor += 1
    with pytest.raises(Exception, match=r"does not add up|two states"):
        buffer.machine.check()


@pytest.mark.parametrize("chunk", [1, 3, 8, 1024])
def test_a_chunk_keeps_every_end(chunk: int) -> None:
    kinds = ["retired", "dropped:late", "dead:poison:reward"]
    ends = {number: random.Random(number).choice(kinds) for number in range(5 * chunk, 6 * chunk)}
    archive = Archive(chunk)
    archive.seal(5, ends)
    again = Archive(chunk)
    again.load([(key, archive.row(key) or b"") for key in archive.keys()])  # noqa: SIM118
    assert again.counts == archive.counts and again.summary() == archive.summary() and len(again) == chunk
    assert {number: again.kind(number) for number in ends} == ends
    assert again.kind(5 * chunk - 1) == again.kind(6 * chunk) == ""
    assert again.open(5) == ends and not again.counts and not len(again.ids)


def test_id_set_cuts_and_finds_gaps() -> None:
    chooser = random.Random(3)
    for _ in range(300):
        plain = {chooser.randrange(40) for _ in range(20)}
        first, end = sorted(chooser.sample(range(42), k=2))
        ids = IdSet(ranges_of(plain))
        assert ids.covers(first, end) == (plain >= set(range(first, end)))
        ids.cut(first, end)
        plain -= set(range(first, end))
        assert set(ids) == plain and len(ids) == len(plain) and ids.ranges() == ranges_of(plain)
        assert list(ids.missing(45)) == [n for n in range(45) if n not in plain]


@pytest.mark.parametrize("counts", [{"retired": 3}, {"retired": 5, "dropped:late": -1}, {"lost:x": 4}])
def test_a_ledger_whose_numbers_contradict_each_other_is_refused(counts: dict[str, int]) -> None:
    good = {"ranges": [[0, 4]], "counts": {"retired": 3, "dead:reward": 1}}
    text = Ledger().to_json()
    made = msgspec.json.decode(text) | {"archived": good}
    assert ledger_of(msgspec.json.encode(made).decode()).archived.counts == good["counts"]
    with pytest.raises(AsyncRLError, match="cannot be read"):
        ledger_of(msgspec.json.encode(made | {"archived": good | {"counts": counts}}).decode())
