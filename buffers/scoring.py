"""Reward workers' side of the state machine: samples to score, scores, failures.

Called through `buffers.groups.Groups`. Guarantees:
1. a sample is scored by one worker at a time; a score under an older token than the current one is refused;
2. a reward that fails is tried again, elsewhere where another worker lives, then the group is DEAD: never a reward of
   0;
3. more than `max_failed_groups` dead groups by reward end the run with the function's own message.
A sample may be scored before its group is complete: scores then wait for the samples, not the other way round.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from asyncrl.wire import RewardFailure, Score, Scores, ScoresReply
from buffers.ledger import Group, Sample, State
from buffers.notes import RewardLease
from buffers.pieces import Checkpointing


class ToScore(msgspec.Struct, frozen=True):
    """One sample handed to a worker."""

    group: int
    index: int
    token: int
    attempt: int


class Scoring(Checkpointing):
    """The layer below plus what reward workers do."""

    def reward_lease(self, name: str, *, max_samples: int, request: int, now: float) -> list[ToScore]:
        """Samples for this worker, oldest first. The same request again gets the same samples."""
        worker = self.workers.get(("reward", name)) or self.saw("reward", name, now)
        held = self.scoring.setdefault(name, set())
        again = [key for key in sorted(held) if self.reward_leases[key].request == request]
        if again or request <= worker.answered:
            return [self._item(key) for key in again]
        others = {
            other.name for (role, _), other in self.workers.items()
            if role == "reward" and now - other.seen <= self.settings.lease_timeout_s
        } - {name}  # fmt: skip
        taken: list[tuple[int, int]] = []
        for key in self.to_score:
            if len(taken) == max_samples:
                break
            failed_by = self.groups[key[0]].samples[key[1]].failed_by
            if name not in failed_by or not others - set(failed_by):
                taken.append(key)
        for key in taken:
            del self.to_score[key]
            held.add(key)
            self.reward_leases[key] = RewardLease(self._new_token(), name, request)
        return [self._item(key) for key in taken]

    def _item(self, key: tuple[int, int]) -> ToScore:
        return ToScore(*key, self.reward_leases[key].token, self.groups[key[0]].samples[key[1]].failures)

    def scores(self, message: Scores, *, now: float) -> ScoresReply:
        """Take scores and failures."""
        self.saw("reward", message.worker, now)
        refused: dict[str, str] = {}
        accepted = 0
        for score in message.scores:
            why = self._score(score, message.worker, now, message.reward_version)
            accepted += not why
            if why:
                refused[f"{score.group}:{score.index}"] = why
        for failure in message.failures:
            why = self._failure(failure, message.worker, now)
            accepted += not why
            if why:
                refused[f"{failure.group}:{failure.index}"] = why
        return ScoresReply(accepted, refused)

    def _sample_for(self, item: Score | RewardFailure) -> tuple[Group, Sample] | str:
        """The sample that the answer is for, or why it is refused."""
        group = self.groups.get(item.group)
        sample = group.samples.get(item.index) if group else None
        if group is None or sample is None:
            return self._ended_reason(item.group) if group is None else "unknown sample"
        if sample.reward is not None:
            return "already scored"
        lease = self.reward_leases.get((item.group, item.index))
        # Without a lease (expired, or the service was restarted) an answer still counts, if it is one of the sample
        # that is there now: tokens grow, and this sample came under a token of its own.
        if (lease is not None and lease.token != item.token) or item.token <= sample.token:
            return "token: the reward lease was lost"
        return group, sample

    def _release_score(self, key: tuple[int, int]) -> None:
        lease = self.reward_leases.pop(key, None)
        if lease is not None:
            self.scoring[lease.worker].discard(key)
        self.to_score.pop(key, None)

    def _score(self, score: Score, worker: str, now: float, version: str = "") -> str:
        found = self._sample_for(score)
        if isinstance(found, str):
            return found
        if not (math.isfinite(score.reward) and all(math.isfinite(part) for part in score.parts.values())):
            failure = RewardFailure(score.group, score.index, score.token, "not_finite", f"reward {score.reward}")
            return self._failure(failure, worker, now)
        group, sample = found
        self._release_score((score.group, score.index))
        self._out(group)
        sample.reward, sample.parts = score.reward, dict(score.parts)
        more: dict[str, Any] = {"parts": sample.parts} if sample.parts else {}
        if version:
            more["version"] = version
        self._event(now, "score", g=group.id, i=score.index, reward=score.reward, worker=worker, **more)
        verdict = self._ready_if_scored(group, now)
        self._in(group)
        if verdict is not None:
            self._end_by(group, verdict, now)
        return ""

    def _failure(self, failure: RewardFailure, worker: str, now: float) -> str:
        found = self._sample_for(failure)
        if isinstance(found, str):
            return found
        group, sample = found
        self._release_score((failure.group, failure.index))
        if sample.failures >= self.settings.reward_retries:
            detail = f"{failure.reason}: {failure.detail}"
            self._end(group, State.DEAD, "reward_failed", now, detail)
            self._count_failed("reward_failed", detail)
            return ""
        self._out(group)
        sample.failures += 1
        sample.failed_by = tuple(sorted({*sample.failed_by, worker}))
        self._in(group)
        return ""
