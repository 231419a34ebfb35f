"""What producers send: finished samples, and what becomes of them.

Called through `buffers.groups.machine.Groups`; the layer above `leasing`. Guarantees:
1. a sample made by an older version than the lease's lowers the deadline, a newer one does not raise it;
2. an answer under an old token is refused, the same answer twice is acknowledged and changes nothing;
3. samples of weights that were not published, or without the digest where it is known, are refused and their prompts
   issued again; the producer gets no lease under that version for `lease_timeout_s`, so that one wrong generator cannot
   use up the attempts of all prompts;
4. a group is complete with the first `group_size` samples that arrive; with `over_issue` more were asked for: those
   are refused, their generation is cancelled, and nothing downstream sees them;
5. a group with all rewards goes through the filters before it is READY.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from asyncrl.config.judges import row_data_source
from asyncrl.errors import AsyncRLError
from asyncrl.versions import oldest_version
from asyncrl.wire import Pieces, Samples, SamplesReply
from buffers.groups.changes import SampleEvent
from buffers.groups.judging import TOO_MANY_PARTS, Verdict
from buffers.groups.leasing import Leasing
from buffers.groups.records import Group, Record, Sample, State

COMPLETE = "cancelled: the group is complete"
#: Kinds of refusal where the weights of the generator are at fault -> why its lease is lost, for the history.
NOT_PUBLISHED = {"version": "unknown_version", "digest": "wrong_digest"}


class Arriving(Leasing):
    def samples(
        self, head: Samples, *, checksum: int, invalid: Callable[[], str], keep: Callable[[], Record], now: float
    ) -> SamplesReply:
        """Take finished samples. `invalid` says why they may not be trained on, `keep` stores their bytes."""
        self.saw("producer", head.producer, now)
        group = self.groups.get(head.group)
        if group is None:
            return SamplesReply((), (), {item.index: self._ended_reason(head.group) for item in head.samples})
        accepted, duplicate, refused = self._sort_samples(group, head, checksum)
        if not accepted:
            return SamplesReply((), tuple(duplicate), refused, self.take_cancelled(head.producer))
        reason = invalid() or self._wrong_digest(head, now) or self._wrong_rewards(head)
        kind = reason.split(":", maxsplit=1)[0]
        if kind in NOT_PUBLISHED and group.attempt < self.settings.max_reissue:
            # Weights that nobody here has heard of: a wrong producer, or a store or a learner that went back while
            # generators did not yet. The prompt is not at fault, so it is tried again before it is called poison.
            self._lose(group, NOT_PUBLISHED[kind], now)
            refused |= dict.fromkeys(accepted, f"not published: {reason}")
            return SamplesReply((), tuple(duplicate), refused, self.take_cancelled(head.producer))
        if reason:
            self._poisoned(group, reason, now)
            refused |= dict.fromkeys(accepted, f"poison: {reason}")
            return SamplesReply((), tuple(duplicate), refused, self.take_cancelled(head.producer))
        self._accept(group, head, set(accepted), keep(), now)
        return SamplesReply(tuple(accepted), tuple(duplicate), refused, self.take_cancelled(head.producer))

    def _ended_reason(self, number: int) -> str:
        if number in self.ended:
            return f"gone: {State(self.ended[number].state).name.lower()} ({self.ended[number].reason})"
        return "gone: retired" if number in self.retired else "unknown group"

    def _sort_samples(self, group: Group, head: Samples, checksum: int) -> tuple[list[int], list[int], dict[int, str]]:
        """Which samples are new, which are there already, which are refused and why."""
        current = group.state == State.LEASED and head.token == group.token != 0
        room = self.settings.group_size - len(group.samples)
        if current and not group.samples and len(head.samples) <= room:  # the usual case: everything is new
            return [item.index for item in head.samples], [], {}
        accepted: list[int] = []
        duplicate: list[int] = []
        refused: dict[int, str] = {}
        for item in head.samples:
            known = group.samples.get(item.index)
            if known is not None and known.token == head.token and group.records[known.record].checksum == checksum:
                duplicate.append(item.index)
            elif known is not None:
                refused[item.index] = "already there with other content"
            elif head.token == group.token and group.state != State.LEASED:
                refused[item.index] = COMPLETE  # one of those that were asked for beyond the group's size
            elif not current:
                refused[item.index] = "token: the lease was lost"
            elif len(accepted) == room:
                refused[item.index] = COMPLETE
            else:
                accepted.append(item.index)
        return accepted, duplicate, refused

    def _wrong_digest(self, head: Samples | Pieces, now: float) -> str:
        """Why these are no samples of published weights; where a digest is known for a version, none is a wrong one.

        Versions without a known digest pass: those of the modes without weights, and those not told of yet.
        """
        for version in {*head.digests, *(version for item in head.samples for version, _ in item.runs)}:
            known, digest = self.digests.get(version), head.digests.get(version, "")
            if known and digest not in known:
                self.barred[head.producer] = (version, now + self.settings.lease_timeout_s)
                held = f"holds {digest} as version {version}" if digest else f"names none for version {version}"
                return f"digest: {head.producer} {held}, published was {known[-1]}"
        return ""

    def _wrong_rewards(self, head: Samples) -> str:
        if all(map(math.isfinite, head.rewards.values())):
            parts = [
                (index, name)
                for index, named in head.parts.items()
                for name, part in named.items()
                if not math.isfinite(part)
            ]
            if parts:
                return f"reward: part {parts[0][1]} of sample {parts[0][0]} is not finite"
            return "" if all(map(self.parts_known, head.parts.values())) else f"reward: {TOO_MANY_PARTS}"
        bad = [index for index, reward in head.rewards.items() if not math.isfinite(reward)]
        return f"reward: of sample {bad[0]} is not finite"

    def _accept(self, group: Group, head: Samples, accepted: set[int], record: Record, now: float) -> None:
        self._out(group)
        number, at, rewards = len(group.records), self._stamp(now), head.rewards
        group.records.append(record)
        if self.settings.judges and head.row and group.source is None:
            group.source = row_data_source(head.row)
        oldest_of_all = math.inf
        mine, digests, token, producer, events = group.samples, {-1: ""}, head.token, head.producer, self._events
        for item in head.samples:
            index, runs = item.index, item.runs
            if index not in accepted:
                continue
            if len(runs) == 1:  # one version for all tokens
                oldest = newest = runs[0][0]
                if oldest not in digests or len(digests) > 1:  # nearly all samples of a message share them
                    digests = {oldest: head.digests.get(oldest, "")}
            else:
                oldest, newest = oldest_version(runs) or 0, max((version for version, _ in runs), default=0)
                digests = {version: head.digests.get(version, "") for version, _ in runs}
            oldest_of_all = min(oldest_of_all, oldest)
            reward = rewards.get(index)
            parts = head.parts.get(index, {}) if head.parts and reward is not None else {}
            mine[index] = Sample(token, item.length, oldest, number, item.finish, reward, parts, newest=newest)
            if group.underway:
                self._forget_underway(group, index)
            events.append(SampleEvent(at, group.id, index, token, producer, item.length, runs, digests, reward, parts))
        group.deadline = min(group.deadline or 0, int(oldest_of_all) + group.bound)
        verdict = self._complete(group, now) if len(group.samples) == self.settings.group_size else None
        self._in(group)
        if verdict is not None:
            self._end_by(group, verdict, now)

    def _complete(self, group: Group, now: float) -> Verdict | None:
        """All samples are in (the group is out of the indexes)."""
        if self.settings.over_issue:
            self._cancel(group, "complete", now)
        self._forget_underway(group)
        if self.settings.judges and group.source is None:
            group.source = ""  # nobody sent a row
        group.state, group.holder, group.unscored = State.UNSCORED, "", now + self.wall_offset
        self._event(now, "unscored", g=group.id)
        return self._ready_if_scored(group, now)

    def _ready_if_scored(self, group: Group, now: float) -> Verdict | None:
        """READY, where all rewards are in and no filter objects (the group is out of the indexes); else its end."""
        if group.state != State.UNSCORED or any(sample.reward is None for sample in group.samples.values()):
            return None
        verdict = self._verdict(group)
        if verdict is not None:
            return verdict
        self.meta.sequence += 1
        self._touch("meta")
        group.state, group.sequence, group.ready = State.READY, self.meta.sequence, now + self.wall_offset
        self._event(now, "ready", g=group.id)
        return None

    def lose_payloads(self, numbers: Sequence[int], *, now: float) -> None:
        """Their bytes are gone (power loss, damaged disk): generate them again; claimed ones are dead.

        What is in the weights of the registered learner stays TRAINED: nobody needs its bytes unless that learner is
        lost too, and then its batch is claimed again.
        """
        for number in numbers:
            group = self.groups[number]
            if group.state == State.TRAINED:
                continue
            if group.state == State.CLAIMED:
                self._end_claimed(group, State.DEAD, "payload_lost", now)
            elif group.attempt >= self.settings.max_reissue:
                self._end(group, State.DEAD, "max_reissue", now, "payload lost")
            else:
                self._restart_group(group, "payload_lost", now)

    def _leave_batches(self, group: Group) -> None:
        """Take the group out of every recorded batch that is not committed."""
        for step in [step for step in group.uses if step > self.meta.version]:
            batch = self.batches.get(step)
            if batch is None:
                raise AsyncRLError("internal", f"group {group.id} is in no batch")
            batch.groups.remove(group.id)
            self._touch(f"b{step}")

    def _end_claimed(self, group: Group, state: State, reason: str, now: float, detail: str = "") -> None:
        """A claimed group cannot be trained. One that an earlier step has trained stays TRAINED, for the last time."""
        self._leave_batches(group)
        trained = [step for step in group.uses if step <= self.meta.version]
        if not trained:
            self._end(group, state, reason, now, detail)
            return
        self._out(group)
        group.uses, group.step, group.max_uses, group.state = trained, trained[-1], len(trained), State.TRAINED
        self._in(group)
        self._event(now, "drop", g=group.id, reason=reason)
