"""Samples that reward workers score: leases, scores and failures, for training groups and held-out prompts alike.

Guarantees:
1. for each judge that is asked about a sample, one worker at a time holds it, under its own token. The sample has its
   reward when all of its judges have answered;
2. a judge's first score of a sample counts, also a late one whose lease has expired, and no other; a token from before
   the sample arrived, or one that was never granted for it, is refused;
3. a reward that fails is retried, on another worker of that judge if one is alive; then the item has failed: never a
   reward of 0. A failure under a lease that another worker has now is refused; one reported twice counts once;
4. more than `max_failed_groups` groups that are dead by reward end the run with the function's own message;
5. every answer is counted by judge: scored, late, failures, refused;
6. a teacher's answer is a score of 0 whose log-probs are kept as one more record of the group, in the same edit.
A sample may be scored before its group is complete.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncrl.config.judges import display_name
from asyncrl.config.sections.reward import DEFAULT
from asyncrl.wire import RewardFailure, Score, Scores, TeacherLogprobs
from buffers.groups.failure_budget import TOO_MANY_PARTS, FailureBudget, Verdict
from buffers.groups.group_table import GroupTable
from buffers.groups.judgements import Judgement, Judges, Key, ScoreQueue, judgement, sum_up, take_answer, take_failure
from buffers.groups.live_settings import LiveSettings
from buffers.groups.records import Group, Record, State
from buffers.groups.sample_intake import GroupSamples
from buffers.groups.transaction import Edit, Transaction
from buffers.groups.workers import Workers

LOST_REWARD_LEASE = "token: the reward lease was lost"
VERSION_CHARS = 200  # of what a worker says about its reward function; a real one has 32
TEXT_CHARS = 1000  # of a score's answer or text, in addition to those of its tokens
TOKEN_CHARS = 256  # of one token; vocabularies contain runs of 128 spaces


class ToScore(msgspec.Struct, frozen=True):
    """One sample handed to a worker."""

    group: int
    index: int
    token: int
    attempt: int
    judge: str = DEFAULT


class Found(NamedTuple):
    """The sample that an answer is for; `late`: its lease had expired."""

    item: Any
    sample: Any
    late: bool


class Answer(NamedTuple):
    """A judge's score of a sample. `answers`: those of all judges if this was the last one, else None."""

    place: int  # of the sample in its item
    score: Score
    judgement: Judgement
    message: Scores
    answers: dict[str, Judgement] | None
    record: Record | None = None  # where a teacher's log-probs lie


def shorten_texts(score: Score, tokens: int) -> Score:
    """The score with at most the text that a response of `tokens` tokens can have: the buffer stores what workers say.

    >>> len(shorten_texts(Score(0, 0, 1, 1.0, text="x" * 5000), tokens=2).text)
    1512
    """
    limit = TEXT_CHARS + TOKEN_CHARS * tokens
    if len(score.answer) <= limit and len(score.text) <= limit:
        return score
    return msgspec.structs.replace(score, answer=score.answer[:limit], text=score.text[:limit])


class ScoringTarget(Protocol):
    """The items whose samples are scored."""

    def get(self, number: int) -> Any:
        """The item, or None if it needs no scores any more."""

    def gone_reason(self, number: int) -> str:
        """Why the item needs no scores."""

    def judges_for(self, item: Any) -> tuple[str, ...]:
        """The judges that score the item's samples."""

    def edit(self, item: Any) -> Edit: ...

    def touch(self, item: Any) -> None:
        """Write the row of an item whose indexes stay the same."""

    def list_unscored(self) -> Iterable[Any]:
        """The items that may wait for scores."""

    def settle_source(self, item: Any) -> bool:
        """The service starts: decide on an item whose data source is unknown; whether it changed."""

    def record(self, item: Any, answer: Answer) -> None:
        """A judge has answered; the row of the item is written after this."""

    def record_sum(self, item: Any, index: int) -> None:
        """A sample has its reward because the judges that it waited for are no longer asked."""

    def accept_score(self, item: Any) -> Any:
        """A sample of the item, which is being edited, has its reward; a verdict for `finish` or None."""

    def finish(self, item: Any, verdict: Any) -> None:
        """After the edit in which `scored` gave the verdict."""

    def fail(self, item: Any, detail: str) -> None:
        """A reward failed for good."""


class Scoring:
    """The score queue of one kind of items. `counts`: (judge, what) -> number, since the service started."""

    def __init__(
        self,
        tx: Transaction,
        workers: Workers,
        *,
        live: LiveSettings,
        judges: Judges,
        budget: FailureBudget,
        queue: ScoreQueue,
        target: ScoringTarget,
        counts: Counter[tuple[str, str]],
    ) -> None:
        self.tx = tx
        self.workers = workers
        self.live = live
        self.judges = judges
        self.budget = budget
        self.queue = queue
        self.target = target
        self.counts = counts

    # ------------------------------------------------------------ leases

    def lease(self, name: str, *, max_samples: int, request: int, judge: str = DEFAULT) -> list[ToScore]:
        """Samples for this worker, oldest first. The same request again gets the same samples."""
        worker = self.workers.find("reward", name, self.tx.now)
        worker.judge = judge
        again = self.queue.find_granted(name, request)
        if again or request <= worker.answered:
            return [self._item(key) for key in again]
        if not self.queue.count_waiting(judge):
            return []

        def may(key: Key) -> bool:
            failed_by = judgement(self.target.get(key[0]).samples[key[1]], judge).failed_by
            return name not in failed_by or not self.living_workers(judge) - {name, *failed_by}

        taken = self.queue.grant(
            name, judge, request=request, max_samples=max_samples, may=may, new_token=self.tx.next_token
        )
        return [self._item(key) for key in taken]

    def _item(self, key: Key) -> ToScore:
        number, index, judge = key
        failures = judgement(self.target.get(number).samples[index], judge).failures
        return ToScore(number, index, self.queue.leases[key].token, failures, judge)

    def living_workers(self, judge: str) -> set[str]:
        """Reward workers of this judge that were heard from."""
        limit = self.live.current.lease_timeout_s
        return self.workers.alive("reward", judge=judge, now=self.tx.now, limit_s=limit)

    def lose_all(self, worker: str) -> None:
        """The worker holds nothing any more."""
        self.queue.requeue(worker)
        self.tx.generation += 1

    def renew(self, worker: str, holds: Iterable[tuple[int, int]]) -> None:
        """A heartbeat: the worker keeps only the leases that it names."""
        limit = self.live.current.lease_timeout_s
        self.tx.generation += self.queue.requeue_unnamed(worker, holds, now=self.tx.now, limit_s=limit)

    def expire(self) -> None:
        """Take the leases of workers that were silent for `lease_timeout_s`."""
        now, limit = self.tx.now, self.live.current.lease_timeout_s
        for name in self.queue.busy_workers():
            if now - self.workers.find("reward", name, now).seen > limit:
                self.lose_all(name)

    # ------------------------------------------------------------ answers

    def take(self, message: Scores) -> tuple[int, dict[str, str]]:
        """Take scores and failures: how many were accepted, and by `group:sample` why others were refused."""
        refused: dict[str, str] = {}
        accepted = 0
        items: list[Score | RewardFailure] = [*message.scores, *message.failures]
        for item in items:
            if isinstance(item, RewardFailure):
                why = self.fail(item, message)
            elif self.judges.teaches(message.judge):
                why = "log-probs are missing: this judge is a teacher"
            else:
                why = self.score(item, message)
            accepted += not why
            if why:
                refused[f"{item.group}:{item.index}"] = why
                self.counts[message.judge, f"refused:{why.split(':')[0]}"] += 1
        return accepted, refused

    def find_sample(self, answer: Score | RewardFailure | TeacherLogprobs, judge: str) -> Found | str:
        """The sample that the answer is for, or why it is refused."""
        item = self.target.get(answer.group)
        sample = item.samples.get(answer.index) if item is not None else None
        if item is None or sample is None:
            return self.target.gone_reason(answer.group) if item is None else "unknown sample"
        known = judgement(sample, judge)
        if sample.reward is not None or known.reward is not None:
            return "already scored"
        if judge not in self.target.judges_for(item):
            return f"judge: {display_name(judge)} is not asked about this row"
        # Tokens grow, and the sample arrived under its own token: an answer under a later one is about the sample
        # that is there now, whichever worker has the lease by then (it expired, or the service was restarted).
        lease = self.queue.leases.get((answer.group, answer.index, judge))
        newest = self.tx.newest_token if lease is None else lease.token
        if not sample.token < answer.token <= newest:
            return LOST_REWARD_LEASE
        if isinstance(answer, RewardFailure) and (lease is not None and answer.token != lease.token):
            return LOST_REWARD_LEASE
        if isinstance(answer, RewardFailure) and answer.token <= known.failed_token:
            return "already counted"
        return Found(item, sample, lease is None or lease.token != answer.token)

    def take_teaching(
        self, head: TeacherLogprobs, *, invalid: Callable[[Any], str], keep: Callable[[], Record]
    ) -> tuple[int, dict[str, str]]:
        """Take a teacher's answer about a sample, like `take`. `invalid` says why the log-probs may not be used, `keep`
        stores them.
        """
        message = Scores(head.worker, (), reward_version=head.version, judge=head.judge)
        found = self.find_sample(head, head.judge)
        if isinstance(found, str):
            why = found
        elif wrong := invalid(found.sample):
            failure = RewardFailure(head.group, head.index, head.token, "invalid", wrong)
            why = self.fail(failure, message)
        else:
            why = self.score(Score(head.group, head.index, head.token, 0.0), message, keep=keep)
        if why:
            self.counts[head.judge, f"refused:{why.split(':')[0]}"] += 1
        return (0, {f"{head.group}:{head.index}": why}) if why else (1, {})

    def score(self, score: Score, message: Scores, keep: Callable[[], Record] | None = None) -> str:
        """Take a score; why it is refused, or the empty text. `keep` stores what comes with it."""
        judge = message.judge
        found = self.find_sample(score, judge)
        if isinstance(found, str):
            return found
        limit = min(self.live.current.max_reward, sys.float_info.max)
        beyond = [value for value in (score.reward, *score.parts.values()) if not abs(value) <= limit]  # NaN too
        if beyond:
            why, detail = ("too_large", f", above {limit:g}") if math.isfinite(beyond[0]) else ("not_finite", "")
            failure = RewardFailure(score.group, score.index, score.token, why, f"reward {beyond[0]}{detail}")
            return self.fail(failure, message)
        if not self.budget.accept_parts(score.parts):
            return self.fail(RewardFailure(score.group, score.index, score.token, "parts", TOO_MANY_PARTS), message)
        item, sample, late = found
        score = shorten_texts(score, sample.length)
        self.counts[judge, "scored"] += 1
        self.counts[judge, "late"] += late
        self.queue.remove((score.group, score.index, judge))
        version = message.reward_version[:VERSION_CHARS]
        answer = Judgement(score.reward, dict(score.parts), version=version, answer=score.answer)
        answers = {**sample.judged, judge: answer}
        complete = take_answer(sample, self.target.judges_for(item), judge, answer)
        record = keep() if keep is not None else None
        given = Answer(score.index, score, answer, message, answers if complete else None, record)
        if None in [one.reward for one in item.samples.values()]:  # nothing that an index depends on changes
            self.target.record(item, given)
            self.target.touch(item)
            return ""
        with self.target.edit(item):
            self.target.record(item, given)
            verdict = self.target.accept_score(item)
        if verdict is not None:
            self.target.finish(item, verdict)
        return ""

    def fail(self, failure: RewardFailure, message: Scores) -> str:
        """Take a failure; why it is refused, or the empty text."""
        judge = message.judge
        found = self.find_sample(failure, judge)
        if isinstance(found, str):
            return found
        item, sample, _ = found
        self.counts[judge, "failures"] += 1
        self.queue.remove((failure.group, failure.index, judge))
        if judgement(sample, judge).failures >= self.judges.retries(judge):
            detail = f"{failure.reason}: {failure.detail}" + (f" (judge {judge})" if judge else "")
            self.target.fail(item, detail)
            return ""
        with self.target.edit(item):
            take_failure(sample, judge, message.worker, failure.token)
        return ""

    def settle_judges(self) -> None:
        """The service starts, maybe with other judges: samples do not wait for judges that are no longer asked."""
        for item in list(self.target.list_unscored()):
            changed = self.target.settle_source(item)
            for index, sample in item.samples.items():
                if sum_up(sample, self.target.judges_for(item)):
                    changed = True
                    self.target.record_sum(item, index)
            if not changed:
                continue
            with self.target.edit(item):
                verdict = self.target.accept_score(item)
            if verdict is not None:
                self.target.finish(item, verdict)


class GroupScores:
    """Scores of training groups."""

    def __init__(
        self, tx: Transaction, table: GroupTable, samples: GroupSamples, budget: FailureBudget, judges: Judges
    ) -> None:
        self.tx = tx
        self.table = table
        self.samples = samples
        self.budget = budget
        self.judges = judges

    def get(self, number: int) -> Group | None:
        return self.table.groups.get(number)

    def gone_reason(self, number: int) -> str:
        return self.samples.gone_reason(number)

    def judges_for(self, group: Group) -> tuple[str, ...]:
        return self.judges.judges_for(group.source)

    def edit(self, group: Group) -> Edit:
        return self.table.edit(group)

    def touch(self, group: Group) -> None:
        self.table.put(f"g{group.id}")

    def list_unscored(self) -> Iterable[Group]:
        return [group for group in self.table.groups.values() if group.state in (State.LEASED, State.UNSCORED)]

    def settle_source(self, group: Group) -> bool:
        if not self.judges.rules or group.source is not None or group.state != State.UNSCORED:
            return False
        group.source = ""  # its row came while no rule needed it
        return True

    def record(self, group: Group, answer: Answer) -> None:
        worker = answer.message.worker
        if answer.record is not None:
            group.records.append(answer.record)
        if not self.judges.rules:
            self._event("score", group, answer.place, answer.judgement, worker=worker)
            return
        kept = {} if answer.record is None else {"logprobs": f"{answer.record.checksum:016x}"}
        self._event("judged", group, answer.place, answer.judgement, worker=worker, judge=answer.message.judge, **kept)
        if answer.answers is not None:
            versions = {name: one.version for name, one in answer.answers.items() if one.version}
            more = {"versions": versions} if versions else {}
            self._event_sum(group, answer.place, worker=worker, **more)

    def record_sum(self, group: Group, index: int) -> None:
        self._event_sum(group, index, worker="")

    def _event_sum(self, group: Group, index: int, **more: Any) -> None:
        sample = group.samples[index]
        self._event("score", group, index, Judgement(sample.reward, sample.parts), **more)

    def _event(self, name: str, group: Group, index: int, answer: Judgement, **more: Any) -> None:
        if answer.parts:
            more["parts"] = answer.parts
        if answer.version:
            more["version"] = answer.version
        self.tx.event(name, g=group.id, i=index, reward=answer.reward, **more)

    def accept_score(self, group: Group) -> Verdict | None:
        return self.samples.become_ready(group)

    def finish(self, group: Group, verdict: Verdict) -> None:
        self.budget.reject(group, verdict)

    def fail(self, group: Group, detail: str) -> None:
        self.table.end(group, State.DEAD, "reward_failed", detail)
        self.budget.count_failed("reward_failed", detail)
