"""Requests of the learner: registration, batches, commits, checkpoints, the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from asyncrl import wire
from asyncrl.config.mode import is_evaluation_due
from asyncrl.errors import AsyncRLError, error_for
from asyncrl.net.responder import Call
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.run_dir import run_id
from buffers.groups.records import ledger_of
from buffers.service.context import Context
from buffers.service.polls import Poll
from buffers.service.replies import batch_by_place, batch_reply


class LearnerRequests:
    """A claim waits here until its batch is complete, a registration until the learner before it is gone."""

    def __init__(
        self,
        context: Context,
        *,
        process_gone: Callable[[int, str], bool],
        history_head: Callable[[], str],
        write_metrics: Callable[[int], None],
    ) -> None:
        """`history_head`: the head of the history's chain, which the learner keeps elsewhere."""
        self.context = context
        self.claim_poll: Poll | None = None
        self._process_gone = process_gone
        self._history_head = history_head
        self._write_metrics = write_metrics
        self._registering: tuple[Call, float] | None = None  # the call, and since when it waits

    # ------------------------------------------------------------ registration

    def register(self, call: Call) -> None:
        """A `Register` message."""
        self._register(call, since=math.inf)

    def _register(self, call: Call, *, since: float) -> None:
        """`since`: when it began to wait for a sign of life of the learner before it."""
        ask: wire.Register = call.message
        context, machine = self.context, self.context.machine
        context.check_fingerprint(ask.name, ask.fingerprint, leads=True)
        name, pid, host = machine.table.meta.learner
        try:
            epoch = machine.register(
                name=ask.name,
                pid=ask.pid,
                host=ask.host,
                step=ask.step,
                ledger=ledger_of(ask.ledger),
                takeover=ask.takeover,
                now=context.now,
                process_gone=bool(name) and self._process_gone(pid, host),
                digests=ask.digests,
                once=ask.once,
            )
        except AsyncRLError as error:
            first = machine.workers.get("learner", name)
            waits = error.code == "learner.duplicate" and not machine.table.meta.done
            if not waits or (first is not None and first.seen > since):
                raise
            # The next heartbeat of the first learner shows whether it is alive, or its silence within 10 s.
            self._registering = call, min(since, context.now)
            return
        failpoint("buffer.after_reconcile")
        if ask.step == 0 and is_evaluation_due(context.config, 0):
            context.evaluations.due(0, "")
        folder, nonce = context.segments.location()
        registered = wire.Registered(epoch, run_id(context.config), machine.table.frontier, folder, nonce)
        context.answer(call, registered)

    def retry_registration(self) -> None:
        """Look again at a registration that waits."""
        if self._registering is None:
            return
        (call, since), self._registering = self._registering, None
        try:
            self._register(call, since=since)
        except AsyncRLError as error:
            if error.code == "internal":  # the table is half edited: it must not be persisted
                raise
            self.context.refuse(call, error)

    # ------------------------------------------------------------ batches

    def claim(self, call: Call) -> None:
        """A `Claim`: it becomes a poll and supersedes an older one."""
        ask: wire.Claim = call.message
        self.context.machine.batches.fence(ask.epoch)
        self.context.machine.batches.see_learner()
        if self.claim_poll is not None and self.claim_poll.call.request != call.request:
            self.context.answer(self.claim_poll.call, wire.NotYet("superseded by a newer claim", 0, 0))
        self.claim_poll = self.context.poll(call, ask.wait_s)

    def look_at_poll(self) -> None:
        """Answer the claim if its batch is complete, or its time is over."""
        poll, self.claim_poll = self.claim_poll, None
        if poll is None:
            return
        try:
            if self._hand_out(poll.call):
                return
        except AsyncRLError as error:
            if error.code == "internal":
                raise
            self.context.refuse(poll.call, error)
            return
        machine = self.context.machine
        if self.context.now >= poll.until or self.context.stop_reason:
            ready, wanted = len(machine.table.indexes.ready), machine.schedule.batch_size(poll.call.message.step)
            self.context.answer(poll.call, wire.NotYet(machine.diagnosis(self.context.now), ready, wanted))
        else:
            self.claim_poll = poll

    def _hand_out(self, call: Call) -> bool:
        """Answer a claim with its batch; False if it has to wait."""
        ask: wire.Claim = call.message
        context, machine = self.context, self.context.machine
        claimed = machine.claim(epoch=ask.epoch, step=ask.step, version=ask.version, now=context.now)
        if claimed is None:
            return False
        context.segments.flush()
        lengths = context.lengths.values()
        if ask.by_place:
            reply = batch_by_place(claimed, machine.table)
            context.answer(call, msgspec.structs.replace(reply, lengths=lengths))
            return True
        batch, payloads, damaged = batch_reply(claimed, machine.table, context.segments)
        if damaged:
            machine.batches.lose_payloads(damaged)  # the claim is looked at again at the next tick
            return False
        context.answer(call, msgspec.structs.replace(batch, lengths=lengths), payloads)
        return True

    def commit(self, call: Call) -> None:
        """A `Commit`; an evaluation may come due with it."""
        ask: wire.Commit = call.message
        self.context.machine.commit(
            epoch=ask.epoch,
            step=ask.step,
            version=ask.version,
            digest=ask.digest,
            now=self.context.now,
            groups=ask.groups,
        )
        if is_evaluation_due(self.context.config, ask.step):
            known = self.context.machine.table.digests.get(ask.step, ("",))[-1]
            self.context.evaluations.due(ask.step, ask.digest or known)  # a replayed step may not be published again
        self._write_metrics(ask.step)
        self.context.answer(call, wire.Ok(self._history_head()))

    def quarantine(self, call: Call) -> None:
        """A `Quarantine`: the messages of the groups become dead letters before their payloads are freed."""
        ask: wire.Quarantine = call.message
        batches = self.context.machine.batches
        batches.fence(ask.epoch)
        self._keep_dead(ask)
        batches.quarantine(epoch=ask.epoch, step=ask.step, groups=ask.groups, reason=ask.reason)
        self.context.answer(call, wire.Ok())

    def _keep_dead(self, ask: wire.Quarantine) -> None:
        for number in ask.groups:
            group = self.context.machine.table.groups.get(number)
            if group is None or group.step != ask.step:
                continue
            for at, record in enumerate(group.records):
                token = min((sample.token for sample in group.samples.values() if sample.record == at), default=0)
                if not token:  # what a teacher said about them
                    continue
                try:
                    header, payload = self.context.segments.read(record)
                except (AsyncRLError, OSError):
                    continue  # damaged: the claim reports it
                self.context.dead_letters.put(group=number, token=token, header=header, payload=payload)

    # ------------------------------------------------------------ checkpoints and the end

    def ledger(self, call: Call) -> None:
        """A `LedgerRequest`: what a checkpoint says about groups."""
        ask: wire.LedgerRequest = call.message
        ledger = self.context.machine.batches.ledger(epoch=ask.epoch, step=ask.step)
        ledger = msgspec.structs.replace(ledger, history=self._history_head())
        self.context.answer(call, wire.LedgerReply(ledger.to_json()))

    def checkpointed(self, call: Call) -> None:
        """A checkpoint is durable."""
        self.context.machine.batches.checkpointed(epoch=call.message.epoch, step=call.message.step)
        self.context.answer(call, wire.Ok())

    def goodbye(self, call: Call) -> None:
        """The learner ends."""
        ask: wire.Goodbye = call.message
        self.context.machine.batches.goodbye(epoch=ask.epoch, done=ask.done, reason=ask.reason, step=ask.step)
        self.context.continues = False
        if ask.done:
            self.context.evaluations.finish()
        self.context.answer(call, wire.Ok())

    def evaluations(self, call: Call) -> None:
        """An `EvaluationsRequest`: the evaluations that ended after those the learner has seen."""
        evaluations = self.context.evaluations
        lines = (line for line in evaluations.table.ended if line["round"] > call.message.seen)
        ended = tuple(msgspec.json.encode(line).decode() for line in lines)
        self.context.answer(call, wire.EvaluationsReply(ended, evaluations.progress()))

    def close(self) -> None:
        """Refuse a registration that waits."""
        if self._registering is not None:
            self.context.refuse(self._registering[0], error_for("net.unreachable", "the buffer stops"))
