"""Wrong rules, each a small change of the real code: the search must find every one of them, or it proves nothing.

`NAIVE` is the rule of the counter-example of docs/staleness.md; the others break one
decision each. A mutant names the case in which the search finds it.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

from model_world import Case

from asyncrl.wire import Lease, Pieces, PiecesReply, RewardFailure, Samples, SamplesReply, Score, Scores
from buffers.groups.book import Worker
from buffers.groups.fairness import missing
from buffers.groups.judgements import said_by
from buffers.groups.machine import Groups
from buffers.groups.records import Group, State, Underway
from buffers.groups.schedule import capacity
from buffers.groups.scoring import Found
from buffers.groups.training import Claimed


class Naive(Groups):
    """Cap the outstanding groups, with the batch in training, at (eta + 1) * B; take what arrived first."""

    def _fits(self, engine_version: int, bound: int) -> bool:
        return self.outstanding < (self.settings.max_staleness + 1) * self.settings.batch_groups

    def _deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        return True

    def _may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        return True

    def _choose(self, step: int, now: float) -> list[int] | None:
        size = self.batch_size(step)
        arrived = sorted(self.ready_order, key=lambda entry: entry[1])
        return [number for _, _, number in arrived[:size]] if len(arrived) >= size > 0 else None


class NaiveButFresh(Naive):
    """The same, and an engine gets work only while it holds the newest weights."""

    def _next_for(self, engine_version: int) -> Group | None:
        return super()._next_for(engine_version) if engine_version >= self.meta.version else None


class RequiredIgnored(Groups):
    """The claim does not ask for r(u)."""

    def _settle_late(self, step: int, size: int, now: float) -> bool:
        return True


class RequiredLooksAtNowOnly(Groups):
    """The claim asks for r(v), what is due right now, and not for r(u) of later versions."""

    def _shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        due = self.due
        self.due = Counter({deadline: count for deadline, count in due.items() if deadline <= v})
        found = super()._shortage(v, size)
        self.due = due
        return found


class RequiredOneLess(Groups):
    """r(u) is one too small."""

    def _shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        found = super()._shortage(v, size)
        return None if found is None or found[1] <= 1 else found


class FeasibleOffByOne(Groups):
    """(F) allows one group more than there are places."""

    def _fits(self, engine_version: int, bound: int) -> bool:
        deadline, v = engine_version + bound, self.frontier
        due = Counter(self.due)
        due[deadline] += 1
        return deadline >= v and all(
            sum(count for at, count in due.items() if at <= u) <= capacity(self.plan, v, max(u, v)) + 1 for u in due
        )


class FeasibleIgnored(Groups):
    """(F) is not looked at. (D) implies it for new prompts under one bound: it shows only where bounds differ."""

    def _fits(self, engine_version: int, bound: int) -> bool:
        return engine_version + bound >= self.frontier


class FeasibleNotWhenResumed(Groups):
    """A lost group that holds samples is leased again, by an older engine, without a look at (F)."""

    def _may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        return group.deadline is not None or super()._may_resume(group, engine_version, lag)


class DeadlineRisesWhenResumed(Groups):
    """A group with samples that is leased again gets the deadline of the new engine."""

    def _grant(self, group: Group, worker: Worker, engine_version: int, request: int, now: float) -> Lease:
        if group.id < self.meta.cursor and group.deadline is not None:
            self._out(group)
            group.deadline = engine_version + group.bound
            self._in(group)
        return super()._grant(group, worker, engine_version, request, now)


class OlderTokensIgnored(Groups):
    """Tokens that are older than the lease do not lower the deadline."""

    def _accept(self, group: Group, *args: Any) -> None:
        number, deadline = group.id, group.deadline
        super()._accept(group, *args)
        found = self.groups.get(number)
        if found is not None:
            self._out(found)
            found.deadline = deadline
            self._in(found)


class BoundOfTheMoment(Groups):
    """A group takes the bound that is in force when it is leased again, or when its samples arrive."""

    def _grant(self, group: Group, worker: Worker, engine_version: int, request: int, now: float) -> Lease:
        group.bound = self.settings.max_staleness
        return super()._grant(group, worker, engine_version, request, now)


class DeadlineOfTheMoment(Groups):
    """The bound stays, but the deadline of a group that is leased again is reckoned with the one in force."""

    def _grant(self, group: Group, worker: Worker, engine_version: int, request: int, now: float) -> Lease:
        bound = group.bound
        group.bound = self.settings.max_staleness
        lease = super()._grant(group, worker, engine_version, request, now)
        group.bound = bound
        return lease


class DepthOffByOne(Groups):
    """(D) allows one group more."""

    def _deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        return super()._deep_enough(outstanding - 1, producer_lag)


class DepthWithoutTheLag(Groups):
    """(D) does not take off the versions that the engine is behind."""

    def _deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        return super()._deep_enough(outstanding, 0)


class DepthWithoutTheBatchInTraining(Groups):
    """`outstanding` of (D) leaves out the batch that is being trained."""

    @property
    def outstanding(self) -> int:
        return self._competing


class ClaimNotIdempotent(Groups):
    """The same step claimed again gets a new batch, where another one would do."""

    def claim(self, *, epoch: int, step: int, version: int, now: float) -> Claimed | None:
        batch = self.batches.get(step)
        if batch is not None and len(self.ready_order) >= len(batch.groups) and step == self.meta.version + 1:
            for number in batch.groups:
                self._out(self.groups[number])
                self.groups[number].state, self.groups[number].uses = State.READY, []
                self._in(self.groups[number])
            del self.batches[step]
            self.ready_order.sort(key=lambda entry: (entry[0], -entry[1]))
            chosen = [number for _, _, number in self.ready_order[: len(batch.groups)]]
            self.ready_order.sort()
            return self._record(step, chosen, now)
        return super().claim(epoch=epoch, step=step, version=version, now=now)


class BatchNotRecorded(Groups):
    """The batch is handed out before its row is written."""

    def _record(self, step: int, chosen: list[int], now: float) -> Claimed:
        claimed = super()._record(step, chosen, now)
        self._dirty.pop(f"b{step}", None)
        return claimed


class LostLeaseKeepsItsToken(Groups):
    """Who lost a lease may still answer."""

    def _lose(self, group: Group, why: str, now: float, *, counts: bool = True) -> None:
        token, number = group.token, group.id
        super()._lose(group, why, now, counts=counts)
        if number in self.groups:
            self.groups[number].token = token


class LostLeaseLosesSamples(Groups):
    """What had arrived is given up with the lease."""

    def _lose(self, group: Group, why: str, now: float, *, counts: bool = True) -> None:
        group.samples, group.records = {}, []
        super()._lose(group, why, now, counts=counts)


class ReadyInOrderOfArrival(Groups):
    """The batch is filled first come first served, where (1) of the claim is met by number only."""

    def _choose(self, step: int, now: float) -> list[int] | None:
        chosen = super()._choose(step, now)
        if chosen is None:
            return None
        return [number for _, number in sorted((entry[1], entry[2]) for entry in self.ready_order)][: len(chosen)]


class AnyTokenWillDo(Groups):
    """Answers are taken under any token."""

    def samples(self, head: Samples, **more: Any) -> SamplesReply:
        group = self.groups.get(head.group)
        if group is not None and group.state == State.LEASED and group.token:
            head = Samples(head.producer, head.group, group.token, head.samples, {}, (), "", 1, rewards=head.rewards)
        return super().samples(head, **more)


class DroppedPlaceNotRefilled(Groups):
    """The place of a group that was dropped or died is not filled by another prompt."""

    @property
    def unclaimed(self) -> int:
        return super().unclaimed - len(self.ended)


class RestartForgetsBatches(Groups):
    """A new learner gets new batches instead of the recorded ones."""

    def _restore_batches(self, step: int, *rest: Any) -> None:
        for batch in self.batches.values():
            batch.groups.reverse()
        super()._restore_batches(step, *rest)


class ReusedBeyondItsDeadline(Groups):
    """A trained group may be trained again at any lag."""

    def _usable(self, v: int) -> list[tuple[int, int, int]]:
        return list(self.used_order)


class ReusedTooOften(Groups):
    """One use more than `max_reuse`."""

    def _next_for(self, engine_version: int) -> Group | None:
        group = super()._next_for(engine_version)
        if group is not None and group.id == self.meta.cursor:
            group.max_uses += 1
        return group


class ReuseIgnoresRequired(Groups):
    """Used groups fill the batch before those that cannot wait."""

    def _mixed(self, step: int, size: int, used: list[tuple[int, int, int]]) -> list[int]:
        return [number for _, _, number in [*used, *self.ready_order][:size]]

    def _settle_late(self, step: int, size: int, now: float) -> bool:
        return True


class CheckpointsOfAnyAge(Groups):
    """What was begun is handed out without a look at its age."""

    def _hand_out(self, group: Group, deadline: int, now: float) -> int:
        return deadline


class CheckpointsWithoutRoom(Groups):
    """It lowers the deadline, where a step may still train it, without a look at (F)."""

    def _not_continued(self, found: Underway, due: int, deadline: int) -> str:
        return "stale" if due < self.frontier else ""


class CheckpointsTooLate(Groups):
    """A deadline that has passed is no reason."""

    def _not_continued(self, found: Underway, due: int, deadline: int) -> str:
        why = super()._not_continued(found, due, deadline)
        return "" if why == "stale" else why


class CheckpointsOfTheLostLease(Groups):
    """Pieces are taken under any token."""

    def pieces(self, head: Pieces, **more: Any) -> PiecesReply:
        group = self.groups.get(head.group)
        if group is not None and group.state == State.LEASED and group.token:
            head = Pieces(head.producer, head.group, group.token, head.samples, head.digests, head.fields)
        return super().pieces(head, **more)


class CheckpointsStay(Groups):
    """The arrival of a sample leaves its checkpoint behind."""

    def _forget_underway(self, group: Group, index: int | None = None) -> int:
        return 0


class OneJudgeIsEnough(Groups):
    """A sample has its reward as soon as one of its judges has answered."""

    def _score(self, score: Score, message: Scores, now: float) -> str:
        why = super()._score(score, message, now)
        group = self.groups.get(score.group)
        if group is not None and not why and group.samples[score.index].reward is None:
            self._forget_scores(group)
            self._out(group)
            group.samples[score.index].reward, group.samples[score.index].judged = score.reward, {}
            self._ready_if_scored(group, now)
            self._in(group)
        return why

    def _forget_scores(self, group: Group) -> None:
        for index in group.samples:
            for judge in self.judge_names():
                self.scores_due.release((group.id, index, judge))


class LastJudgeWins(Groups):
    """The reward is that of the last answer, not the sum."""

    def _score(self, score: Score, message: Scores, now: float) -> str:
        why = super()._score(score, message, now)
        group = self.groups.get(score.group)
        if group is not None and group.samples[score.index].reward is not None:
            group.samples[score.index].reward = score.reward
        return why


class FailedJudgeGivesZero(Groups):
    """A judge whose tries are spent counts as a reward of 0."""

    def _failure(self, failure: RewardFailure, message: Scores, now: float) -> str:
        group = self.groups[failure.group]
        if said_by(group.samples[failure.index], message.judge).failures >= self.retries_of(message.judge):
            return self._score(Score(failure.group, failure.index, failure.token, 0.0), message, now)
        return super()._failure(failure, message, now)


class JudgesShareTheirTries(Groups):
    """Failures are counted by sample, not by judge."""

    def retries_of(self, judge: str) -> int:
        return min(rule.retries for rule in self.settings.judges)


class JudgesAnswerTwice(Groups):
    """A second answer of the same judge is taken, too."""

    def _sample_for(self, item: Score | RewardFailure, judge: str) -> Found | str:
        group = self.groups.get(item.group)
        if group is None or group.samples[item.index].reward is not None:
            return super()._sample_for(item, judge)
        return Found(group, group.samples[item.index], False)


class KeptFromThoseWithout(Groups):
    """What is kept for others is kept from producers that hold nothing, too."""

    def _fair_room(self, worker: Worker, most: int, engine_version: int, now: float) -> float:
        room = super()._fair_room(worker, most, engine_version, now)
        ready = self._ready_for(engine_version)
        lacks = missing(self._standing(now), ready=ready)
        return room if math.isinf(room) else ready - sum(lacks.values()) + lacks.get(worker.name, 0)


class Mutant(NamedTuple):
    """A wrong rule, a case in which it shows, words of the violation."""

    kind: type[Groups]
    case: Case
    words: str


ONE = Case(batch=1, size=1, eta=1, depth=1)
TWO = Case(batch=1, size=1, eta=2, depth=2)
PAIR = Case(batch=1, size=2, eta=1, depth=1)
SLOW = TWO._replace(depth=1)
KEPT = TWO._replace(checkpoints=True)
SHARED = Case(batch=2, size=1, eta=1, depth=1, producers=3, shared=True, deaf=1, losses=False, inflight=False)
JUDGED = ONE._replace(producers=1, scored=True, judges=2)
TUNED = ONE._replace(producers=1, tunes=((1, 1), (2, 2)))
MUTANTS = (
    Mutant(RequiredIgnored, TWO, ""),
    Mutant(RequiredLooksAtNowOnly, TWO, ""),
    Mutant(RequiredOneLess, TWO, ""),
    Mutant(FeasibleOffByOne, TUNED, "(F)"),
    Mutant(FeasibleIgnored, TUNED, "(F)"),
    Mutant(FeasibleNotWhenResumed, TWO._replace(size=2), "(F)"),
    Mutant(DeadlineRisesWhenResumed, PAIR, "older tokens"),
    Mutant(OlderTokensIgnored, PAIR._replace(older=1), "older tokens"),
    Mutant(BoundOfTheMoment, TUNED, "bound"),
    Mutant(DeadlineOfTheMoment, TUNED, "deadline"),
    Mutant(DepthOffByOne, SLOW, "(D)"),
    Mutant(DepthWithoutTheLag, TWO, "(D)"),
    Mutant(DepthWithoutTheBatchInTraining, SLOW, "(D)"),
    Mutant(ClaimNotIdempotent, TWO, ""),
    Mutant(BatchNotRecorded, ONE, ""),
    Mutant(LostLeaseKeepsItsToken, ONE, "lost lease"),
    Mutant(LostLeaseLosesSamples, PAIR, "lost its samples"),
    Mutant(ReadyInOrderOfArrival, TWO, ""),
    Mutant(AnyTokenWillDo, ONE, "refused sample"),
    Mutant(DroppedPlaceNotRefilled, ONE._replace(total=3, reissue=0, counted=2), ""),
    Mutant(RestartForgetsBatches, Case(batch=2, eta=1, depth=1, producers=1, restarts=True, unsaved=1), ""),
    Mutant(ReusedBeyondItsDeadline, ONE._replace(reuse=3, unsaved=2, producers=1), ""),
    Mutant(ReusedTooOften, TWO._replace(reuse=2, producers=1), ""),
    Mutant(CheckpointsOfAnyAge, ONE._replace(checkpoints=True), "checkpoints allow"),
    Mutant(CheckpointsWithoutRoom, KEPT, "(F)"),
    Mutant(CheckpointsTooLate, ONE._replace(checkpoints=True), "(F)"),
    Mutant(CheckpointsOfTheLostLease, KEPT, "taken twice"),
    Mutant(CheckpointsStay, KEPT, "nobody needs"),
    Mutant(ReuseIgnoresRequired, ONE._replace(reuse=2), ""),
    Mutant(KeptFromThoseWithout, SHARED, "holds nothing and gets nothing"),
    Mutant(OneJudgeIsEnough, JUDGED, "sum of its judges"),
    Mutant(LastJudgeWins, JUDGED, "sum of its judges"),
    Mutant(FailedJudgeGivesZero, JUDGED, ""),
    Mutant(JudgesShareTheirTries, JUDGED._replace(size=2), ""),
    Mutant(JudgesAnswerTwice, JUDGED, "not taken once"),
)


def paired(*kinds: type[Groups]) -> type[Groups]:
    """A state machine with all of these mistakes."""
    return type("And".join(kind.__name__ for kind in kinds), kinds, {})


PAIRS: tuple[tuple[tuple[type[Groups], ...], Case], ...] = (
    ((RequiredOneLess, DepthOffByOne), TWO),
    ((FeasibleIgnored, RequiredLooksAtNowOnly), TUNED),
    ((FeasibleNotWhenResumed, DepthWithoutTheBatchInTraining), TWO._replace(size=2)),
    ((OlderTokensIgnored, LostLeaseLosesSamples), PAIR._replace(older=1)),
    ((LostLeaseKeepsItsToken, AnyTokenWillDo), PAIR),
    ((DeadlineOfTheMoment, DepthWithoutTheLag), TUNED),
)
