"""The table of groups: every group in its state, recorded batches, ended groups, and the indexes derived from them.

Guarantees:
1. indexes and counters are derived from the rows: `check_table` rebuilds them and compares (the conservation law);
2. `load` of the persisted rows gives the same table;
3. prompts at their end move to the archive by chunks of ids (`seal`), so no check or ledger looks at all of history.
It decides nothing and reads no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from asyncrl.errors import AsyncRLError
from buffers.groups.group_indexes import GroupIndexes
from buffers.groups.judgements import Judges, ScoreQueue
from buffers.groups.prompt_table import PromptTable
from buffers.groups.records import CLAIMED, TRAINED, Batch, Change, Ended, Group, Meta, State
from buffers.groups.transaction import Edit, Transaction
from buffers.groups.workers import Workers
from buffers.values.archive import CHUNK, RETIRED, ROW, Archive, Archived
from buffers.values.id_set import IdSet

_encode = msgspec.msgpack.Encoder().encode
_decode_group = msgspec.msgpack.Decoder(Group).decode
_decode_ended = msgspec.msgpack.Decoder(Ended).decode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode
_decode_ranges = msgspec.msgpack.Decoder(tuple[tuple[int, int], ...]).decode
_decode_digests = msgspec.msgpack.Decoder(dict[int, tuple[str, ...]]).decode

#: Seconds between two full checks, and for each group that is not archived: one costs up to 40 microseconds of it.
CHECK_S, CHECK_EACH_S = 1.0, 0.002
#: Versions whose digests are kept.
KEPT_DIGESTS = 256
#: Chunks that move to the archive at once: the store of an older build may hold a million ended groups as single rows.
MOST_SEALED = 64


class GroupTable:
    """Groups by id. Rows: `meta`, `digests`, `retired`, `g<id>`, `x<id>` (ended), `b<step>`, those of the archive."""

    event_prefix = ""  # of their lines in the history
    chunk = CHUNK  # ids that move to the archive together

    def __init__(self, tx: Transaction, workers: Workers, judges: Judges, queue: ScoreQueue) -> None:
        self.tx = tx
        self.workers = workers
        self.judges = judges
        self.queue = queue
        self.indexes = GroupIndexes(judges, queue)
        self.prompts = PromptTable(tx)
        self.meta = Meta()
        self.groups: dict[int, Group] = {}
        self.ended: dict[int, Ended] = {}  # those that are not in the archive
        self.retired = IdSet()  # likewise
        self.archive = Archive(self.chunk)
        self.batches: dict[int, Batch] = {}
        self.digests: dict[int, tuple[str, ...]] = {}
        self.ended_counts: Counter[tuple[int, str]] = Counter()
        self._checked = -math.inf

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows. Rows of other tables are ignored."""
        rows = list(rows)
        self.archive.load(rows)
        for kind, number in self.archive.counts.items():
            _count_ended(self, kind, number)
        for key, value in rows:
            if key == "meta":
                self.meta = _decode_meta(value)
            elif key == "digests":
                self.digests = _decode_digests(value)
            elif key == "retired":
                self.retired = IdSet(_decode_ranges(value))
            elif key[0] == "g":
                group = _decode_group(value)
                self.groups[group.id] = group
                self.indexes.add(group)
            elif key[0] == "x":
                self._add_ended(_decode_ended(value))
            elif key[0] == "b" and key[1:].isdigit():
                batch = _decode_batch(value)
                self.batches[batch.step] = batch
        self.batches = dict(sorted(self.batches.items()))
        for batch in self.batches.values():
            self._apply_batch(batch)
        newest = max((group.token for group in self.groups.values()), default=0)
        self.tx.newest_token = max(self.tx.newest_token, newest)

    def rows(self) -> list[Change]:
        """All rows, for a store that lost its own."""
        keys = ["meta", "digests", "retired", *(f"g{number}" for number in self.groups)]
        keys += [f"x{number}" for number in self.ended] + [f"b{step}" for step in self.batches] + self.archive.keys()
        return [Change(key, self.row(key)) for key in keys]

    def row(self, key: str) -> bytes | None:
        if key[0] == "g":
            group = self.groups.get(int(key[1:]))
            return None if group is None else _encode(group)
        if key == "meta":
            return _encode(self.meta)
        if key == "digests":
            return _encode(self.digests)
        if key == "retired":
            return _encode(self.retired.ranges())
        if key.startswith(ROW):
            return self.archive.row(key)
        found = self.ended.get(int(key[1:])) if key[0] == "x" else self.batches.get(int(key[1:]))
        return None if found is None else _encode(found)

    def row_key(self, group: Group) -> str:
        return f"g{group.id}"

    def put(self, key: str) -> None:
        """Write a row with the transaction."""
        self.tx.put(key, self)

    # ------------------------------------------------------------ edits

    def get(self, number: int) -> Group | None:
        """The group, while it is not at its end."""
        return self.groups.get(number)

    def edit(self, group: Group) -> Edit:
        """A context in which the group may be edited."""
        return self.tx.edit(self, group)

    def add(self, group: Group) -> None:
        """Add a group."""
        self.groups[group.id] = group
        self.indexes.add(group)
        self.put(f"g{group.id}")

    def add_batch(self, batch: Batch) -> None:
        """Record a batch: its groups are CLAIMED."""
        self.batches[batch.step] = batch
        self._apply_batch(batch)
        self.put(f"b{batch.step}")

    def commit_batch(self, batch: Batch) -> None:
        """The step of a recorded batch is committed: its groups are TRAINED."""
        self.meta.version = batch.step
        self.meta.newest = max(self.meta.newest, batch.step)
        self._apply_batch(batch)
        self.put("meta")

    def _apply_batch(self, batch: Batch) -> None:
        """Set the state of the batch's groups. It follows from the rows of the batch and of `meta`, so the rows of the
        groups are not written."""
        for number in batch.groups:
            group = self.groups[number]
            self.indexes.remove(group)
            if batch.step not in group.uses:
                group.uses.append(batch.step)
            group.step, group.claimed = group.uses[-1], max(group.claimed, batch.claimed)
            group.state = TRAINED if group.step <= self.meta.version else CLAIMED
            self.indexes.add(group)

    def drop_samples(self, group: Group) -> None:
        """Drop everything that arrived for a group: payloads are freed, reward leases end."""
        judges = self.judges.judges_for(group.source) if self.queue else ()
        for index in group.samples if judges else ():
            for judge in judges:
                self.queue.remove((group.id, index, judge))
        self.tx.free(group.records)
        self.drop_partial(group)
        group.samples, group.records = {}, []

    def drop_partial(self, group: Group, index: int | None = None) -> int:
        """Drop the partial sample of `index` (None: all of the group); the number of tokens dropped."""
        tokens = 0
        if not group.partial:
            return 0
        for number in list(group.partial) if index is None else [index]:
            found = group.partial.pop(number, None)
            if found is not None:
                self.tx.free(found.pieces)
                tokens += found.length
        return tokens

    def cancel(self, group: Group, why: str) -> None:
        """Tell the holder of a group to stop, and the history why."""
        if group.holder:
            self.workers.cancel(group.holder, group.id, group.token, self.tx.now)
            self.tx.event("cancel", g=group.id, token=group.token, why=why)

    def end(self, group: Group, state: State, reason: str, detail: str = "", *, cancel: bool = True) -> None:
        """Move a group to DROPPED or DEAD; with `cancel` its holder is asked to stop."""
        if cancel:
            self.cancel(group, reason)
        self.remove(group)
        self.add_ended(Ended(group.id, state, reason, detail[:500], group.step))
        if state == State.DEAD:
            self.tx.event("dead", g=group.id, reason=reason, detail=detail[:500])
        else:
            self.tx.event("drop", g=group.id, reason=reason)

    def retire(self, group: Group) -> None:
        """A durable checkpoint holds the group's gradient."""
        self.remove(group)
        self.retired.add(group.id)
        self.put("retired")

    def remove(self, group: Group) -> None:
        """Take the group out; its samples are freed."""
        self.indexes.remove(group)
        self.drop_samples(group)
        self.prompts.release(group.id)
        del self.groups[group.id]
        self.put(f"g{group.id}")

    def add_ended(self, ended: Ended) -> None:
        """Record a group that is DROPPED or DEAD."""
        self._add_ended(ended)
        self.put(f"x{ended.id}")

    def _add_ended(self, ended: Ended) -> None:
        self.ended[ended.id] = ended
        self.ended_counts[ended.state, ended.reason] += 1

    def remove_ended(self, number: int) -> None:
        """The group was not at its end after all."""
        ended = self.ended.pop(number)
        self.ended_counts[ended.state, ended.reason] -= 1
        self.put(f"x{number}")

    def add_digest(self, version: int, digest: str) -> None:
        """The weights of `version` have this digest. A version that was trained again may have two: the last counts."""
        if version > self.meta.newest:
            self.meta.newest = version
            self.put("meta")
        known = self.digests.get(version, ())
        if digest and digest not in known[-1:]:
            self.digests[version] = (*(other for other in known if other != digest), digest)[-4:]
            for old in sorted(self.digests)[:-KEPT_DIGESTS]:
                del self.digests[old]
            self.put("digests")
        if digest in self.meta.abandoned:
            self.meta.abandoned = tuple(other for other in self.meta.abandoned if other != digest)
            self.put("meta")

    # ------------------------------------------------------------ counts

    @property
    def frontier(self) -> int:
        """The version that the next new claim starts from: after the committed step and every recorded batch."""
        return max(self.meta.version, next(reversed(self.batches), 0))  # batches are in the order of their steps

    @property
    def outstanding(self) -> int:
        """Competing groups, and those of the newest batch while it is not committed."""
        newest = next(reversed(self.batches), 0)
        return self.indexes.competing + (len(self.batches[newest].groups) if newest > self.meta.version else 0)

    def verify(self) -> None:
        """Check the sums of the ledger; once in `CHECK_S`, or `CHECK_EACH_S` per group, all that `check_table` does."""
        if not 0 <= self.tx.now - self._checked < max(CHECK_S, CHECK_EACH_S * len(self.groups)):
            seal(self)
            check_table(self)
            self._checked = self.tx.now
        else:
            check_sums(self)


def abandon_versions(table: GroupTable, newest: int) -> None:
    """The learner went back: other weights will have the numbers above `newest`."""
    table.meta.newest = newest
    for version in [version for version in table.digests if version > newest]:
        gone = table.digests.pop(version)
        table.meta.abandoned = (*table.meta.abandoned, *gone)[-KEPT_DIGESTS:]
        table.put("digests")
    table.put("meta")


def _end_of(kind: str) -> tuple[State, str]:
    state, _, reason = kind.partition(":")
    return State[state.upper()], reason


def _count_ended(table: GroupTable, kind: str, number: int) -> None:
    if kind != RETIRED:
        table.ended_counts[_end_of(kind)] += number


def seal(table: GroupTable) -> None:
    """Move chunks whose prompts are all at their end to the archive."""
    size = table.archive.chunk
    counts = Counter(number // size for numbers in (table.ended, table.retired) for number in numbers)
    for chunk in [chunk for chunk, count in counts.items() if count == size][:MOST_SEALED]:
        first, end = chunk * size, (chunk + 1) * size
        found = {number: table.ended.pop(number, None) for number in range(first, end)}
        table.retired.cut(first, end)
        table.archive.seal(chunk, {n: RETIRED if ended is None else end_kind(ended) for n, ended in found.items()})
        _put_chunk(table, chunk, [number for number, ended in found.items() if ended is not None])


def reopen(table: GroupTable, chunk: int) -> None:
    """Move a chunk back: the ends of its prompts may change."""
    found = table.archive.open(chunk)
    for number, kind in found.items():
        if kind == RETIRED:
            table.retired.add(number)
        else:
            table.ended[number] = Ended(number, *_end_of(kind))
    _put_chunk(table, chunk, [number for number in found if number in table.ended])


def adopt(table: GroupTable, archived: Archived) -> None:
    """Archive these numbers and nothing else."""
    before, changed = table.archive.counts, table.archive.adopt(archived)
    for kind in {*before, *archived.counts}:
        _count_ended(table, kind, archived.counts.get(kind, 0) - before[kind])
    for key in changed:
        table.put(key)


def _put_chunk(table: GroupTable, chunk: int, ended: Iterable[int]) -> None:
    for key in ("retired", table.archive.key(chunk), *(f"x{number}" for number in ended)):
        table.tx.put_quietly(key, table)


def end_kind(ended: Ended) -> str:
    """The kind of its end, as in the archive."""
    return f"{State(ended.state).name.lower()}:{ended.reason}"


def ledger_counts(table: GroupTable) -> dict[str, int]:
    """The conservation law in numbers: `issued` is the sum of the others."""
    named = {state.name.lower(): table.indexes.counts[state] for state in State if state < State.RETIRED}
    ended: Counter[str] = Counter()
    for (state, _), number in table.ended_counts.items():
        ended[State(state).name.lower()] += number
    return {
        "issued": table.meta.cursor,
        **named,
        "retired": len(table.retired) + table.archive.counts[RETIRED],
        "dropped": ended["dropped"],
        "dead": ended["dead"],
    }


def reasons(table: GroupTable, state: State) -> dict[str, int]:
    """The number of DROPPED (or DEAD) groups by reason."""
    return {reason: number for (kind, reason), number in table.ended_counts.items() if kind == state and number}


def check_table(table: GroupTable) -> None:
    """Compare the conservation law and every index with the rows. Raises `internal` if they disagree."""
    check_sums(table)
    check_ids(table)
    check_indexes(table)


def check_sums(table: GroupTable) -> None:
    """`issued` equals the sum of all states. Raises `internal`."""
    counts = ledger_counts(table)
    if counts["issued"] != sum(counts.values()) - counts["issued"]:
        raise AsyncRLError("internal", f"the ledger does not add up: {counts}")


def check_ids(table: GroupTable) -> None:
    """Every issued prompt is in exactly one state. Raises `internal`."""
    ids = [*table.groups, *table.ended]
    twice = len(set(ids)) != len(ids) or any(number in table.retired for number in ids)
    archived = any(number in table.archive for numbers in (ids, table.retired) for number in numbers)
    last = max([-1, *ids, *(end - 1 for found in (table.retired, table.archive.ids) for _, end in found.ranges()[-1:])])
    known = len(ids) + len(table.retired) + len(table.archive)
    if twice or archived or len(table.archive) != len(table.archive.ids) or not last < table.meta.cursor == known:
        raise AsyncRLError("internal", "a prompt is in two states or in none")


def check_indexes(table: GroupTable) -> None:
    """Every index equals one that is built from the rows. Raises `internal`."""
    fresh = GroupIndexes(table.judges, ScoreQueue())
    for group in table.groups.values():
        fresh.add(group)
    table.indexes.check(fresh)
    if list(table.batches) != sorted(table.batches):
        raise AsyncRLError("internal", "the recorded batches are not in the order of their steps")
    for batch in table.batches.values():
        if any(batch.step not in table.groups[number].uses for number in batch.groups):
            raise AsyncRLError("internal", f"the batch of step {batch.step} disagrees with its groups")
