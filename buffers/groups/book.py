"""The book of the buffer: every group in its state, the indexes derived from it, and what changed since the last look.

A transition takes a group out of the
indexes, edits it and puts it back. Guarantees:
1. indexes and counters are derived: `check` builds them anew and compares (the conservation law);
2. every edit is noted: `take` gives the rows to persist, the events to log and the payloads that are free, once;
3. `load` of the persisted rows gives the same book.
No I/O, no clock: time is passed in, `wall_offset` turns it into wall time for what people read.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from asyncrl.config.judges import judges_for
from asyncrl.config.sections.judge import DEFAULT
from asyncrl.errors import AsyncRLError
from buffers.groups.changes import Cancelled, Event, Taken, Worker
from buffers.groups.judgements import open_judges
from buffers.groups.records import COMPETING, Batch, Budget, Change, Ended, Group, IdSet, Meta, Record, Settings, State
from buffers.groups.schedule import Plan
from buffers.groups.score_queue import ScoreQueue, let_go
from buffers.groups.tunable_settings import Tuning

_encode = msgspec.msgpack.Encoder().encode
_group = msgspec.msgpack.Decoder(Group).decode
_ended = msgspec.msgpack.Decoder(Ended).decode
_batch = msgspec.msgpack.Decoder(Batch).decode
_meta = msgspec.msgpack.Decoder(Meta).decode
_tuning = msgspec.msgpack.Decoder(Tuning).decode
_budget = msgspec.msgpack.Decoder(Budget).decode
_ranges = msgspec.msgpack.Decoder(tuple[tuple[int, int], ...]).decode
_digests = msgspec.msgpack.Decoder(dict[int, tuple[str, ...]]).decode


#: Data sources whose judges are remembered: the names come with the rows.
KEPT_SOURCES = 1024
#: Seconds between two proofs of the whole book: one costs about a microsecond per group that is not retired.
PROOF_S = 1.0


def urgency(group: Group) -> tuple[float, int]:
    """The order in which groups that wait for a producer are leased."""
    return (math.inf if group.deadline is None else group.deadline, group.id)


class Book:
    """Rows, indexes and changes. `epoch` is that of the service: its tokens are larger than those of any before it."""

    def __init__(self, settings: Settings, *, epoch: int = 1, wall_offset: float = 0.0) -> None:
        self.settings = settings
        self.service_epoch = epoch
        self.wall_offset = wall_offset
        self.meta = Meta()
        self.tuning = Tuning()
        self.budget = Budget()
        self.plan = Plan(((1, settings.batch_groups),))
        self.groups: dict[int, Group] = {}
        self.ended: dict[int, Ended] = {}
        self.retired = IdSet()
        self.batches: dict[int, Batch] = {}
        self.digests: dict[int, tuple[str, ...]] = {}
        self.counts: Counter[int] = Counter()
        self.ended_counts: Counter[tuple[int, str]] = Counter()
        self.discarded: Counter[str] = Counter()  # checkpoints not handed out, by reason, since the service started
        self.quarantined = 0  # dead groups that had been claimed: they used up a place in a batch
        self.due: Counter[int] = Counter()  # deadline -> competing groups
        self.ready_order: list[tuple[int, int, int]] = []  # (deadline, sequence, id), earliest first
        self.pending: dict[int, None] = {}  # leased to nobody: they wait for a producer
        self.pending_order: list[tuple[float, int]] = []  # the same as (deadline, id), earliest first; none: inf
        self.held: dict[str, set[int]] = {}
        self.barred: dict[str, tuple[int, float]] = {}  # producer -> (version that it holds wrongly, until when)
        self.named: dict[int, float] = {}  # leased group -> when its holder last named it
        self.scores_due = ScoreQueue()
        self.judge_counts: Counter[tuple[str, str]] = Counter()  # (judge, what), since the service started
        self.workers: dict[tuple[str, str], Worker] = {}
        self.used_order: list[tuple[int, int, int]] = []  # the same of trained groups that may be trained again
        self.cancelled: dict[str, dict[tuple[int, int], Cancelled]] = {}  # by producer: leases that it is to stop
        self.fault: tuple[str, str] | None = None  # (code, message): the run ends with it
        self.generation = 0  # counts edits: polls are looked at again when it moves
        self._judges: dict[str, tuple[str, ...]] = {}  # data source -> who is asked
        self._token = epoch << 24
        self._stamped = (math.nan, 0.0)
        self._proved = -math.inf  # when `settle` last looked at everything
        self._dirty: dict[str, None] = {}
        self._events: list[Event] = []
        self._freed: list[Record] = []

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows; keys: meta, tuning, budget, digests, retired, g<id>, x<id>, b<step>."""
        for key, value in rows:
            if key == "meta":
                self.meta = _meta(value)
            elif key == "tuning":
                self.tuning = _tuning(value)
            elif key == "budget":
                self.budget = _budget(value)
            elif key == "digests":
                self.digests = _digests(value)
            elif key == "retired":
                self.retired = IdSet(_ranges(value))
            elif key[0] == "g":
                group = _group(value)
                self.groups[group.id] = group
                self._index(group)
            elif key[0] == "x":
                self._note_ended(_ended(value))
            elif key[0] == "b" and key[1:].isdigit():
                batch = _batch(value)
                self.batches[batch.step] = batch
        self.batches = dict(sorted(self.batches.items()))
        for batch in self.batches.values():
            for number in batch.groups:
                self._take_in(self.groups[number], batch)
        self._token = max(self._token, *(group.token for group in self.groups.values()), 0)

    def rows(self) -> list[Change]:
        """The whole book as rows, for a store that lost its own."""
        self._dirty = dict.fromkeys(["meta", "digests", "retired", "budget", "tuning"])
        self._dirty |= dict.fromkeys(f"g{number}" for number in self.groups)
        self._dirty |= dict.fromkeys(f"x{number}" for number in self.ended)
        self._dirty |= dict.fromkeys(f"b{number}" for number in self.batches)
        return self._changes()

    def take(self) -> Taken:
        """Rows, events and free payloads since the last call."""
        taken = Taken(self._changes(), self._events, self._freed)
        self._events, self._freed = [], []
        return taken

    def _changes(self) -> list[Change]:
        changes = [Change(key, self._row(key)) for key in self._dirty]
        self._dirty = {}
        return changes

    def _row(self, key: str) -> bytes | None:
        if key[0] == "g":
            group = self.groups.get(int(key[1:]))
            return None if group is None else _encode(group)
        if key == "meta":
            return _encode(self.meta)
        if key == "tuning":
            return _encode(self.tuning)
        if key == "budget":
            return _encode(self.budget)
        if key == "digests":
            return _encode(self.digests)
        if key == "retired":
            return _encode(self.retired.ranges())
        found: Any = self.ended.get(int(key[1:])) if key[0] == "x" else self.batches.get(int(key[1:]))
        return None if found is None else _encode(found)

    # ------------------------------------------------------------ edits

    def _touch(self, key: str) -> None:
        self._dirty[key] = None
        self.generation += 1

    def _event(self, now: float, name: str, **fields: Any) -> None:
        self._events.append({"t": self._stamp(now), "e": name, **fields})

    def _stamp(self, now: float) -> float:
        """Wall time for the log; one drain has one `now`, so it is rounded once."""
        if now != self._stamped[0]:
            self._stamped = (now, round(now + self.wall_offset, 6))
        return self._stamped[1]

    def _new_token(self) -> int:
        self._token += 1
        return self._token

    def _out(self, group: Group) -> None:
        """Take the group out of every index, to be edited; `_in` puts it back."""
        self.counts[group.state] -= 1
        if group.state in COMPETING and group.deadline is not None:
            left = self.due[group.deadline] - 1
            if left:
                self.due[group.deadline] = left
            else:
                del self.due[group.deadline]
        if group.state == State.READY:
            entry = (group.deadline or 0, group.sequence, group.id)
            del self.ready_order[bisect.bisect_left(self.ready_order, entry)]
        elif group.state == State.LEASED:
            if group.id in self.pending:
                del self.pending[group.id]
                del self.pending_order[bisect.bisect_left(self.pending_order, urgency(group))]
            if group.holder:
                let_go(self.held, group.holder, group.id)
                self.named.pop(group.id, None)
        elif group.state == State.TRAINED and len(group.uses) < group.max_uses:
            entry = (group.deadline or 0, group.sequence, group.id)
            del self.used_order[bisect.bisect_left(self.used_order, entry)]

    def _in(self, group: Group) -> None:
        self._index(group)
        self._touch(f"g{group.id}")

    def _take_in(self, group: Group, batch: Batch) -> None:
        """The group is in the batch; the batch's row and the committed version say so: its own row stays as it is."""
        self._out(group)
        if batch.step not in group.uses:
            group.uses.append(batch.step)
        group.step, group.claimed = group.uses[-1], max(group.claimed, batch.claimed)
        group.state = State.TRAINED if group.step <= self.meta.version else State.CLAIMED
        self._index(group)
        self.generation += 1

    def _index(self, group: Group) -> None:
        self.counts[group.state] += 1
        if group.state in COMPETING and group.deadline is not None:
            self.due[group.deadline] += 1
        if group.state == State.READY:
            bisect.insort(self.ready_order, (group.deadline or 0, group.sequence, group.id))
        elif group.state == State.LEASED:
            if group.holder:
                self.held.setdefault(group.holder, set()).add(group.id)
            else:
                self.pending[group.id] = None
                bisect.insort(self.pending_order, urgency(group))
        elif group.state == State.TRAINED and len(group.uses) < group.max_uses:
            bisect.insort(self.used_order, (group.deadline or 0, group.sequence, group.id))
        if group.state in (State.LEASED, State.UNSCORED):
            judges = self.judges_of(group)
            for index, sample in group.samples.items():
                if sample.reward is None:
                    for judge in open_judges(sample, judges):
                        self.scores_due.offer((group.id, index, judge))

    def _forget_samples(self, group: Group) -> None:
        """Drop what arrived of a group: its payloads are free, its reward leases void."""
        judges = self.judges_of(group) if self.scores_due else ()
        for index in group.samples if judges else ():
            for judge in judges:
                self.scores_due.release((group.id, index, judge))
        self._freed.extend(group.records)
        self._forget_underway(group)
        group.samples, group.records = {}, []

    def _forget_underway(self, group: Group, index: int | None = None) -> int:
        """Drop the checkpoint of a sample (None: of all of the group); how many tokens that were."""
        tokens = 0
        for number in list(group.underway) if index is None else [index]:
            found = group.underway.pop(number, None)
            if found is not None:
                self._freed.extend(found.pieces)
                tokens += found.length
        return tokens

    def _cancel(self, group: Group, why: str, now: float) -> None:
        """Whoever generates it is to stop."""
        if group.holder:
            self._tell_holder(group, now)
            self._event(now, "cancel", g=group.id, token=group.token, why=why)

    def _tell_holder(self, group: Group, now: float) -> None:
        self.cancelled.setdefault(group.holder, {})[group.id, group.token] = Cancelled(now)

    def take_cancelled(self, producer: str, *, again: bool = False) -> tuple[tuple[int, int], ...]:
        """Leases (group, token) that this producer is to stop; with `again` also those that it was told of before."""
        mine = self.cancelled.get(producer)
        if not mine:
            return ()
        told = tuple(key for key, entry in mine.items() if again or not entry.told)
        for key in told:
            mine[key].told = True
        return told

    def _end(self, group: Group, state: State, reason: str, now: float, detail: str = "", *, tell: bool = True) -> None:
        """A group leaves for DROPPED or DEAD; `tell` its holder."""
        if tell:
            self._cancel(group, reason, now)
        self._out(group)
        self._forget_samples(group)
        del self.groups[group.id]
        self._touch(f"g{group.id}")
        self._note_ended(Ended(group.id, state, reason, detail[:500], group.step))
        self._touch(f"x{group.id}")
        if state == State.DEAD:
            self._event(now, "dead", g=group.id, reason=reason, detail=detail[:500])
        else:
            self._event(now, "drop", g=group.id, reason=reason)

    def _note_ended(self, ended: Ended) -> None:
        self.ended[ended.id] = ended
        self.ended_counts[ended.state, ended.reason] += 1
        self.quarantined += ended.step > 0

    def _forget_ended(self, number: int) -> None:
        ended = self.ended.pop(number)
        self.ended_counts[ended.state, ended.reason] -= 1
        self.quarantined -= ended.step > 0
        self._touch(f"x{number}")

    def _retire(self, group: Group) -> None:
        self._out(group)
        self._forget_samples(group)
        del self.groups[group.id]
        self.retired.add(group.id)
        self._touch(f"g{group.id}")
        self._touch("retired")

    # ------------------------------------------------------------ judges

    def judges_of(self, group: Group) -> tuple[str, ...]:
        """Who is asked about its samples; nobody yet while its row has not arrived."""
        if not self.settings.judges:
            return (DEFAULT,)
        return () if group.source is None else self.judges_of_source(group.source)

    def judges_of_source(self, source: str) -> tuple[str, ...]:
        """Who is asked about rows of this data source."""
        if not self.settings.judges:
            return (DEFAULT,)
        found = self._judges.get(source)
        if found is None:
            if len(self._judges) >= KEPT_SOURCES:
                self._judges.clear()
            rules = [(rule.name, rule.data_sources) for rule in self.settings.judges]
            found = self._judges[source] = judges_for(source, rules)
        return found

    def judge_names(self) -> tuple[str, ...]:
        """Every judge of the run."""
        return tuple(rule.name for rule in self.settings.judges) or (DEFAULT,)

    def retries_of(self, judge: str) -> int:
        """How often a failure of this judge is tried again."""
        own = [rule.retries for rule in self.settings.judges if rule.name == judge]
        return own[0] if own else self.settings.reward_retries

    # ------------------------------------------------------------ counts

    @property
    def frontier(self) -> int:
        """The version that the next new claim starts from: after the committed step and every recorded batch."""
        return max(self.meta.version, self._newest_batch)

    @property
    def _newest_batch(self) -> int:
        """The last step whose batch is recorded: they are in the order of their steps (`check`)."""
        return next(reversed(self.batches), 0)

    @property
    def outstanding(self) -> int:
        """Groups that compete for a batch, and the newest batch that is not committed."""
        newest = self._newest_batch
        training = len(self.batches[newest].groups) if newest > self.meta.version else 0
        return sum(self.counts[state] for state in COMPETING) + training

    @property
    def unclaimed(self) -> int:
        """Places of the run's total that are in no batch yet."""
        return self.settings.total_groups - self.plan.capacity(0, self.frontier - 1)

    def ledger_counts(self) -> dict[str, int]:
        """The conservation law as numbers: `issued` is the sum of the others."""
        named = {state.name.lower(): self.counts[state] for state in State if state < State.RETIRED}
        reasons: Counter[str] = Counter()
        for (state, _), number in self.ended_counts.items():
            reasons[State(state).name.lower()] += number
        return {
            "issued": self.meta.cursor,
            **named,
            "retired": len(self.retired),
            "dropped": reasons["dropped"],
            "dead": reasons["dead"],
        }

    def reasons(self, state: State) -> dict[str, int]:
        """How many groups were dropped (or are dead) by reason."""
        return {reason: number for (kind, reason), number in self.ended_counts.items() if kind == state and number}

    def settle(self, now: float) -> None:
        """The conservation law, on every commit and checkpoint; at most once in `PROOF_S` all of `check`."""
        if not 0 <= now - self._proved < PROOF_S:
            self.check()
            self._proved = now
        else:
            self._add_up()

    def _add_up(self) -> None:
        counts = self.ledger_counts()
        if counts["issued"] != sum(counts.values()) - counts["issued"]:
            raise AsyncRLError("internal", f"the ledger does not add up: {counts}")

    def check(self) -> None:
        """The conservation law and every derived index against the rows. Raises `internal` where they disagree."""
        self._add_up()
        ids = [*self.groups, *self.ended]
        twice = len(set(ids)) != len(ids) or any(number in self.retired for number in ids)
        last = max(max(ids, default=-1), self.retired.ranges()[-1][1] - 1 if len(self.retired) else -1)
        if twice or last >= self.meta.cursor or len(ids) + len(self.retired) != self.meta.cursor:
            raise AsyncRLError("internal", "a prompt is in two states or in none")
        fresh = Book(self.settings)
        for group in self.groups.values():
            fresh._index(group)
        for name in ("counts", "due"):
            if +getattr(fresh, name) != +getattr(self, name):
                raise AsyncRLError("internal", f"{name}: {getattr(self, name)}, the rows say {getattr(fresh, name)}")
        if (fresh.ready_order, fresh.used_order) != (self.ready_order, self.used_order):
            raise AsyncRLError("internal", "the order of ready or used groups disagrees with the rows")
        if list(self.batches) != sorted(self.batches):
            raise AsyncRLError("internal", "the recorded batches are not in the order of their steps")
        if fresh.pending.keys() != self.pending.keys() or fresh.pending_order != self.pending_order:
            raise AsyncRLError("internal", "the pending groups disagree with the rows")
        if {key: ids for key, ids in fresh.held.items() if ids} != {key: ids for key, ids in self.held.items() if ids}:
            raise AsyncRLError("internal", "the lease holders disagree with the rows")
        if fresh.scores_due.keys() != self.scores_due.keys():
            raise AsyncRLError("internal", "the samples to score disagree with the rows")
        for batch in self.batches.values():
            if any(batch.step not in self.groups[number].uses for number in batch.groups):
                raise AsyncRLError("internal", f"the batch of step {batch.step} disagrees with its groups")
