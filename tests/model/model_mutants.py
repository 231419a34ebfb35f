"""Wrong rules, each a small change of a real part: the search must find every one of them, or it proves nothing.

A wrong rule is a subclass of the part that decides it; `Mutant` names the part, and the case in which the search finds
it. `NAIVE` is the rule of the counter-example of docs/staleness.md.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

from model_world import Case

from asyncrl.wire import Lease, Pieces, PiecesReply, RewardFailure, Samples, SamplesReply, Score, Scores
from buffers.groups.batches import Batches, Claimed
from buffers.groups.fair_share import FairShare, missing_groups
from buffers.groups.group_table import GroupTable
from buffers.groups.judgements import Judges, judgement
from buffers.groups.leases import GroupLeases, Leases
from buffers.groups.machine import Parts
from buffers.groups.partial_samples import PartialSamples
from buffers.groups.records import Group, PartialSample, State
from buffers.groups.recovery import Recovery
from buffers.groups.sample_intake import GroupSamples, SampleIntake
from buffers.groups.schedule import Schedule
from buffers.groups.scoring import Found, Scoring
from buffers.groups.workers import Worker
from buffers.values.feasibility import capacity


class Naive(Schedule):
    """Cap the outstanding groups, with the batch in training, at (eta + 1) * B; take what arrived first."""

    def fits(self, engine_version: int, bound: int, *, without: int | None = None) -> bool:
        settings = self.live.current
        return self.outstanding < (settings.max_staleness + 1) * settings.batch_groups

    def deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        return True

    def may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        return True


class NaiveBatches(Batches):
    """The claim of `Naive`."""

    def choose(self, step: int) -> list[int] | None:
        size, ready = self.schedule.batch_size(step), self.table.indexes.ready
        arrived = sorted(ready, key=lambda entry: entry[1])
        return [number for _, _, number in arrived[:size]] if len(arrived) >= size > 0 else None


class NaiveButFresh(Naive):
    """The same, and an engine gets work only while it holds the newest weights."""

    def next_group(self, engine_version: int) -> Group | None:
        return super().next_group(engine_version) if engine_version >= self.table.meta.version else None


NAIVE = Parts(schedule=Naive, batches=NaiveBatches)
NAIVE_BUT_FRESH = Parts(schedule=NaiveButFresh, batches=NaiveBatches)


class RequiredIgnored(Batches):
    """The claim does not ask for r(u)."""

    def settle_late(self, step: int, size: int) -> bool:
        return True


class RequiredLooksAtNowOnly(Schedule):
    """The claim asks for r(v), the groups due right now, and not for r(u) of later versions."""

    def shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        indexes = self.table.indexes
        due = indexes.due
        indexes.due = Counter({deadline: count for deadline, count in due.items() if deadline <= v})
        found = super().shortage(v, size)
        indexes.due = due
        return found


class RequiredOneLess(Schedule):
    """r(u) is one too small."""

    def shortage(self, v: int, size: int) -> tuple[int, int, int] | None:
        found = super().shortage(v, size)
        return None if found is None or found[1] <= 1 else found


class FeasibleOffByOne(Schedule):
    """(F) allows one group more than there are places."""

    def fits(self, engine_version: int, bound: int, *, without: int | None = None) -> bool:
        deadline, v = engine_version + bound, self.table.frontier
        due = Counter(self.table.indexes.due)
        if without is not None:
            due[without] -= 1
        due[deadline] += 1
        plan = self.live.plan
        return deadline >= v and all(
            sum(count for at, count in due.items() if at <= u) <= capacity(plan, v, max(u, v)) + 1 for u in due
        )


class FeasibleIgnored(Schedule):
    """(F) is not looked at. (D) implies it for new prompts under one bound: it shows only if bounds differ."""

    def fits(self, engine_version: int, bound: int, *, without: int | None = None) -> bool:
        return engine_version + bound >= self.table.frontier


class FeasibleNotWhenResumed(Schedule):
    """A lost group that holds samples is leased again, by an older engine, without a look at (F)."""

    def may_resume(self, group: Group, engine_version: int, lag: int) -> bool:
        return group.deadline is not None or super().may_resume(group, engine_version, lag)


class DeadlineRisesWhenResumed(GroupLeases):
    """A group with samples that is leased again gets the deadline of the new engine."""

    def grant(self, group: Group, worker: Worker, engine_version: int, request: int) -> Lease:
        if group.id < self.table.meta.cursor and group.deadline is not None:
            with self.table.edit(group):
                group.deadline = engine_version + group.bound
        return super().grant(group, worker, engine_version, request)


class OlderTokensIgnored(GroupSamples):
    """Tokens that are older than the lease do not lower the deadline."""

    def store(self, group: Group, *args: Any) -> None:
        number, deadline = group.id, group.deadline
        super().store(group, *args)
        found = self.table.groups.get(number)
        if found is not None:
            with self.table.edit(found):
                found.deadline = deadline


class BoundOfTheMoment(GroupLeases):
    """A group takes the bound that is in force when it is leased again."""

    def grant(self, group: Group, worker: Worker, engine_version: int, request: int) -> Lease:
        group.bound = self.live.current.max_staleness
        return super().grant(group, worker, engine_version, request)


class DeadlineOfTheMoment(GroupLeases):
    """The bound stays, but the deadline of a group that is leased again is computed with the one in force."""

    def grant(self, group: Group, worker: Worker, engine_version: int, request: int) -> Lease:
        bound = group.bound
        group.bound = self.live.current.max_staleness
        lease = super().grant(group, worker, engine_version, request)
        group.bound = bound
        return lease


class DepthOffByOne(Schedule):
    """(D) allows one group more."""

    def deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        return super().deep_enough(outstanding - 1, producer_lag)


class DepthWithoutTheLag(Schedule):
    """(D) does not take off the versions that the engine is behind."""

    def deep_enough(self, outstanding: int, producer_lag: int) -> bool:
        return super().deep_enough(outstanding, 0)


class DepthWithoutTheBatchInTraining(Schedule):
    """`outstanding` of (D) leaves out the batch that is being trained."""

    @property
    def outstanding(self) -> int:
        return self.table.indexes.competing


class ClaimNotIdempotent(Batches):
    """The same step claimed again gets a new batch, if another one would do."""

    def claim(self, *, epoch: int, step: int, version: int) -> Claimed | None:
        table, indexes = self.table, self.table.indexes
        batch = table.batches.get(step)
        if batch is not None and len(indexes.ready) >= len(batch.groups) and step == table.meta.version + 1:
            for number in batch.groups:
                with table.edit(table.groups[number]):
                    table.groups[number].state, table.groups[number].uses = State.READY, []
            del table.batches[step]
            indexes.ready.sort(key=lambda entry: (entry[0], -entry[1]))
            chosen = [number for _, _, number in indexes.ready[: len(batch.groups)]]
            indexes.ready.sort()
            return self.record(step, chosen)
        return super().claim(epoch=epoch, step=step, version=version)


class BatchNotRecorded(Batches):
    """The batch is handed out before its row is written."""

    def record(self, step: int, chosen: list[int]) -> Claimed:
        claimed = super().record(step, chosen)
        self.tx._rows.pop(f"b{step}", None)
        return claimed


class LostLeaseKeepsItsToken(Leases):
    """The worker that lost a lease may still answer."""

    def lose(self, item: Any, why: str, *, counts: bool = True) -> None:
        token, number = item.token, item.id
        super().lose(item, why, counts=counts)
        if self.table.get(number) is not None:
            self.table.get(number).token = token


class LostLeaseLosesSamples(Leases):
    """The samples that had arrived are dropped with the lease."""

    def lose(self, item: Any, why: str, *, counts: bool = True) -> None:
        item.samples, item.records = {}, []
        super().lose(item, why, counts=counts)


class ReadyInOrderOfArrival(Batches):
    """The batch is filled first come first served; (1) of the claim is met by number only."""

    def choose(self, step: int) -> list[int] | None:
        chosen = super().choose(step)
        if chosen is None:
            return None
        return [number for _, number in sorted((entry[1], entry[2]) for entry in self.table.indexes.ready)][
            : len(chosen)
        ]


class AnyTokenWillDo(SampleIntake):
    """Answers are taken under any token."""

    def take(self, head: Samples, **more: Any) -> SamplesReply:
        group = self.target.get(head.group)
        if group is not None and group.state == State.LEASED and group.token:
            head = Samples(head.producer, head.group, group.token, head.samples, {}, (), "", 1, rewards=head.rewards)
        return super().take(head, **more)


class DroppedPlaceNotRefilled(Schedule):
    """The place of a group that was dropped or died is not filled by another prompt."""

    @property
    def unclaimed(self) -> int:
        return super().unclaimed - len(self.table.ended)


class RestartForgetsBatches(Recovery):
    """A new learner gets new batches instead of the recorded ones."""

    def restore_batches(self, step: int, *rest: Any) -> None:
        for batch in self.table.batches.values():
            batch.groups.reverse()
        super().restore_batches(step, *rest)


class ReusedBeyondItsDeadline(Schedule):
    """A trained group may be trained again at any lag."""

    def usable(self, v: int) -> list[tuple[int, int, int]]:
        return list(self.table.indexes.used)


class ReusedTooOften(Schedule):
    """One use more than `max_reuse`."""

    def next_group(self, engine_version: int) -> Group | None:
        group = super().next_group(engine_version)
        if group is not None and group.id == self.table.meta.cursor:
            group.max_uses += 1
        return group


class ReuseIgnoresRequired(Schedule):
    """Used groups fill the batch before those that cannot wait."""

    def mix(self, step: int, size: int, used: list[tuple[int, int, int]]) -> list[int]:
        return [number for _, _, number in [*used, *self.table.indexes.ready][:size]]


class CheckpointsOfAnyAge(PartialSamples):
    """Partial samples are handed out without a look at their age."""

    def hand_out(self, group: Group, deadline: int) -> int:
        return deadline


class CheckpointsWithoutRoom(PartialSamples):
    """A partial sample lowers the deadline, if a step may still train it, without a look at (F)."""

    def refusal(self, found: PartialSample, due: int, deadline: int) -> str:
        return "stale" if due < self.table.frontier else ""


class CheckpointsTooLate(PartialSamples):
    """A deadline that has passed is no reason."""

    def refusal(self, found: PartialSample, due: int, deadline: int) -> str:
        why = super().refusal(found, due, deadline)
        return "" if why == "stale" else why


class CheckpointsOfTheLostLease(SampleIntake):
    """Pieces are taken under any token."""

    def pieces(self, head: Pieces, **more: Any) -> PiecesReply:
        group = self.target.get(head.group)
        if group is not None and group.state == State.LEASED and group.token:
            head = Pieces(head.producer, head.group, group.token, head.samples, head.digests, head.fields)
        return super().pieces(head, **more)


class CheckpointsStay(GroupTable):
    """The arrival of a sample leaves its partial sample behind."""

    def drop_partial(self, group: Group, index: int | None = None) -> int:
        return 0


class OneJudgeIsEnough(Scoring):
    """A sample has its reward as soon as one of its judges has answered."""

    def score(self, score: Score, message: Scores) -> str:
        why = super().score(score, message)
        group = self.target.get(score.group)
        if group is not None and not why and group.samples[score.index].reward is None:
            for index in group.samples:
                for judge in self.judges.names:
                    self.queue.remove((group.id, index, judge))
            with self.target.edit(group):
                group.samples[score.index].reward, group.samples[score.index].judged = score.reward, {}
                self.target.accept_score(group)
        return why


class LastJudgeWins(Scoring):
    """The reward is that of the last answer, not the sum."""

    def score(self, score: Score, message: Scores) -> str:
        why = super().score(score, message)
        group = self.target.get(score.group)
        if group is not None and group.samples[score.index].reward is not None:
            group.samples[score.index].reward = score.reward
        return why


class FailedJudgeGivesZero(Scoring):
    """A judge whose attempts are spent counts as a reward of 0."""

    def fail(self, failure: RewardFailure, message: Scores) -> str:
        sample = self.target.get(failure.group).samples[failure.index]
        if judgement(sample, message.judge).failures >= self.judges.retries(message.judge):
            return self.score(Score(failure.group, failure.index, failure.token, 0.0), message)
        return super().fail(failure, message)


class JudgesShareTheirTries(Judges):
    """Failures are counted by sample, not by judge."""

    def retries(self, judge: str) -> int:
        return min(rule.retries for rule in self.rules)


class JudgesAnswerTwice(Scoring):
    """A second answer of the same judge is taken, too."""

    def find_sample(self, answer: Score | RewardFailure, judge: str) -> Found | str:
        group = self.target.get(answer.group)
        if group is None or group.samples[answer.index].reward is not None:
            return super().find_sample(answer, judge)
        return Found(group, group.samples[answer.index], False)


class KeptFromThoseWithout(FairShare):
    """Groups reserved for others are kept from producers that hold nothing, too."""

    def room(self, worker: Worker, engine_version: int) -> float:
        room = super().room(worker, engine_version)
        ready = self.schedule.count_ready(engine_version)
        lacks = missing_groups(self.standings(), ready=ready)
        return room if math.isinf(room) else ready - sum(lacks.values()) + lacks.get(worker.name, 0)


class Mutant(NamedTuple):
    """A wrong rule as the parts that it replaces, a case in which it shows, words of the violation."""

    parts: dict[str, type[Any]]
    case: Case
    words: str

    @property
    def name(self) -> str:
        return "+".join(kind.__name__ for kind in self.parts.values())


ONE = Case(batch=1, size=1, eta=1, depth=1)
TWO = Case(batch=1, size=1, eta=2, depth=2)
PAIR = Case(batch=1, size=2, eta=1, depth=1)
SLOW = TWO._replace(depth=1)
KEPT = TWO._replace(checkpoints=True)
SHARED = Case(batch=2, size=1, eta=1, depth=1, producers=3, shared=True, deaf=1, losses=False, inflight=False)
JUDGED = ONE._replace(producers=1, scored=True, judges=2)
TUNED = ONE._replace(producers=1, tunes=((1, 1), (2, 2)))
RESTARTED = Case(batch=2, eta=1, depth=1, producers=1, restarts=True, unsaved=1)
MUTANTS = (
    Mutant({"batches": RequiredIgnored}, TWO, ""),
    Mutant({"schedule": RequiredLooksAtNowOnly}, TWO, ""),
    Mutant({"schedule": RequiredOneLess}, TWO, ""),
    Mutant({"schedule": FeasibleOffByOne}, TUNED, "(F)"),
    Mutant({"schedule": FeasibleIgnored}, TUNED, "(F)"),
    Mutant({"schedule": FeasibleNotWhenResumed}, TWO._replace(size=2), "(F)"),
    Mutant({"group_leases": DeadlineRisesWhenResumed}, PAIR, "older tokens"),
    Mutant({"samples": OlderTokensIgnored}, PAIR._replace(older=1), "older tokens"),
    Mutant({"group_leases": BoundOfTheMoment}, TUNED, "bound"),
    Mutant({"group_leases": DeadlineOfTheMoment}, TUNED, "deadline"),
    Mutant({"schedule": DepthOffByOne}, SLOW, "(D)"),
    Mutant({"schedule": DepthWithoutTheLag}, TWO, "(D)"),
    Mutant({"schedule": DepthWithoutTheBatchInTraining}, SLOW, "(D)"),
    Mutant({"batches": ClaimNotIdempotent}, TWO, ""),
    Mutant({"batches": BatchNotRecorded}, ONE, ""),
    Mutant({"leases": LostLeaseKeepsItsToken}, ONE, "lost lease"),
    Mutant({"leases": LostLeaseLosesSamples}, PAIR, "lost its samples"),
    Mutant({"batches": ReadyInOrderOfArrival}, TWO, ""),
    Mutant({"intake": AnyTokenWillDo}, ONE, "refused sample"),
    Mutant({"schedule": DroppedPlaceNotRefilled}, ONE._replace(total=3, reissue=0, counted=2), ""),
    Mutant(
        {"recovery": RestartForgetsBatches}, Case(batch=2, eta=1, depth=1, producers=1, restarts=True, unsaved=1), ""
    ),
    Mutant({"schedule": ReusedBeyondItsDeadline}, ONE._replace(reuse=3, unsaved=2, producers=1), ""),
    Mutant({"schedule": ReusedTooOften}, TWO._replace(reuse=2, producers=1), ""),
    Mutant({"partial": CheckpointsOfAnyAge}, ONE._replace(checkpoints=True), "checkpoints allow"),
    Mutant({"partial": CheckpointsWithoutRoom}, KEPT, "(F)"),
    Mutant({"partial": CheckpointsTooLate}, ONE._replace(checkpoints=True), "(F)"),
    Mutant({"intake": CheckpointsOfTheLostLease}, KEPT, "taken twice"),
    Mutant({"table": CheckpointsStay}, KEPT, "nobody needs"),
    Mutant({"schedule": ReuseIgnoresRequired, "batches": RequiredIgnored}, ONE._replace(reuse=2), ""),
    Mutant({"shares": KeptFromThoseWithout}, SHARED, "holds nothing and gets nothing"),
    Mutant({"scoring": OneJudgeIsEnough}, JUDGED, "sum of its judges"),
    Mutant({"scoring": LastJudgeWins}, JUDGED, "sum of its judges"),
    Mutant({"scoring": FailedJudgeGivesZero}, JUDGED, ""),
    Mutant({"judges": JudgesShareTheirTries}, JUDGED._replace(size=2), ""),
    Mutant({"scoring": JudgesAnswerTwice}, JUDGED, "not taken once"),
)


def combine(wrong: dict[str, tuple[type[Any], ...]]) -> Parts:
    """A machine with all of these mistakes."""
    return Parts(
        **{part: type("And".join(kind.__name__ for kind in kinds), kinds, {}) for part, kinds in wrong.items()}
    )


#: Part -> wrong rules about it, and a case in which the search sees them.
PAIRS: tuple[tuple[dict[str, tuple[type[Any], ...]], Case], ...] = (
    ({"schedule": (RequiredOneLess, DepthOffByOne)}, TWO),
    ({"schedule": (FeasibleIgnored, RequiredLooksAtNowOnly)}, TUNED),
    ({"schedule": (FeasibleNotWhenResumed, DepthWithoutTheBatchInTraining)}, TWO._replace(size=2)),
    ({"samples": (OlderTokensIgnored,), "leases": (LostLeaseLosesSamples,)}, PAIR._replace(older=1)),
    ({"leases": (LostLeaseKeepsItsToken,), "intake": (AnyTokenWillDo,)}, PAIR),
    ({"group_leases": (DeadlineOfTheMoment,), "schedule": (DepthWithoutTheLag,)}, TUNED),
)
