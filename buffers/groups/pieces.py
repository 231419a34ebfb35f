"""Checkpoints of samples under way, as they arrive.

Called through `buffers.groups.machine.Groups`; the layer above `arriving`. A long sample comes in pieces while it is
generated,
so that its producer's death costs the tokens since the last piece. Guarantees:
1. pieces are taken from the holder of the group alone, in order and without a gap: a piece that was taken before, or
   that leaves one out, changes nothing, and the answer says where the next one starts (a store that went back asks for
   what it lost);
2. a new holder that begins a sample anew (start 0) replaces what was there; one that goes on from it extends it;
3. weights that were not published are refused as for finished samples, by version and digest;
4. a checkpoint goes with the arrival of its sample, the completion of its group and the group's end;
5. it changes no deadline: tokens that nobody else continues are in no gradient. `underway` judges what is handed out.
At most `MAX_PIECES` per sample are kept: the row of a group stays small.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.versions import joined_runs
from asyncrl.wire import Piece, Pieces, PiecesReply
from buffers.groups.arriving import COMPLETE, Arriving
from buffers.groups.records import Group, Record, State, Underway

MAX_PIECES = 512


class Checkpointing(Arriving):
    def pieces(
        self, head: Pieces, *, invalid: Callable[[], str], keep: Callable[[Piece], Record], now: float
    ) -> PiecesReply:
        """Take pieces of samples. `invalid` says why they may not be kept, `keep` stores the bytes of one."""
        self.saw("producer", head.producer, now)
        group = self.groups.get(head.group)
        if group is None:
            why = self._ended_reason(head.group)
        elif group.state != State.LEASED or not group.token or head.token != group.token:
            why = COMPLETE if head.token == group.token else "token: the lease was lost"
        else:
            why = invalid() or self._wrong_digest(head, now)
            why = f"not kept: {why}" if why else ""
        cancelled = self.take_cancelled(head.producer)
        if group is None or why:
            return PiecesReply({}, {item.index: why for item in head.samples}, cancelled)
        kept: dict[int, int] = {}
        refused: dict[int, str] = {}
        for item in head.samples:
            if item.index in group.samples:
                refused[item.index] = "not kept: the sample is there"
                continue
            kept[item.index], full = self._take_piece(group, head, item, keep)
            if full:
                refused[item.index] = f"not kept: {MAX_PIECES} pieces are the limit"
        return PiecesReply(kept, refused, cancelled)

    def _take_piece(self, group: Group, head: Pieces, item: Piece, keep: Callable[[Piece], Record]) -> tuple[int, bool]:
        """How many tokens are there of the sample now, and whether no more will be taken."""
        found = group.underway.get(item.index)
        anew = item.start == 0 and (found is None or found.token != head.token)
        if not anew and (found is None or item.start != found.length):
            return 0 if found is None else found.length, False
        if found is not None and not anew and len(found.pieces) >= MAX_PIECES:
            return found.length, True
        if anew:
            self._forget_underway(group, item.index)
            found = group.underway[item.index] = Underway(head.token, 0, (), {}, [])
        assert found is not None
        found.token, found.length, found.runs = (
            head.token,
            found.length + item.count,
            joined_runs(found.runs, item.runs),
        )
        for version, _ in item.runs:
            found.digests[version] = head.digests.get(version, "")
        found.pieces.append(keep(item))
        self._dirty[f"g{group.id}"] = None  # no `_touch`: nobody waits for this
        return found.length, False
