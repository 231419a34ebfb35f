"""The evaluations of a run: when one begins and ends, and the result of every prompt.

One evaluation runs at a time. Another that comes due meanwhile waits for its end; if several do, the newest waits and
the others are skipped, counted, with a line in the history. Guarantees:
1. an evaluation ends when every prompt is scored or has failed, at the latest `evaluation.timeout_s` after it began.
   The remaining prompts are missing then, counted by what they waited for, and their leases are cancelled;
2. `prompts = scored + failed + missing` for every evaluation that ended, and its figures are of the scored ones alone;
3. an evaluation measures exactly one version, fixed by its first lease and named by its line: that of its step, or a
   later one if no producer asked while it had the step's; and one set of weights, because a learner that went back may
   train other weights with this number. If the version is lost (the last producer that holds it was killed, or it was
   trained again), all samples are dropped and the evaluation begins again, at most `buffer.max_reissue` times; it ends
   instead if a newer one waits. A step that is trained again with the same weights (same digest) is not evaluated
   again; with other weights it is, and the unfinished evaluation of it ends;
4. all state is in rows: after a kill of the service an evaluation continues with the answers it has, and has its full
   time again.

Example: evaluations after steps 10 and 20 of 64 prompts; the second comes due while 4 prompts of the first are in
progress, so it waits. They return: the first ends with 64 = 64 + 0 + 0, and the second begins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import HandshakeError
from asyncrl.evaluation.ids import MAX_ROWS
from asyncrl.evaluation.statistics import Outcome, figures, metric_names
from buffers.evaluation.records import HeldOut, Prompt, PromptTable, Round
from buffers.evaluation.work import PromptLeases, PromptOutcome, PromptWork
from buffers.groups.leases import Leases
from buffers.groups.machine import GroupMachine
from buffers.groups.sample_intake import SampleIntake
from buffers.groups.scoring import Scoring

LOST_VERSION = "no producer holds its version any more"
OTHER_WEIGHTS = "its version was trained again with other weights"
TIME = "time"  # why an evaluation ended with prompts missing


class Evaluations:
    """The evaluations of a run, next to the state machine of training: they share workers, judges and transaction."""

    def __init__(self, config: Config, machine: GroupMachine) -> None:
        self.config = config.evaluation
        self.run_config = config
        self.machine = machine
        self.tx = tx = machine.tx
        self.workers = machine.workers
        judges = machine.judges.drop_teachers()
        self.table = PromptTable(tx, machine.workers, judges, samples=config.evaluation.samples)
        self.leases = Leases(tx, self.table, machine.workers, machine.live, PromptOutcome(self.table))
        self.prompt_leases = PromptLeases(config, self.table, machine, self.leases)
        self.work = PromptWork(self.table, self.leases)
        common: dict[str, Any] = {"live": machine.live, "budget": machine.budget, "target": self.work}
        self.intake = SampleIntake(tx, machine.table, workers=machine.workers, leases=self.leases, **common)
        self.scoring = Scoring(
            tx,
            machine.workers,
            judges=judges,
            queue=self.table.queue,
            counts=machine.scoring.counts,
            **common,
        )
        self._until = math.inf  # when the current one ends
        self._rows_by_producer: dict[str, int] = {}  # as reported since the service started
        self._written = 0  # lines of ended evaluations that `take` returned

    # ------------------------------------------------------------ rows

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows. `take` returns every ended evaluation once more: metrics may lack the last ones."""
        self.table.load(rows)

    def take(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Scored samples with their text, and a line of metrics per ended evaluation, since the last call."""
        samples, self.work.lines = self.work.lines, []
        ended, self._written = self.table.ended[self._written :], len(self.table.ended)
        return samples, ended

    # ------------------------------------------------------------ workers

    def hello(self, role: str, name: str) -> None:
        """A process introduces itself and holds nothing."""
        if role == "producer":
            self.prompt_leases.holders.note(name, -1)
            self.leases.lose_all(name, "restarted")
        elif role == "reward":
            self.scoring.lose_all(name)

    def heartbeat(self, role: str, name: str, *, pid: int, holds: tuple[tuple[int, int], ...] | None) -> None:
        """A process is alive and keeps its leases; with `holds` only those that it names."""
        if role == "producer":
            self.leases.renew(name, pid, None if holds is None else frozenset(holds))
        elif role == "reward" and holds is not None:
            self.scoring.renew(name, holds)

    # ------------------------------------------------------------ begin

    def greet(self, name: str, rows: int) -> None:
        """A producer reports how many prompts it reads. Raises `handshake.mismatch` if a living one reads another
        number."""
        if not rows or not self.config.enabled:
            return
        if rows > MAX_ROWS:
            raise HandshakeError("handshake.mismatch", f"{rows} prompts for evaluations, {MAX_ROWS} are possible")
        reported = self._rows_by_producer
        limit, now = self.machine.settings.lease_timeout_s, self.tx.now
        for other, count in reported.items():
            worker = self.workers.get("producer", other)
            if count != rows and other != name and worker is not None and now - worker.seen <= limit:
                what = f"{name} reads {rows} prompts for evaluations, {other} reads {count}"
                raise HandshakeError("handshake.mismatch", f"{what}: they read different files")
        known = {other for role, other in self.workers.known if role == "producer"}
        for other in [other for other in reported if other not in known]:
            del reported[other]
        reported[name] = rows
        if rows == self.table.meta.rows:
            return
        if self.table.meta.round is not None:
            self._close("the data changed", begin=False)  # the next one begins with the new rows
        self.table.meta.rows = rows
        self.table.put("vmeta")
        self._begin()

    def due(self, step: int, digest: str) -> None:
        """Evaluate the weights of a step, unless that was done, runs or waits already. Without a digest they are those
        that the step had before.
        """
        current, waiting, known = self.table.meta.round, self.table.meta.waiting, self.table.known_digest(step)
        had = [known] if known is not None else []
        had += [waiting[1]] if waiting is not None and waiting[0] == step else []
        had += [current.digest] if current is not None and current.step == step else []
        if had and (not digest or digest in had):
            return
        if current is not None and current.step == step:
            self._close("the step was trained again with other weights")
        if waiting is not None and waiting[0] != step:
            self._skip(f"that of step {step} came due before it could begin")
        self.table.meta.waiting = (step, digest)
        self.table.put("vmeta")
        self._begin()

    def _skip(self, why: str) -> None:
        """The evaluation that waits will not begin."""
        meta = self.table.meta
        assert meta.waiting is not None
        step, digest = meta.waiting
        meta.waiting, meta.skipped = None, meta.skipped + 1
        self.table.skip(step, digest)
        self.table.event("skip", step=step, why=why)

    def _begin(self) -> None:
        if self.table.meta.round is not None or self.table.meta.waiting is None or not self.table.meta.rows:
            return
        step, digest = self.table.meta.waiting
        number, begun = self.tx.next_token(), self.tx.timestamp
        self.table.meta.round, self.table.meta.waiting = Round(number, step, digest, self.table.meta.rows, begun), None
        self._until = self.tx.now + self.config.timeout_s
        self.table.put("vmeta")
        self.table.event(
            "begin",
            step=step,
            round=number,
            digest=digest,
            prompts=self.table.meta.rows,
            samples=self.config.samples,
        )

    # ------------------------------------------------------------ end

    def tick(self) -> None:
        """Leases of silent workers are lost; an evaluation whose time is over ends."""
        if self.table.meta.round is None:
            return
        if self._until == math.inf:  # the service was restarted
            self._until = self.tx.now + self.config.timeout_s
        self.leases.expire()
        self.scoring.expire()
        self.settle()
        self._keep_version()
        if self.tx.now >= self._until and self.table.meta.round is not None:
            self._close(TIME)

    def settle(self) -> None:
        """End the evaluation if every prompt is scored or has failed."""
        if self.table.meta.round is not None and self.table.indexes.over == self.table.meta.round.rows:
            self._close("")

    def _keep_version(self) -> None:
        """Begin again, or end, if the version is lost and prompts are left to generate."""
        current = self.table.meta.round
        if current is None or current.version < 0 or self.table.is_generated():
            return
        why = self._why_lost(current)
        if not why:
            return
        if self.table.meta.waiting is not None or current.restarts >= self.machine.settings.max_reissue:
            self._close(why)
            return
        for prompt in list(self.table.prompts.values()):
            self.table.remove(prompt)
        number, lost = self.tx.next_token(), current.version
        self.table.event("restart", step=current.step, round=current.number, now=number, version=lost, why=why)
        current.number, current.cursor, current.version, current.restarts = number, 0, -1, current.restarts + 1
        current.weights = ""
        self.table.put("vmeta")

    def _why_lost(self, current: Round) -> str:
        """Why nothing more can be generated with the weights that are measured; empty if it can."""
        machine, meta = self.machine, self.machine.table.meta
        digests = machine.table.digests.get(current.version, (current.weights,))
        gone = current.weights in meta.abandoned or current.version > meta.newest + 1
        if gone or (current.weights and digests[-1] != current.weights):
            return OTHER_WEIGHTS
        if current.version >= meta.newest:
            return ""  # a producer that starts gets exactly this version
        gone = self.prompt_leases.holders.all_gone(current.version, self.tx.now, machine.settings.lease_timeout_s)
        return LOST_VERSION if gone else ""

    def finish(self) -> None:
        """The run is over: prompts that are not scored are missing."""
        if self.table.meta.round is not None:
            self._close("the run ended", begin=False)
        if self.table.meta.waiting is not None:
            self._skip("the run ended")

    def lose_payloads(self, numbers: Sequence[int]) -> None:
        """The bytes of these prompts are gone (power loss, damaged disk): generate them again."""
        for number in numbers:
            prompt = self.table.prompts[number]
            self.table.cancel(prompt)
            with self.table.edit(prompt):
                self.table.free(prompt)
                prompt.samples = {}
            self.leases.lose(prompt, "payload_lost")

    def _close(self, why: str, *, begin: bool = True) -> None:
        """End the current evaluation: account, figures, rows."""
        meta = self.table.meta
        current = meta.round
        assert current is not None
        line = self._line(current, why)
        self.table.event("end", **line)
        for prompt in list(self.table.prompts.values()):
            self.table.remove(prompt)
        meta.round, self._until = None, math.inf
        self.table.end(line)
        if begin:
            self._begin()

    def _line(self, current: Round, why: str) -> dict[str, Any]:
        """The line of an evaluation in metrics and history: labels and metrics by name."""
        failed = Counter(prompt.failed for prompt in self.table.prompts.values() if prompt.failed)
        missing = self._count_missing(current)
        scored = [prompt for prompt in self.table.prompts.values() if prompt.scored]
        samples = [sample for prompt in scored for sample in prompt.samples.values()]
        correct_above = self.run_config.learner.algorithm.shaping.correct_above
        rewards = self.run_config.reward
        same = {one.label for one in rewards if len(rewards) == 1}  # the only part is the reward itself
        found = figures([_outcome(prompt, without=same) for prompt in scored], correct_above=correct_above)
        line = {
            "step": current.step, "round": current.number, "digest": current.digest, "why": why,
            "failed": dict(failed), "missing": dict(missing), "sources": dict(Counter(one.source for one in scored)),
            "evaluation_prompts": current.rows, "evaluation_scored": len(scored),
            "evaluation_failed": failed.total(), "evaluation_missing": missing.total(),
            "evaluation_samples": self.config.samples,
            "evaluation_s": round(self.tx.wall_time - current.begun, 3),
            "evaluation_version": current.version,
            "evaluation_refused": current.refused, "evaluation_restarts": current.restarts,
            "evaluation_skipped": self.table.meta.skipped,
        }  # fmt: skip
        if samples:
            line |= {
                "evaluation_version_min": min(sample.oldest for sample in samples),
                "evaluation_version_max": max(sample.newest for sample in samples),
                "evaluation_length_mean": sum(sample.length for sample in samples) / len(samples),
                "evaluation_truncated_share": sum(sample.finish == "length" for sample in samples) / len(samples),
            }
        return line | metric_names(found, k=self.config.samples)

    def _count_missing(self, current: Round) -> Counter[str]:
        """The number of prompts without a result by what they waited for."""
        waited = Counter({"waits for a producer": current.rows - current.cursor})
        for prompt in self.table.prompts.values():
            if not (prompt.scored or prompt.failed):
                held = "is being generated" if prompt.holder else "waits for a producer"
                waited["waits for scores" if self.table.is_complete(prompt) else held] += 1
        return +waited

    # ------------------------------------------------------------ status

    def progress(self) -> str:
        """`of step 20: 12 of 64 prompts are over, 31 s of 600 s`; empty if none runs or waits."""
        current, waiting = self.table.meta.round, self.table.meta.waiting
        if current is not None:
            spent = min(max(0.0, self.config.timeout_s - (self._until - self.tx.now)), self.config.timeout_s)
            measured = f" (version {current.version})" if current.version >= 0 else ""
            text = (
                f"of step {current.step}{measured}: {self.table.indexes.over} of {current.rows} prompts are over, "
                f"{spent:.0f} s of {self.config.timeout_s:g} s"
            )
            return text + (f"; that of step {waiting[0]} is next" if waiting else "")
        if waiting is not None:
            return f"of step {waiting[0]}: no producer has reported how many prompts there are"
        return ""

    def status(self) -> dict[str, Any]:
        """For `asyncrl status`; empty if evaluations are off."""
        if not self.config.enabled:
            return {}
        found: dict[str, Any] = {"running": self.progress(), "ended": len(self.table.ended), "last": {}}
        found["skipped"] = self.table.meta.skipped
        if self.table.meta.round is not None:
            missing = self._count_missing(self.table.meta.round)
            failed = sum(bool(prompt.failed) for prompt in self.table.prompts.values())
            found |= {
                "step": self.table.meta.round.step,
                "version": self.table.meta.round.version,
                "prompts": self.table.meta.round.rows,
                "failed": failed,
                "scored": self.table.indexes.over - failed,
                "left": dict(missing),
            }
        if self.table.ended:
            found["last"] = self.table.ended[-1]
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
