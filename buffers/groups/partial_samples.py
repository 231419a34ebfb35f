"""Partial samples: the first tokens of samples that producers are still generating, sent so that others can continue.

A producer that dies loses only the tokens since the last piece it sent. Guarantees:
1. pieces are taken from the holder of the group alone, in order and without a gap. A piece that was taken before, or
   that leaves tokens out, changes nothing; the answer says where the next one starts;
2. a new holder that begins a sample anew (start 0) replaces the partial sample (`replaced`); one that continues it
   extends it. Where an environment failed, the partial samples of its group are discarded (`failed`);
3. pieces of weights that were not published are refused as finished samples are, by version and digest;
4. a partial sample is handed out only if (F) holds with the deadline that its oldest token gives the group (oldest
   version + bound). It lowers the deadline of the group at once, so no token is older than its lease says;
5. a partial sample of weights that were not published, or that the learner has taken back, is not continued. Each one
   that is not continued is discarded with a reason, in the history (`discard`) and in `discarded`;
6. a partial sample ends when its sample arrives, its group is complete, or its group ends.

Example, bound 2: the first 400 tokens of a sample are of version 5. The claim that starts from version 7 is the last
that may train it. A lease at version 7 gets deadline 7 with the partial sample, 9 without it. If the groups due at 7
fill that batch already, the 400 tokens are discarded (`room`); from version 8 on they are `stale`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from asyncrl.versions import joined_runs
from asyncrl.wire import Piece, Pieces, PiecesReply
from buffers.groups.group_table import GroupTable
from buffers.groups.records import Group, PartialSample, Record, State
from buffers.groups.schedule import Schedule
from buffers.groups.transaction import Transaction

MAX_PIECES = 512  # of one sample, so that the row of its group stays small


class PartialSamples:
    """Takes pieces of samples, and decides which partial samples the next lease of their group continues."""

    def __init__(self, tx: Transaction, table: GroupTable, schedule: Schedule) -> None:
        self.tx = tx
        self.table = table
        self.schedule = schedule
        self.discarded: Counter[str] = Counter()  # by reason, since the service started

    # ------------------------------------------------------------ pieces that arrive

    def take(self, group: Group, head: Pieces, keep: Callable[[Piece], Record]) -> PiecesReply:
        """Take pieces from the holder of the group. `keep` stores the bytes of one."""
        lengths: dict[int, int] = {}
        refused: dict[int, str] = {}
        for item in head.samples:
            if item.index in group.samples:
                refused[item.index] = "not kept: the sample is there"
                continue
            lengths[item.index], full = self._take_piece(group, head, item, keep)
            if full:
                refused[item.index] = f"not kept: {MAX_PIECES} pieces are the limit"
        return PiecesReply(lengths, refused)

    def _take_piece(self, group: Group, head: Pieces, item: Piece, keep: Callable[[Piece], Record]) -> tuple[int, bool]:
        """The number of tokens of the sample after the piece, and whether no more pieces are taken."""
        found = group.partial.get(item.index)
        anew = item.start == 0 and (found is None or found.token != head.token)
        if not anew and (found is None or item.start != found.length):
            return 0 if found is None else found.length, False
        if found is not None and not anew and len(found.pieces) >= MAX_PIECES:
            return found.length, True
        record = keep(item)
        if anew:
            if found is not None:
                self._discard(group, item.index, "replaced")
            found = group.partial[item.index] = PartialSample(head.token, 0, (), {}, [])
        assert found is not None
        found.token, found.length = head.token, found.length + item.count
        found.runs = joined_runs(found.runs, item.runs)
        for version, _ in item.runs:
            found.digests[version] = head.digests.get(version, "")
        found.pieces.append(record)
        self.tx.put_quietly(f"g{group.id}", self.table)
        return found.length, False

    # ------------------------------------------------------------ handing out

    def hand_out(self, group: Group, deadline: int) -> int:
        """The deadline of a group that is being leased with its partial samples; those that may not be continued are
        discarded. `deadline` is the one without them."""
        lowest = deadline
        for index, found in sorted(group.partial.items()):
            due = found.oldest + group.bound
            why = self.refusal(found, due, deadline)
            if why:
                self._discard(group, index, why)
            else:
                lowest = min(lowest, due)
        return lowest

    def record_continued(self, group: Group) -> None:
        """Write to the history which partial samples a lease continues."""
        tokens = {index: found.length for index, found in sorted(group.partial.items())}
        self.tx.event("continue", g=group.id, token=group.token, producer=group.holder, tokens=tokens)

    def refusal(self, found: PartialSample, due: int, deadline: int) -> str:
        """Why a partial sample may not be continued; empty if it may be."""
        for version, _ in found.runs:
            known, digest, meta = self.table.digests.get(version), found.digests.get(version, ""), self.table.meta
            if version > meta.newest + 1 or (known and digest not in known) or digest in meta.abandoned:
                return "not_published"
        return self.schedule.may_continue(due, deadline)

    def _discard(self, group: Group, index: int, why: str) -> None:
        tokens = self.table.drop_partial(group, index)
        self.discarded[why] += 1
        self.tx.event("discard", g=group.id, i=index, why=why, tokens=tokens)

    def discard_failed(self, leases: Sequence[tuple[int, int]], holder: str) -> None:
        """The environments of these leases (group, token) failed: another attempt must not repeat what led there."""
        for number, token in leases:
            group = self.table.groups.get(number)
            if group is not None and token and group.token == token and group.holder == holder:
                for index in sorted(group.partial):
                    self._discard(group, index, "failed")

    def discard_damaged(self, records: set[Record]) -> None:
        """The bytes of these pieces are gone."""
        for group in self.table.groups.values():
            for index, found in list(group.partial.items()):
                if records.intersection(found.pieces):
                    self._discard(group, index, "damaged")
                    self.table.put(f"g{group.id}")

    def discard_abandoned(self, newest: int) -> None:
        """The learner went back: tokens of versions above `newest` are of weights that no longer exist."""
        for group in self.table.groups.values():
            for index, found in list(group.partial.items()) if group.state == State.LEASED else ():
                if max(version for version, _ in found.runs) > newest:
                    self._discard(group, index, "abandoned")
                    self.table.put(f"g{group.id}")
