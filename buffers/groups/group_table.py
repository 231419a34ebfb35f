"""The table of groups: every group in its state, recorded batches, ended groups, and the indexes derived from them.

Guarantees:
1. indexes and counters are derived from the rows: `check_table` rebuilds them and compares (the conservation law);
2. `load` of the persisted rows gives the same table.
It decides nothing and reads no clock.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from asyncrl.errors import AsyncRLError
from buffers.groups.judgements import Judges, ScoreQueue, open_judges, release
from buffers.groups.prompt_table import PromptTable
from buffers.groups.records import COMPETING, Batch, Change, Ended, Group, IdSet, Meta, State
from buffers.groups.transaction import Edit, Transaction
from buffers.groups.workers import Workers

_encode = msgspec.msgpack.Encoder().encode
_decode_group = msgspec.msgpack.Decoder(Group).decode
_decode_ended = msgspec.msgpack.Decoder(Ended).decode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode
_decode_ranges = msgspec.msgpack.Decoder(tuple[tuple[int, int], ...]).decode
_decode_digests = msgspec.msgpack.Decoder(dict[int, tuple[str, ...]]).decode

#: (deadline, sequence, id)
Entry = tuple[int, int, int]
#: Seconds between two full checks: one costs about a microsecond per group that is not retired.
CHECK_S = 1.0
#: Versions whose digests are kept.
KEPT_DIGESTS = 256


class GroupIndexes:
    """Counts and orders of groups by state, deadline and holder, and the queue of samples to score."""

    def __init__(self, judges: Judges, queue: ScoreQueue) -> None:
        self.judges = judges
        self.queue = queue
        self.counts: Counter[int] = Counter()
        self.due: Counter[int] = Counter()  # deadline -> competing groups
        self.ready: list[Entry] = []  # earliest deadline first
        self.used: list[Entry] = []  # trained groups that may be trained again, earliest deadline first
        self.pending: dict[int, None] = {}  # leased groups without a holder: they wait for a producer
        self.pending_order: list[tuple[float, int]] = []  # the same as (deadline, id); no deadline: inf
        self.held: dict[str, set[int]] = {}  # by producer
        self.named: dict[int, float] = {}  # leased group -> when its holder last named it

    @property
    def competing(self) -> int:
        """Groups that compete for a place in a batch."""
        return self.counts[State.LEASED] + self.counts[State.UNSCORED] + self.counts[State.READY]

    def remove(self, group: Group) -> None:
        """Take the group out of every index."""
        self.counts[group.state] -= 1
        if group.state in COMPETING and group.deadline is not None:
            left = self.due[group.deadline] - 1
            if left:
                self.due[group.deadline] = left
            else:
                del self.due[group.deadline]
        if group.state == State.READY:
            del self.ready[bisect.bisect_left(self.ready, _entry(group))]
        elif group.state == State.LEASED:
            if group.id in self.pending:
                del self.pending[group.id]
                del self.pending_order[bisect.bisect_left(self.pending_order, _urgency(group))]
            if group.holder:
                release(self.held, group.holder, group.id)
                self.named.pop(group.id, None)
        elif group.state == State.TRAINED and len(group.uses) < group.max_uses:
            del self.used[bisect.bisect_left(self.used, _entry(group))]

    def add(self, group: Group) -> None:
        """Put the group into the indexes that its state asks for."""
        self.counts[group.state] += 1
        if group.state in COMPETING and group.deadline is not None:
            self.due[group.deadline] += 1
        if group.state == State.READY:
            bisect.insort(self.ready, _entry(group))
        elif group.state == State.LEASED:
            if group.holder:
                self.held.setdefault(group.holder, set()).add(group.id)
            else:
                self.pending[group.id] = None
                bisect.insort(self.pending_order, _urgency(group))
        elif group.state == State.TRAINED and len(group.uses) < group.max_uses:
            bisect.insort(self.used, _entry(group))
        if group.state in (State.LEASED, State.UNSCORED):
            judges = self.judges.judges_for(group.source)
            for index, sample in group.samples.items():
                if sample.reward is None:
                    for judge in open_judges(sample, judges):
                        self.queue.offer((group.id, index, judge))

    def check(self, fresh: GroupIndexes) -> None:
        """Compare with indexes that were built from the rows. Raises `internal` if they disagree."""
        for name in ("counts", "due"):
            if +getattr(fresh, name) != +getattr(self, name):
                raise AsyncRLError("internal", f"{name}: {getattr(self, name)}, the rows say {getattr(fresh, name)}")
        if (fresh.ready, fresh.used) != (self.ready, self.used):
            raise AsyncRLError("internal", "the order of ready or used groups disagrees with the rows")
        if fresh.pending.keys() != self.pending.keys() or fresh.pending_order != self.pending_order:
            raise AsyncRLError("internal", "the pending groups disagree with the rows")
        if fresh.held != {name: ids for name, ids in self.held.items() if ids}:
            raise AsyncRLError("internal", "the lease holders disagree with the rows")
        if fresh.queue.keys() != self.queue.keys():
            raise AsyncRLError("internal", "the samples to score disagree with the rows")


def _entry(group: Group) -> Entry:
    return (group.deadline or 0, group.sequence, group.id)


def _urgency(group: Group) -> tuple[float, int]:
    """The order in which groups that wait for a producer are leased."""
    return (math.inf if group.deadline is None else group.deadline, group.id)


class GroupTable:
    """Groups by id. Rows: `meta`, `digests`, `retired`, `g<id>`, `x<id>` (ended), `b<step>`."""

    event_prefix = ""  # of their lines in the history

    def __init__(self, tx: Transaction, workers: Workers, judges: Judges, queue: ScoreQueue) -> None:
        self.tx = tx
        self.workers = workers
        self.judges = judges
        self.queue = queue
        self.indexes = GroupIndexes(judges, queue)
        self.prompts = PromptTable(tx)
        self.meta = Meta()
        self.groups: dict[int, Group] = {}
        self.ended: dict[int, Ended] = {}
        self.retired = IdSet()
        self.batches: dict[int, Batch] = {}
        self.digests: dict[int, tuple[str, ...]] = {}
        self.ended_counts: Counter[tuple[int, str]] = Counter()
        self.quarantined = 0  # dead groups that had been claimed: they used up a place in a batch
        self._checked = -math.inf

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows. Rows of other tables are ignored."""
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
        keys += [f"x{number}" for number in self.ended] + [f"b{step}" for step in self.batches]
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
            group.state = State.TRAINED if group.step <= self.meta.version else State.CLAIMED
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
        self._remove(group)
        self.add_ended(Ended(group.id, state, reason, detail[:500], group.step))
        if state == State.DEAD:
            self.tx.event("dead", g=group.id, reason=reason, detail=detail[:500])
        else:
            self.tx.event("drop", g=group.id, reason=reason)

    def retire(self, group: Group) -> None:
        """A durable checkpoint holds the group's gradient."""
        self._remove(group)
        self.retired.add(group.id)
        self.put("retired")

    def _remove(self, group: Group) -> None:
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
        self.quarantined += ended.step > 0

    def remove_ended(self, number: int) -> None:
        """The group was not at its end after all."""
        ended = self.ended.pop(number)
        self.ended_counts[ended.state, ended.reason] -= 1
        self.quarantined -= ended.step > 0
        self.put(f"x{number}")

    def add_digest(self, version: int, digest: str) -> None:
        """The weights of `version` have this digest. A version that was trained again may have two."""
        if version > self.meta.newest:
            self.meta.newest = version
            self.put("meta")
        known = self.digests.get(version, ())
        if digest and digest not in known:
            self.digests[version] = (*known, digest)[-4:]
            for old in sorted(self.digests)[:-KEPT_DIGESTS]:
                del self.digests[old]
            self.put("digests")

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
        """Check the sums of the ledger; at most once in `CHECK_S` everything that `check_table` looks at."""
        if not 0 <= self.tx.now - self._checked < CHECK_S:
            check_table(self)
            self._checked = self.tx.now
        else:
            check_sums(self)


def ledger_counts(table: GroupTable) -> dict[str, int]:
    """The conservation law in numbers: `issued` is the sum of the others."""
    named = {state.name.lower(): table.indexes.counts[state] for state in State if state < State.RETIRED}
    ended: Counter[str] = Counter()
    for (state, _), number in table.ended_counts.items():
        ended[State(state).name.lower()] += number
    return {
        "issued": table.meta.cursor,
        **named,
        "retired": len(table.retired),
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
    last = max(max(ids, default=-1), table.retired.ranges()[-1][1] - 1 if len(table.retired) else -1)
    if twice or last >= table.meta.cursor or len(ids) + len(table.retired) != table.meta.cursor:
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
