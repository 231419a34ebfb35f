"""Reward workers' side of the state machine: samples to score, scores, failures.

Called through `buffers.groups.machine.Groups`. Guarantees:
1. for each judge that is asked about a sample it is with one worker at a time, under a token of its own; the sample has
   its reward when all of them have answered (`buffers.groups.judgements`);
2. a judge's first score of a sample counts, also a late one whose lease has expired, and no other; a token of before
   the sample arrived, or one that was never granted for it, is refused;
3. a reward that fails is tried again, elsewhere where another worker of that judge lives, then the group is DEAD: never
   a reward of 0. A failure under a lease that somebody else has now is refused, one that is told twice counts once;
4. more than `max_failed_groups` dead groups by reward end the run with the function's own message;
5. every answer is counted by judge: scored, late, failures, refused.
A sample may be scored before its group is complete: scores then wait for the samples, not the other way round.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.judges import display_name
from asyncrl.config.sections.judge import DEFAULT
from asyncrl.wire import RewardFailure, Score, Scores, ScoresReply
from buffers.groups.judgements import Judged, said_by, settle, take_answer, take_failure
from buffers.groups.judging import TOO_MANY_PARTS
from buffers.groups.pieces import Checkpointing
from buffers.groups.records import Group, Sample, State
from buffers.groups.score_queue import Key


class ToScore(msgspec.Struct, frozen=True):
    """One sample handed to a worker."""

    group: int
    index: int
    token: int
    attempt: int
    judge: str = DEFAULT


class Found(NamedTuple):
    """The sample that an answer is for; `late`: its lease had expired."""

    group: Group
    sample: Sample
    late: bool


class Scoring(Checkpointing):
    """The layer below plus what reward workers do."""

    def reward_lease(
        self, name: str, *, max_samples: int, request: int, now: float, judge: str = DEFAULT
    ) -> list[ToScore]:
        """Samples for this worker, oldest first. The same request again gets the same samples."""
        worker = self.workers.get(("reward", name)) or self.saw("reward", name, now)
        worker.judge = judge
        again = self.scores_due.again(name, request)
        if again or request <= worker.answered:
            return [self._item(key) for key in again]
        if not self.scores_due.waits(judge):
            return []
        others = self.living_workers(judge, now) - {name}

        def may(key: Key) -> bool:
            failed_by = said_by(self.groups[key[0]].samples[key[1]], judge).failed_by
            return name not in failed_by or not others - set(failed_by)

        taken = self.scores_due.grant(
            name, judge, request=request, max_samples=max_samples, may=may, new_token=self._new_token
        )
        return [self._item(key) for key in taken]

    def _item(self, key: Key) -> ToScore:
        number, index, judge = key
        tried = said_by(self.groups[number].samples[index], judge).failures
        return ToScore(number, index, self.scores_due.leases[key].token, tried, judge)

    # ------------------------------------------------------------ answers

    def scores(self, message: Scores, *, now: float) -> ScoresReply:
        """Take scores and failures."""
        self.saw("reward", message.worker, now).judge = message.judge
        refused: dict[str, str] = {}
        accepted = 0
        items: list[Score | RewardFailure] = [*message.scores, *message.failures]
        for item in items:
            why = self._score(item, message, now) if isinstance(item, Score) else self._failure(item, message, now)
            accepted += not why
            if why:
                refused[f"{item.group}:{item.index}"] = why
                self.judge_counts[message.judge, f"refused:{why.split(':')[0]}"] += 1
        return ScoresReply(accepted, refused)

    def _sample_for(self, item: Score | RewardFailure, judge: str) -> Found | str:
        """The sample that the answer is for, or why it is refused."""
        group = self.groups.get(item.group)
        sample = group.samples.get(item.index) if group else None
        if group is None or sample is None:
            return self._ended_reason(item.group) if group is None else "unknown sample"
        said = said_by(sample, judge)
        if sample.reward is not None or said.reward is not None:
            return "already scored"
        if judge not in self.judges_of(group):
            return f"judge: {display_name(judge)} is not asked about this row"
        # Tokens grow, and this sample came under a token of its own: an answer under a later one is of what is there
        # now, whoever has the lease by then (it expired, or the service was restarted).
        lease = self.scores_due.leases.get((item.group, item.index, judge))
        newest = self._token if lease is None else lease.token
        if not sample.token < item.token <= newest:
            return "token: the reward lease was lost"
        if isinstance(item, RewardFailure) and (lease is not None and item.token != lease.token):
            return "token: the reward lease was lost"
        if isinstance(item, RewardFailure) and item.token <= said.failed_token:
            return "already counted"
        return Found(group, sample, lease is None or lease.token != item.token)

    def _score(self, score: Score, message: Scores, now: float) -> str:
        judge, worker = message.judge, message.worker
        found = self._sample_for(score, judge)
        if isinstance(found, str):
            return found
        if not (math.isfinite(score.reward) and all(math.isfinite(part) for part in score.parts.values())):
            failure = RewardFailure(score.group, score.index, score.token, "not_finite", f"reward {score.reward}")
            return self._failure(failure, message, now)
        if not self.parts_known(score.parts):
            failure = RewardFailure(score.group, score.index, score.token, "parts", TOO_MANY_PARTS)
            return self._failure(failure, message, now)
        group, sample, late = found
        self.judge_counts[judge, "scored"] += 1
        self.judge_counts[judge, "late"] += late
        self.scores_due.release((score.group, score.index, judge))
        self._out(group)
        said = Judged(score.reward, dict(score.parts), version=message.reward_version)
        answers = {**sample.judged, judge: said}
        whole = take_answer(sample, self.judges_of(group), judge, said)
        if not self.settings.judges:
            self._say(now, "score", group, score.index, said, worker=worker)
        else:
            self._say(now, "judged", group, score.index, said, worker=worker, judge=judge)
            if whole:
                versions = {name: one.version for name, one in answers.items() if one.version}
                self._say(
                    now,
                    "score",
                    group,
                    score.index,
                    Judged(sample.reward, sample.parts),
                    worker=worker,
                    **({"versions": versions} if versions else {}),
                )
        verdict = self._ready_if_scored(group, now) if whole else None
        self._in(group)
        if verdict is not None:
            self._end_by(group, verdict, now)
        return ""

    def _say(self, now: float, name: str, group: Group, index: int, said: Judged, **more: Any) -> None:
        if said.parts:
            more["parts"] = said.parts
        if said.version:
            more["version"] = said.version
        self._event(now, name, g=group.id, i=index, reward=said.reward, **more)

    def _failure(self, failure: RewardFailure, message: Scores, now: float) -> str:
        judge = message.judge
        found = self._sample_for(failure, judge)
        if isinstance(found, str):
            return found
        group, sample, _ = found
        self.judge_counts[judge, "failures"] += 1
        self.scores_due.release((failure.group, failure.index, judge))
        if said_by(sample, judge).failures >= self.retries_of(judge):
            detail = f"{failure.reason}: {failure.detail}" + (f" (judge {judge})" if judge else "")
            self._end(group, State.DEAD, "reward_failed", now, detail)
            self._count_failed("reward_failed", detail)
            return ""
        self._out(group)
        take_failure(sample, judge, message.worker, failure.token)
        self._in(group)
        return ""

    # ------------------------------------------------------------ other settings than before

    def settle_judges(self, now: float) -> None:
        """The service starts, maybe with other judges than before: who is no longer asked is not waited for."""
        for group in [group for group in self.groups.values() if group.state in (State.LEASED, State.UNSCORED)]:
            self._out(group)
            changed = bool(self.settings.judges) and group.source is None and group.state == State.UNSCORED
            if changed:
                group.source = ""  # its row came while nobody needed it
            for index, sample in group.samples.items():
                if settle(sample, self.judges_of(group)):
                    changed = True
                    self._say(now, "score", group, index, Judged(sample.reward, sample.parts), worker="")
            verdict = self._ready_if_scored(group, now) if changed else None
            (self._in if changed else self._index)(group)
            if verdict is not None:
                self._end_by(group, verdict, now)

    # ------------------------------------------------------------ looking

    def judges_now(self, now: float) -> list[dict[str, Any]]:
        """The judges for the status: what waits, what is with workers, what came in since the service started."""
        told = []
        for judge in self.judge_names():
            mine = [self.workers["reward", name] for name in sorted(self.living_workers(judge, now))]
            calls = [worker.stats["reward_call_s"] for worker in mine if "reward_call_s" in worker.stats]
            counts = Counter({what: n for (name, what), n in self.judge_counts.items() if name == judge})
            refused = {what.partition(":")[2]: n for what, n in sorted(counts.items()) if what.startswith("refused:")}
            told.append(
                {
                    "judge": display_name(judge),
                    "workers": len(mine),
                    "waiting": self.scores_due.waits(judge),
                    "leased": self.scores_due.leased(judge),
                    "scored": counts["scored"],
                    "late": counts["late"],
                    "failures": counts["failures"],
                    "refused": refused,
                    "call_s": round(sum(calls) / len(calls), 6) if calls else None,
                }
            )
        return told
