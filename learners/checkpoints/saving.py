"""Writes one rank's checkpoints, in the step or in a thread during training.

Guarantees:
1. a checkpoint holds weights, optimizer and ledger of its step: an asynchronous one (`learner.checkpoint_async`) is
   copied to host memory within the step, and the copy is written;
2. one checkpoint is in progress at a time: the next one, and the end of the run, wait for it;
3. `durable` is called on rank 0, in the main thread, only after the checkpoint is renamed and synced;
4. file system errors are counted and reported on every rank; `learner.checkpoint_failures` in a row raise. Other errors
   are raised when the main thread next calls `settle`;
5. writers use a process group of their own, separate from training;
6. every wait for the writer ends after `run.hang_timeout_s` with `hang`.

An asynchronous checkpoint needs host memory for a copy of this rank's state (12 bytes per float32 parameter with
AdamW). The last checkpoint of a run is written without a copy.
Example: every 20 steps of 30 s, 3 s to copy and 200 s to write: training pauses for 3 s instead of 203 s, and a crash
loses at most 20 steps and those begun while the newest checkpoint was written (7).

      save             copied                 renamed, synced               settle
    ---------> COPY --------------> WRITING ------------------> WRITTEN -----------------> durable, counted
    (step)           (thread)                                            (between steps)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from asyncrl.runtime.run_dir import RunDir
from learners.backends.base import Backend, Snapshot
from learners.checkpoints import checkpoint, retention
from learners.gang.gang import Gang, waiting_s

CLOSE_S = 20.0  # longest wait for the writer after an error, before torchrun kills the process

Durable = Callable[[checkpoint.State], None]
Fence = Callable[[], None]


class _Job:
    """A checkpoint in progress."""

    def __init__(self, step: int, state: checkpoint.State | None) -> None:
        self.step = step
        self.state = state
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.seconds = 0.0


class Checkpoints:
    """Checkpoints of one rank. `saved` is the step of the newest durable one; rank 0 calls `durable` for each."""

    def __init__(
        self, config: Config, *, gang: Gang, backend: Backend, durable: Durable, say: Callable[[str], None]
    ) -> None:
        self.saved = 0
        self.failures = 0  # in a row
        self.stats: dict[str, float] = {}
        self._config = config
        self._root = RunDir(config.run_dir).checkpoints
        self._gang = gang
        self._writer_gang = gang
        if config.learner.checkpoint_async:
            self._writer_gang = gang.clone(timeout_s=waiting_s(config))
        self._backend = backend
        self._durable = durable
        self._say = say if gang.lead else _silent
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._scores = retention.Scores(self._root, config, say=self._say) if gang.lead else None
        self._best_steps: tuple[int, ...] = ()
        self._changed = False  # a score changed since the last cleanup

    def resume_from(self, step: int) -> None:
        """Continue from the checkpoint of this step."""
        self.saved = step
        if self._scores is not None:
            self._scores.forget_after(step)

    # ------------------------------------------------------------ one checkpoint

    def save(
        self, step: int, state: checkpoint.State | None, *, fence: Fence, wait: bool = False, last: bool = False
    ) -> None:
        """Write the checkpoint of `step`, or start to (asynchronous, unless `wait`). `state` on rank 0. Collective.

        Raises:
            AsyncRLError: `disk.full` after `learner.checkpoint_failures` failures in a row, or if `last` and it failed.
        """
        self.settle()
        if self._scores is not None and step % self._config.learner.checkpoint_every == 0:
            self._scores.add_checkpoint(step)
        job, ranking = _Job(step, state), self._ranking(step)
        if not self._config.learner.checkpoint_async or wait or last:
            self._write(job, self._backend, self._gang, fence, ranking)
            self._handle(job, last=last)
            return
        self._job = job
        self._thread = threading.Thread(
            target=self._write,
            args=(job, self._backend.snapshot(), self._writer_gang, fence, ranking),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def _write(self, job: _Job, part: Snapshot, gang: Gang, fence: Fence, ranking: retention.Ranking | None) -> None:
        started = time.monotonic()
        try:
            checkpoint.save(
                self._root,
                job.state,
                step=job.step,
                backend=part,
                gang=gang,
                fence=fence,
                ranking=ranking,
                keep=self._config.learner.checkpoint_keep,
            )
        except AsyncRLError as error:
            job.error = error.with_traceback(None)  # its frames hold the copy in memory
        except Exception as error:  # the main thread raises it
            job.error = error
        job.seconds = time.monotonic() - started
        job.ended.set()

    def has_ended(self) -> bool:
        """Whether a checkpoint has ended and `settle` was not called yet."""
        return self._job is not None and self._job.ended.is_set()

    def settle(self) -> None:
        """Wait for the checkpoint in progress and handle its result. On all ranks or none. Raises like `save`."""
        job, self._job = self._job, None
        if job is None:
            return
        limit = self._config.run.hang_timeout_s
        if not job.ended.wait(limit):
            raise AsyncRLError(
                "hang", f"the checkpoint of step {job.step} is not written after {limit:g} s", where=str(self._root)
            )
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # its frame holds the copy in memory
        self._handle(job)

    def _handle(self, job: _Job, *, last: bool = False) -> None:
        error, learner = job.error, self._config.learner
        if error is None:
            self.failures, self.saved = 0, job.step
            self.stats["checkpoint_write_s"] = job.seconds
            if job.state is not None:
                self._durable(job.state)
            return
        if not isinstance(error, AsyncRLError) or error.code != "disk.full":
            raise error
        self.failures += 1
        if last or self.failures >= learner.checkpoint_failures:
            raise error
        self._say(
            f"ERROR: {error.message}. The newest checkpoint is of step {self.saved}; failed in a row: "
            f"{self.failures}, the run ends at {learner.checkpoint_failures}. {error.remedy}"
        )

    def close(self) -> None:
        """Wait shortly for a checkpoint in progress, when the process ends. Raises nothing."""
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)

    # ------------------------------------------------------------ the best ones

    def note(self, values: Mapping[str, float], evaluated: Mapping[int, Mapping[str, float]]) -> None:
        """Add the metrics of a step (or none) and finished evaluations by step. On rank 0."""
        if self._scores is None:
            return
        self._scores.add_metrics(values)
        self._changed = self._scores.add_evaluations(evaluated) or self._changed
        if self._changed and self._job is None and self.saved:
            self._changed, keep = False, self._config.learner.checkpoint_keep
            checkpoint.clean(self._root, step=self.saved, keep=keep, ranking=self._ranking(self.saved))

    def _ranking(self, step: int) -> retention.Ranking | None:
        """Return the ranking with the checkpoint of `step`; report a change."""
        if self._scores is None:
            return None
        known = sorted({*checkpoint.steps_in(self._root), step})
        ranking = self._scores.ranking(known)
        if ranking is not None and (best := retention.best(known, ranking)) != self._best_steps:
            self._best_steps = best
            each = ", ".join(f"step {number} {ranking.scores[number]:.4g}" for number in best)
            self._say(f"best checkpoints by {ranking.metric}: {each}")
        return ranking


def _silent(_text: str) -> None:
    """Report nothing: only rank 0 prints."""
