"""The evaluations of a run: when one begins, when it ends, and what came of every prompt.

Held by `buffers.service.service` beside the state machine of training. One evaluation runs at a time. Where another
comes due
meanwhile it waits for the end of the first; where several do, the newest waits and the others are skipped, and it is
said. Guarantees:
1. an evaluation ends when every prompt is scored or has failed, at the latest `evaluation.timeout_s` after it began:
   prompts without an ending are missing then, counted by what they waited for, and their leases are cancelled;
2. `prompts = scored + failed + missing` for every evaluation that ended, and the figures are of the scored ones alone;
3. each is made by the weights of its step or later ones, and the oldest and newest version of its samples are told. A
   step that is trained again with the same weights (same digest) is not evaluated again; with others it is, and what
   was begun of it is given up;
4. all of it is in rows: after a kill of the service an evaluation goes on with what was answered, and has its whole
   time again.

Example: evaluations after steps 10 and 20 of 64 prompts, the second comes due while 4 prompts of the first are under
way: it waits. They come back: the first ends with 64 = 64 + 0 + 0, and the second begins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import HandshakeError
from asyncrl.evaluation.ids import MAX_ROWS
from asyncrl.evaluation.statistics import Outcome, figures, metric_names
from buffers.evaluation.records import HeldOut, Prompt, Round
from buffers.evaluation.work import EvaluationWork
from buffers.groups.leasing import Leasing

TIME = "time"  # why an evaluation ended with prompts missing


class Evaluations(EvaluationWork):
    def __init__(self, config: Config, groups: Leasing) -> None:
        super().__init__(config, groups)
        self._until = math.inf  # when the one that runs ends
        self._rows_of: dict[str, int] = {}  # what producers said, in this life of the service

    # ------------------------------------------------------------ begin

    def greet(self, name: str, rows: int, now: float) -> None:
        """A producer says how many prompts it reads. `handshake.mismatch` where a living one reads another number."""
        if not rows or not self.config.enabled:
            return
        if rows > MAX_ROWS:
            raise HandshakeError("handshake.mismatch", f"{rows} prompts for evaluations, {MAX_ROWS} are possible")
        said = self._rows_of
        limit = self.groups.settings.lease_timeout_s
        for other, count in said.items():
            worker = self.groups.workers.get(("producer", other))
            if count != rows and other != name and worker is not None and now - worker.seen <= limit:
                what = f"{name} reads {rows} prompts for evaluations, {other} reads {count}"
                raise HandshakeError("handshake.mismatch", f"{what}: they see other files")
        known = {other for role, other in self.groups.workers if role == "producer"}
        for other in [other for other in said if other not in known]:
            del said[other]
        said[name] = rows
        if rows == self.meta.rows:
            return
        if self.meta.round is not None:
            self._close("the data changed", now)
        self.meta.rows = rows
        self._touch("vmeta")
        self._begin(now)

    def due(self, step: int, digest: str, now: float) -> None:
        """The weights of a step are to be evaluated; nothing where that was done, runs or waits already."""
        current, waiting = self.meta.round, self.meta.waiting
        if self.meta.known.get(step) == digest or waiting == (step, digest):
            return
        if current is not None and current.step == step:
            if current.digest == digest:
                return
            self._close("the step was trained again with other weights", now)
        if waiting is not None and waiting[0] != step:
            self.meta.known[waiting[0]] = waiting[1]
            self._event(now, "skip", step=waiting[0], why=f"that of step {step} came due before it could begin")
        self.meta.waiting = (step, digest)
        self._touch("vmeta")
        self._begin(now)

    def _begin(self, now: float) -> None:
        if self.meta.round is not None or self.meta.waiting is None or not self.meta.rows:
            return
        step, digest = self.meta.waiting
        number, begun = self.groups._new_token(), round(now + self.groups.wall_offset, 6)
        self.meta.round, self.meta.waiting = Round(number, step, digest, self.meta.rows, begun), None
        self._until = now + self.config.timeout_s
        self._touch("vmeta")
        self._event(
            now, "begin", step=step, round=number, digest=digest, prompts=self.meta.rows, samples=self.config.samples
        )

    # ------------------------------------------------------------ end

    def tick(self, now: float) -> None:
        """What time alone does, and the end of an evaluation whose last prompt came in."""
        current = self.meta.round
        if current is None:
            return
        if self._until == math.inf:  # the service was restarted
            self._until = now + self.config.timeout_s
        self.expire(now)
        if self.over == current.rows:
            self._close("", now)
        elif now >= self._until:
            self._close(TIME, now)

    def settle(self, now: float) -> None:
        """After every drain: an evaluation with all prompts in ends at once."""
        if self.meta.round is not None and self.over == self.meta.round.rows:
            self._close("", now)

    def finish(self, now: float) -> None:
        """The run is over: what is not scored is missing."""
        if self.meta.round is not None:
            self._close("the run ended", now, begin=False)
        if self.meta.waiting is not None:
            self._event(now, "skip", step=self.meta.waiting[0], why="the run ended")
            self.meta.known[self.meta.waiting[0]] = self.meta.waiting[1]
            self.meta.waiting = None
            self._touch("vmeta")

    def lose_payloads(self, numbers: Sequence[int], *, now: float) -> None:
        """Their bytes are gone (power loss, damaged disk): generate them again."""
        for number in numbers:
            prompt = self.prompts[number]
            self._tell_holder(prompt, now)
            self._out(prompt)
            self._forget_samples(prompt)
            prompt.samples = {}
            prompt.holder = ""
            self._in(prompt)
            self._lose(prompt, "payload_lost", now)

    def _close(self, why: str, now: float, *, begin: bool = True) -> None:
        """End the one that runs: account, figures, rows."""
        current = self.meta.round
        assert current is not None
        line = self._line(current, why, now)
        self.ended.append(line)
        self._event(now, "end", **line)
        for prompt in list(self.prompts.values()):
            self._tell_holder(prompt, now)
            self._out(prompt)
            self._forget_samples(prompt)
            del self.prompts[prompt.id]
            self._touch(f"v{prompt.id}")
        self.meta.known[current.step] = current.digest
        self.meta.round, self.meta.ended, self._until = None, len(self.ended), math.inf
        self._touch("vmeta")
        self._touch(f"w{len(self.ended) - 1}")
        if begin:
            self._begin(now)

    def _line(self, current: Round, why: str, now: float) -> dict[str, Any]:
        """What is told of an evaluation: labels and metrics by name."""
        failed = Counter(prompt.failed for prompt in self.prompts.values() if prompt.failed)
        missing = self._missing(current)
        scored = [prompt for prompt in self.prompts.values() if prompt.scored]
        samples = [sample for prompt in scored for sample in prompt.samples.values()]
        right = self.whole.learner.algorithm.shaping.correct_above
        same = {one.label for one in self.whole.reward if len(self.whole.reward) == 1}  # that part is the reward
        found = figures([_outcome(prompt, without=same) for prompt in scored], correct_above=right)
        line = {
            "step": current.step, "round": current.number, "digest": current.digest, "why": why,
            "failed": dict(failed), "missing": dict(missing), "sources": dict(Counter(one.source for one in scored)),
            "evaluation_prompts": current.rows, "evaluation_scored": len(scored),
            "evaluation_failed": failed.total(), "evaluation_missing": missing.total(),
            "evaluation_samples": self.config.samples,
            "evaluation_s": round(now + self.groups.wall_offset - current.begun, 3),
        }  # fmt: skip
        if samples:
            line |= {
                "evaluation_version_min": min(sample.oldest for sample in samples),
                "evaluation_version_max": max(sample.newest for sample in samples),
                "evaluation_length_mean": sum(sample.length for sample in samples) / len(samples),
                "evaluation_truncated_share": sum(sample.finish == "length" for sample in samples) / len(samples),
            }
        return line | metric_names(found, k=self.config.samples)

    def _missing(self, current: Round) -> Counter[str]:
        """What the prompts without an ending waited for."""
        waited = Counter({"waits for a producer": current.rows - current.cursor})
        for prompt in self.prompts.values():
            if not (prompt.scored or prompt.failed):
                held = "is being generated" if prompt.holder else "waits for a producer"
                waited["waits for scores" if self._whole(prompt) else held] += 1
        return +waited

    # ------------------------------------------------------------ looking

    def running(self, now: float) -> str:
        """`of step 20: 12 of 64 prompts are over, 31 s of 600 s`; empty where none runs or waits."""
        current, waiting = self.meta.round, self.meta.waiting
        if current is not None:
            spent = min(max(0.0, self.config.timeout_s - (self._until - now)), self.config.timeout_s)
            text = (
                f"of step {current.step}: {self.over} of {current.rows} prompts are over, {spent:.0f} s of "
                f"{self.config.timeout_s:g} s"
            )
            return text + (f"; that of step {waiting[0]} is next" if waiting else "")
        if waiting is not None:
            return f"of step {waiting[0]}: no producer has said how many prompts there are"
        return ""

    def status(self, now: float) -> dict[str, Any]:
        """For `asyncrl status`; empty where evaluations are off."""
        if not self.config.enabled:
            return {}
        found: dict[str, Any] = {"running": self.running(now), "ended": len(self.ended), "last": {}}
        if self.meta.round is not None:
            missing = self._missing(self.meta.round)
            failed = sum(bool(prompt.failed) for prompt in self.prompts.values())
            found |= {
                "step": self.meta.round.step,
                "prompts": self.meta.round.rows,
                "failed": failed,
                "scored": self.over - failed,
                "left": dict(missing),
            }
        if self.ended:
            found["last"] = self.ended[-1]
        return found


def _outcome(prompt: Prompt, *, without: Set[str] = frozenset()) -> Outcome:
    """The scores of a prompt in the order of its samples, `without` these parts."""
    samples: list[HeldOut] = [prompt.samples[index] for index in sorted(prompt.samples)]
    names = sorted({name for sample in samples for name in sample.parts} - without)
    return Outcome(
        prompt.source,
        tuple(float(sample.reward or 0.0) for sample in samples),
        tuple(sample.answer for sample in samples),
        {name: tuple(sample.parts[name] for sample in samples if name in sample.parts) for name in names},
    )
