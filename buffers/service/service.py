"""The buffer service without its process: takes requests, asks the state machine, persists, answers.

A drain handles up to 16 requests and looks at the polls. Then it writes payloads to the segment file, rows to the store
and lines to the history, and only then sends the answers. Guarantees:
1. nothing is answered that is not persisted;
2. a long poll waits here without work and is answered once: on capacity, at its deadline or at the stop. The same
   request sent again replaces the first; a newer LeaseRequest of a producer supersedes its older one, which gets
   nothing but what it was granted before, if its answer was lost;
3. a message of a peer never ends the service: an error of the catalogue is the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, WireError
from asyncrl.net.responder import Call
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.run_dir import RunDir
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Change
from buffers.payloads.dead_letters import DeadLetters
from buffers.payloads.segments import Segments
from buffers.service.clock import AwakeClock
from buffers.service.context import Context
from buffers.service.evaluation_files import EvaluationFiles
from buffers.service.event_log import KEY, History, lines_of
from buffers.service.image_requests import ImageRequests
from buffers.service.learner_requests import LearnerRequests
from buffers.service.producer_requests import ProducerRequests
from buffers.service.reward_requests import RewardRequests
from buffers.service.session import Session
from buffers.stores.base import Store, StoreLost

STANDSTILL_S = 5.0  # a shorter standstill is not reported


class BufferService:
    """`clock` gives monotonic seconds; the simulator passes its own. `confirm` raises if another service took over."""

    def __init__(
        self,
        config: Config,
        *,
        machine: GroupMachine,
        store: Store,
        segments: Segments,
        history: History,
        process_gone: Callable[[int, str], bool],
        clock: Callable[[], float] = time.monotonic,
        confirm: Callable[[], None] = lambda: None,
        evaluations: Evaluations | None = None,
    ) -> None:
        self.machine = machine
        self.evaluations = evaluations or Evaluations(config, machine)
        self.store = store
        self.segments = segments
        self.history = history
        self._confirm = confirm
        self._clock = AwakeClock(clock, self._stood_still)
        self._evaluation_files = EvaluationFiles(config)
        self.context = Context(
            config,
            machine=machine,
            evaluations=self.evaluations,
            segments=segments,
            dead_letters=DeadLetters(RunDir(config.run_dir).dead),
        )
        self.producers = ProducerRequests(self.context)
        self.rewards = RewardRequests(self.context)
        self.images = ImageRequests(self.context)
        self.session = Session(self.context, self.producers, self.rewards, store=store.kind)
        self.learner = LearnerRequests(
            self.context,
            process_gone=process_gone,
            history_head=lambda: self.history.head,
            write_metrics=lambda step: self.session.write_metrics(step=step),
        )
        self._seen_generation = -1
        session, producers, rewards, learner = self.session, self.producers, self.rewards, self.learner
        self._handlers: dict[type[Any], Callable[[Call], None]] = {
            wire.Hello: session.hello,
            wire.Heartbeat: session.heartbeat,
            wire.StatusRequest: session.status,
            wire.Tune: session.tune,
            wire.Stop: self._stop,
            wire.LeaseRequest: producers.lease,
            wire.Samples: producers.samples,
            wire.SamplesAt: producers.samples_at,
            wire.Pieces: producers.pieces,
            wire.LeaseReturn: producers.give_back,
            wire.StoreImages: self.images.store,
            wire.FetchImages: self.images.fetch,
            wire.RewardRequest: rewards.lease,
            wire.Scores: rewards.scores,
            wire.TeacherLogprobs: rewards.teaching,
            wire.Register: learner.register,
            wire.Claim: learner.claim,
            wire.Commit: learner.commit,
            wire.Quarantine: learner.quarantine,
            wire.LedgerRequest: learner.ledger,
            wire.Checkpointed: learner.checkpointed,
            wire.Goodbye: learner.goodbye,
            wire.EvaluationsRequest: learner.evaluations,
        }

    def _stood_still(self, seconds: float) -> None:
        """The service did not run for a while: wall time goes on, and no lease is charged for it."""
        self.machine.tx.wall_offset += seconds
        if seconds >= STANDSTILL_S:
            print(f"buffer: it stood still for {seconds:.1f} s, which count against no lease", flush=True)

    # ------------------------------------------------------------ the drain

    def handle(self, calls: Sequence[Call]) -> None:
        """The requests of one drain: one transaction."""
        self._confirm()
        self.machine.begin(self._clock())
        for call in calls:
            handler = self._handlers.get(type(call.message))
            try:
                if handler is None:
                    raise WireError("wire.unexpected", f"the buffer takes no {type(call.message).__name__}")
                self.context.peers.admit(call, self.context.now)
                handler(call)
            except AsyncRLError as error:
                if error.code == "internal":
                    raise
                self.context.refuse(call, error)
        self._look_at_polls()
        self.flush()

    def tick(self) -> None:
        """Every 0.2 s: take the leases of silent workers, answer polls whose time is over."""
        self._confirm()
        now = self._clock()
        self.machine.tick(now)
        self.evaluations.tick()
        self.learner.retry_registration()
        self._look_at_polls(clock=True)
        self.flush()

    def flush(self) -> None:
        """Persist the transaction, then send the answers."""
        self.segments.flush()
        self.evaluations.settle()
        changes = self.machine.take()
        samples, ended = self.evaluations.take()
        lines = self.history.seal(lines_of(changes.events)) if changes.events else b""
        rows = [*changes.rows, Change(KEY, lines)] if lines else changes.rows
        self._evaluation_files.write_samples(samples)
        if rows:
            self._apply(rows, lines)
        self.context.lengths.take(changes.events)
        if ended:
            self._confirm()  # a successor has written them by now
            self._evaluation_files.write_ended(ended)
        self.context.send_answers()
        if changes.freed:
            failpoint("buffer.before_release")
            self.segments.release(changes.freed)

    def _apply(self, rows: list[Change], lines: bytes) -> None:
        failpoint("buffer.before_apply")
        try:
            self.store.apply(rows)
        except StoreLost:
            print(f"buffer: the {self.store.kind} store lost its state; it is written again", flush=True)
            failpoint("buffer.at_reseed")
            self.store.reseed([*self.machine.rows(), *self.evaluations.table.rows(), Change(KEY, lines)])
            failpoint("buffer.after_reseed")
        failpoint("buffer.after_apply")
        self.history.write(lines)
        failpoint("buffer.before_answer")

    def _look_at_polls(self, *, clock: bool = False) -> None:
        """Answer what can be answered. Without a change since the last look, only deadlines can have passed."""
        changed = self.machine.tx.generation != self._seen_generation or self.context.polls_changed
        if not changed and not clock:
            return
        # The learner first: its batch makes room for the producers. Then both could make work for the reward workers.
        self.context.polls_changed = False
        self.learner.look_at_poll()
        self.producers.look_at_polls()
        self.rewards.look_at_polls()
        self._seen_generation = self.machine.tx.generation

    def _stop(self, call: Call) -> None:
        self.context.stop_reason = call.message.reason or "asked to stop"
        self.context.answer(call, wire.Ok())
        self._look_at_polls(clock=True)

    # ------------------------------------------------------------ housekeeping and end

    @property
    def stop_reason(self) -> str:
        """Why the service stops; empty while it serves."""
        return self.context.stop_reason

    def write_metrics(self) -> None:
        """Append a line to metrics/buffer.jsonl."""
        self.machine.begin(self._clock())
        self.session.write_metrics()

    def tidy(self) -> None:
        """Every second: delete files of silent producers that hold nothing, and free the names of silent processes."""
        now, limit = self._clock(), self.machine.settings.lease_timeout_s
        self.context.peers.expire(now)
        workers = self.machine.workers.known.items()
        self.segments.guests.keep_only({name for (_, name), worker in workers if now - worker.seen <= limit})

    def close(self, reason: str = "stop", *, hands_over: bool = False) -> None:
        """Answer every poll, write the remaining changes, close. `hands_over`: another service goes on and is asked
        what is not answered here.
        """
        failpoint("buffer.at_close")
        self.machine.begin(self._clock())
        if not hands_over:
            self.context.stop_reason = self.context.stop_reason or reason
            self._look_at_polls(clock=True)
            self.learner.close()
        self.flush()
        self.session.write_metrics()
        self.history.close()
        self._evaluation_files.close()
        self.segments.close()
        self.store.close()
        self.session.close()
