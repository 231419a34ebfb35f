"""Checkpoints of samples under way, as the next lease of their group gets them: which may be continued.

Called through `buffers.groups.machine.Groups`; the layer above `judging`. A producer that dies leaves the beginnings
of its
samples here (`buffers.groups.pieces` takes them in). Guarantees:
1. a checkpoint is handed out only where the schedule (F) holds with the deadline that its oldest token gives the group
   (oldest version + bound): a continued sample is as good as one whose tokens were all made under this lease;
2. handed out, it lowers the deadline of the group there and then, so no token is older than its lease says;
3. one of weights that were not published, or that the learner has taken back, is not continued;
4. what is not handed out is discarded with its reason, in the history (`discard`) and in `discarded`; its sample
   starts anew. It keeps no group from being leased, and a group that holds nothing else counts for nothing while it
   waits.
It reads no bytes: `buffers.payloads.partial_samples` does.

Example, bound 2: the first 400 tokens of a sample are of version 5. The claim that starts from version 7 is the last
that may train it. A lease at version 7 therefore gets deadline 7 with the checkpoint, 9 without it; where the groups
due at 7 fill that batch already, the 400 tokens are discarded (`room`), and from version 8 on they are `stale`.
"""

from __future__ import annotations

from buffers.groups.judging import Judging
from buffers.groups.records import Group, Record, State, Underway
from buffers.groups.schedule import feasible


class HandingOut(Judging):
    """Judging plus the checkpoints of samples under way."""

    def _hand_out(self, group: Group, deadline: int, now: float) -> int:
        """The deadline of a group that is leased with what was begun of it; what may not be continued is discarded.

        The group is out of the indexes; `deadline` is the one without checkpoints.
        """
        lowest = deadline
        for index, found in sorted(group.underway.items()):
            due = found.oldest + group.bound
            why = self._not_continued(found, due, deadline)
            if why:
                self._discard(group, index, why, now)
            else:
                lowest = min(lowest, due)
        return lowest

    def _tell_continued(self, group: Group, now: float) -> None:
        tokens = {index: found.length for index, found in sorted(group.underway.items())}
        self._event(now, "continue", g=group.id, token=group.token, producer=group.holder, tokens=tokens)

    def _not_continued(self, found: Underway, due: int, deadline: int) -> str:
        for version, _ in found.runs:
            known = self.digests.get(version)
            if version > self.meta.newest + 1 or (known and found.digests.get(version, "") not in known):
                return "not_published"
        if due < self.frontier:
            return "stale"
        # (F) for a deadline holds for every later one too: each checkpoint can be judged by itself.
        if due < deadline and not feasible(self.due, v=self.frontier, batch=self.plan, extra=due):
            return "room"
        return ""

    def _discard(self, group: Group, index: int, why: str, now: float) -> None:
        tokens = self._forget_underway(group, index)
        self.discarded[why] += 1
        self._event(now, "discard", g=group.id, i=index, why=why, tokens=tokens)

    def lose_pieces(self, records: set[Record], *, now: float) -> None:
        """Their bytes are gone: the checkpoints that consist of them are, too."""
        for group in self.groups.values():
            for index, found in list(group.underway.items()):
                if records.intersection(found.pieces):
                    self._discard(group, index, "damaged", now)
                    self._touch(f"g{group.id}")

    def _abandon_underway(self, newest: int, now: float) -> None:
        """The learner went back: tokens of versions that it will make again are of other weights."""
        for group in self.groups.values():
            for index, found in list(group.underway.items()) if group.state == State.LEASED else ():
                if max(version for version, _ in found.runs) > newest:
                    self._discard(group, index, "abandoned", now)
                    self._touch(f"g{group.id}")
