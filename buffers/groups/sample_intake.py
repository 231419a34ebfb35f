"""Finished samples as producers send them: which are accepted, duplicates, or refused, and what follows.

The rules are the same for training groups and held-out prompts. Guarantees:
1. an answer under an old token is refused; the same answer twice is acknowledged and changes nothing;
2. samples of weights that were not published, or without the digest where it is known, are refused and their prompt is
   issued again. The producer gets no lease under that version for `lease_timeout_s`, so one wrong generator cannot use
   up the attempts of all prompts;
3. a sample made by an older version than the lease's lowers the deadline of its group, a newer one does not raise it;
4. a group is complete with the first `group_size` samples that arrive. With `over_issue` more were asked for: those are
   refused, their generation is cancelled, and nothing downstream sees them;
5. a group with all rewards passes the filters before it is READY;
6. samples of a guest that may not be trained cost its prompt an attempt, as its own loss would. Samples of the owner
   poison the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.config.judges import row_data_source
from asyncrl.versions import oldest_version
from asyncrl.wire import Piece, Pieces, PiecesReply, SampleHead, Samples, SamplesReply
from buffers.groups.failure_budget import TOO_MANY_PARTS, FailureBudget, Verdict
from buffers.groups.group_table import GroupTable, end_kind
from buffers.groups.leases import Leases
from buffers.groups.live_settings import LiveSettings
from buffers.groups.partial_samples import PartialSamples
from buffers.groups.records import READY, UNSCORED, Group, Record, Sample
from buffers.groups.transaction import SampleEvent, Transaction
from buffers.groups.workers import Workers

COMPLETE = "cancelled: the group is complete"
LOST_LEASE = "token: the lease was lost"
#: Kinds of refusal that the weights of the generator cause -> why its lease is lost, for the history.
NOT_PUBLISHED = {"version": "unknown_version", "digest": "wrong_digest"}
#: Kind of refusal of samples that are fine but of a version that is not measured: no fault of prompt or producer.
OTHER_VERSION = "other_version"


class IntakeTarget(Protocol):
    """Where accepted samples go. `one_digest`: of a version that was trained again only the last weights are wanted."""

    one_digest: bool

    @property
    def size(self) -> int:
        """Samples of a complete item."""

    def get(self, number: int) -> Any:
        """The item, or None if it takes no samples any more."""

    def gone_reason(self, number: int) -> str:
        """Why the item takes no samples."""

    def wrong_version(self, head: Samples) -> str:
        """Why samples of these versions are not wanted; empty if they are."""

    def store(self, item: Any, head: Samples, accepted: set[int], record: Record) -> None:
        """Take the accepted samples of a message; `record` says where their bytes lie."""

    def poison(self, item: Any, reason: str) -> None:
        """The samples of the item may not be used."""

    def count_poison(self, reason: str) -> None:
        """Samples could not be used, and their item is tried again."""


class SampleIntake:
    """Decides on messages of samples for one kind of items."""

    def __init__(
        self,
        tx: Transaction,
        table: GroupTable,
        *,
        workers: Workers,
        live: LiveSettings,
        budget: FailureBudget,
        leases: Leases,
        target: IntakeTarget,
    ) -> None:
        self.tx = tx
        self.table = table
        self.workers = workers
        self.live = live
        self.budget = budget
        self.leases = leases
        self.target = target

    def take(
        self,
        head: Samples,
        *,
        checksum: int,
        invalid: Callable[[], str],
        keep: Callable[[], Record],
        guest: bool = False,
    ) -> SamplesReply:
        """Take finished samples. `invalid` says why they may not be used, `keep` stores their bytes. `guest`: they
        came with a key that does not lead the run.
        """
        self.workers.see("producer", head.producer, self.tx.now)
        item = self.target.get(head.group)
        if item is None:
            reason = self.target.gone_reason(head.group)
            return self._reply(head, [], [], {sample.index: reason for sample in head.samples})
        accepted, duplicate, refused = self.sort(item, head, checksum)
        if accepted:
            reason = (
                invalid() or self.target.wrong_version(head) or self.wrong_digest(head) or self._wrong_rewards(head)
            )
            if reason:
                refused |= dict.fromkeys(accepted, self._refuse(item, reason, guest=guest))
                accepted = []
            else:
                self.target.store(item, head, set(accepted), keep())
        return self._reply(head, accepted, duplicate, refused)

    def _reply(self, head: Samples, accepted: list[int], duplicate: list[int], refused: dict[int, str]) -> SamplesReply:
        cancelled = self.workers.take_cancelled(head.producer)
        return SamplesReply(tuple(accepted), tuple(duplicate), refused, cancelled)

    def sort(self, item: Any, head: Samples, checksum: int) -> tuple[list[int], list[int], dict[int, str]]:
        """Which samples are new, which are duplicates, which are refused and why."""
        current = bool(item.holder) and head.token == item.token and head.producer == item.holder
        room = self.target.size - len(item.samples)
        if current and not item.samples and len(head.samples) <= room:  # the usual case: all samples are new
            return [sample.index for sample in head.samples], [], {}
        accepted: list[int] = []
        duplicate: list[int] = []
        refused: dict[int, str] = {}
        for sample in head.samples:
            known = item.samples.get(sample.index)
            if known is not None:
                # A held-out prompt that is scored keeps its samples, but no records.
                same = not item.records or item.records[known.record].checksum == checksum
                if known.token == head.token and same:
                    duplicate.append(sample.index)
                else:
                    refused[sample.index] = "already there with other content"
            elif not current:
                was_complete = head.token == item.token != 0 and not item.holder
                refused[sample.index] = COMPLETE if was_complete else LOST_LEASE  # COMPLETE: asked for beyond the size
            elif len(accepted) == room:
                refused[sample.index] = COMPLETE
            else:
                accepted.append(sample.index)
        return accepted, duplicate, refused

    def _refuse(self, item: Any, reason: str, *, guest: bool) -> str:
        """The samples may not be used: the text of the refusal."""
        kind = reason.split(":", maxsplit=1)[0]
        if kind == OTHER_VERSION:
            self.leases.lose(item, kind, counts=False)
            return f"lease: {reason}"
        again = item.attempt < self.live.current.max_reissue
        if kind in NOT_PUBLISHED and again:
            # The service has not heard of these weights: a wrong producer, or a store or a learner that went back while
            # generators have not yet. The prompt is not at fault, so it is tried again before it counts as poisoned.
            self.leases.lose(item, NOT_PUBLISHED[kind])
            return f"not published: {reason}"
        if guest and again:
            self.target.count_poison(reason)
            self.leases.lose(item, f"poison:{kind}")
        else:
            self.target.poison(item, reason)
        return f"poison: {reason}"

    def wrong_digest(self, head: Samples | Pieces) -> str:
        """Why these are not samples of published weights; empty if they are.

        A version without a known digest passes: modes without weights have none, and a commit may still arrive.
        """
        for version in {version for sample in head.samples for version, _ in sample.runs}.union(head.digests):
            known, digest = self.table.digests.get(version, ()), head.digests.get(version, "")
            if self.target.one_digest:
                known = known[-1:]
            if (known and digest not in known) or digest in self.table.meta.abandoned:
                self.workers.bar(head.producer, version, self.tx.now + self.live.current.lease_timeout_s)
                held = f"holds {digest} as version {version}" if digest else f"names none for version {version}"
                right = f"published was {known[-1]}" if known else "the learner went back from it"
                return f"digest: {head.producer} {held}, {right}"
        return ""

    def _wrong_rewards(self, head: Samples) -> str:
        if not all(map(math.isfinite, head.rewards.values())):
            bad = next(index for index, reward in head.rewards.items() if not math.isfinite(reward))
            return f"reward: of sample {bad} is not finite"
        for index, parts in head.parts.items():
            for name, value in parts.items():
                if not math.isfinite(value):
                    return f"reward: part {name} of sample {index} is not finite"
        return "" if all(map(self.budget.accept_parts, head.parts.values())) else f"reward: {TOO_MANY_PARTS}"

    def pieces(
        self, head: Pieces, *, invalid: Callable[[], str], keep: Callable[[Piece], Record], partial: PartialSamples
    ) -> PiecesReply:
        """Take pieces of samples. `invalid` says why they may not be kept, `keep` stores the bytes of one."""
        self.workers.see("producer", head.producer, self.tx.now)
        group: Group | None = self.target.get(head.group)
        if group is None:
            why = self.target.gone_reason(head.group)
        elif not group.holder or head.token != group.token:
            why = COMPLETE if head.token == group.token else LOST_LEASE
        elif head.producer != group.holder:  # a guess of its token
            why = LOST_LEASE
        else:
            why = invalid() or self.wrong_digest(head)
            why = f"not kept: {why}" if why else ""
        cancelled = self.workers.take_cancelled(head.producer)
        if group is None or why:
            return PiecesReply({}, {item.index: why for item in head.samples}, cancelled)
        reply = partial.take(group, head, keep)
        return PiecesReply(reply.kept, reply.refused, cancelled)


class GroupSamples:
    """Samples of training groups: storing them, and the way of a complete group to READY."""

    one_digest = False

    def __init__(
        self,
        tx: Transaction,
        table: GroupTable,
        live: LiveSettings,
        budget: FailureBudget,
    ) -> None:
        self.tx = tx
        self.table = table
        self.live = live
        self.budget = budget

    @property
    def size(self) -> int:
        """Samples of a complete group."""
        return self.live.current.group_size

    def get(self, number: int) -> Group | None:
        return self.table.groups.get(number)

    def gone_reason(self, number: int) -> str:
        """Why there is no group of this number."""
        ended = self.table.ended.get(number)
        kind = end_kind(ended) if ended is not None else self.table.archive.kind(number)
        state, _, reason = kind.partition(":")
        if reason:
            return f"gone: {state} ({reason})"
        gone = number in self.table.retired or number in self.table.archive
        return "gone: retired" if gone else "unknown group"

    def wrong_version(self, head: Samples) -> str:
        return ""  # the deadline of the group follows from the versions

    def poison(self, group: Group, reason: str) -> None:
        self.budget.poison(group, reason)

    def count_poison(self, reason: str) -> None:
        self.budget.count_poison(reason)

    def store(self, group: Group, head: Samples, accepted: set[int], record: Record) -> None:
        verdict: Verdict | None = None
        with self.table.edit(group):
            group.records.append(record)
            if self.live.current.judges and head.row and group.source is None:
                group.source = row_data_source(head.row)
            oldest = self._add_samples(group, head, accepted)
            group.deadline = min(group.deadline or 0, oldest + group.bound)
            if len(group.samples) == self.size:
                verdict = self.complete(group)
        if verdict is not None:
            self.budget.reject(group, verdict)

    def _add_samples(self, group: Group, head: Samples, accepted: set[int]) -> int:
        """Add the accepted samples of a message to the group; the oldest version of their tokens."""
        timestamp, record, number = self.tx.timestamp, len(group.records) - 1, group.id
        token, producer, rewards, samples = head.token, head.producer, head.rewards, group.samples
        oldest_of_all = math.inf
        shared, digests = -1, {}  # nearly all samples of a message have one version
        events = []
        for item in head.samples:
            index, length, runs = item.index, item.length, item.runs
            if index not in accepted:
                continue
            if len(runs) == 1:
                oldest = newest = runs[0][0]
                if oldest != shared:
                    shared, digests = oldest, {oldest: head.digests.get(oldest, "")}
            else:
                oldest, newest = version_range(item)
                shared, digests = -1, {version: head.digests.get(version, "") for version, _ in runs}
            oldest_of_all = min(oldest_of_all, oldest)
            reward = rewards.get(index)
            parts = head.parts.get(index, {}) if head.parts and reward is not None else {}
            samples[index] = Sample(token, length, oldest, record, item.finish, reward, parts, newest=newest)
            events.append(SampleEvent(timestamp, number, index, token, producer, length, runs, digests, reward, parts))
        for index in accepted if group.partial else ():
            self.table.drop_partial(group, index)
        self.tx.sample_events(events)
        return int(oldest_of_all)

    def complete(self, group: Group) -> Verdict | None:
        """All samples of the group, which is being edited, are in."""
        if self.live.current.over_issue:
            self.table.cancel(group, "complete")
        self.table.drop_partial(group)
        if self.live.current.judges and group.source is None:
            group.source = ""  # no row was sent
        group.state, group.holder, group.unscored = UNSCORED, "", self.tx.wall_time
        self.tx.event("unscored", g=group.id)
        return self.become_ready(group)

    def become_ready(self, group: Group) -> Verdict | None:
        """Make a group that is being edited READY if all rewards are in; its end if a filter rejects it."""
        if group.state != UNSCORED or None in [sample.reward for sample in group.samples.values()]:
            return None
        self.table.prompts.note_rewards(group)
        verdict = self.budget.filter(group)
        if verdict is not None:
            return verdict
        meta = self.table.meta
        meta.sequence += 1
        self.table.put("meta")
        group.state, group.sequence, group.ready = READY, meta.sequence, self.tx.wall_time
        self.tx.event("ready", g=group.id)
        return None


def version_range(item: SampleHead) -> tuple[int, int]:
    """The smallest and the largest version of a sample's tokens; (0, 0) without tokens."""
    if len(item.runs) == 1:
        ((version, _),) = item.runs
        return version, version
    return oldest_version(item.runs) or 0, max((version for version, _ in item.runs), default=0)
