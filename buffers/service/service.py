"""The buffer service without its process: takes calls, asks the state machine, persists, answers.

One drain is: decide on up to 16 calls, look at the polls, then payloads
to the segment file, rows to the store, lines to the history, and only then the answers. Guarantees:
1. nothing is answered that is not persisted;
2. a long poll waits here without work and is answered once: on capacity, at its deadline or at the stop; the same
   request sent again takes the place of the first, a newer LeaseRequest of a producer supersedes its older one;
3. what a peer sends never ends the service: an error of the catalogue is the answer.
"""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.config.evaluation import is_evaluation_due
from asyncrl.config.judges import display_name
from asyncrl.errors import AsyncRLError, WireError, error_for
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.net.responder import Call
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.run_dir import RunDir, run_id
from asyncrl.wire import Buffer
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.machine import Groups
from buffers.groups.records import Change, Record, ledger_of
from buffers.groups.scoring import ToScore
from buffers.payloads import partial_samples as checkpoints
from buffers.payloads.dead_letters import DeadLetters
from buffers.payloads.record_format import GUEST_BYTES
from buffers.payloads.segments import Segments
from buffers.service.evaluation_files import EvaluationFiles, reward_items, take_scores
from buffers.service.event_log import KEY, History, lines_of
from buffers.service.replies import batch_by_place, batch_reply, reward_reply
from buffers.service.session import Desk, Poll
from buffers.stores.base import Store, StoreLost

MAX_WAIT_S = 30.0


class BufferService(Desk):
    def __init__(
        self,
        config: Config,
        *,
        groups: Groups,
        store: Store,
        segments: Segments,
        history: History,
        process_gone: Callable[[int, str], bool],
        clock: Callable[[], float] = time.monotonic,
        evaluations: Evaluations | None = None,
    ) -> None:
        held_out = evaluations or Evaluations(config, groups)
        super().__init__(config, groups=groups, store=store, evaluations=held_out, clock=clock)
        self.segments = segments
        self.history = history
        self.stop_reason = ""
        self._process_gone = process_gone
        self._dead = DeadLetters(RunDir(config.run_dir).dead)
        self._claim_poll: Poll | None = None
        self._registering: tuple[Call, float] | None = None  # and since when it waits
        self._seen_generation = (-1, -1)
        # A complete run that is started again with more steps: workers may ask before the learner has registered.
        self._goes_on = groups.meta.done and groups.meta.version < config.learner.steps
        self._evaluation_files = EvaluationFiles(config)
        self._handlers: dict[type[Any], Callable[[Call, float], None]] = {
            wire.Hello: self._hello, wire.Heartbeat: self._heartbeat, wire.StatusRequest: self._status,
            wire.Stop: self._stop, wire.LeaseRequest: self._lease_request, wire.Samples: self._samples,
            wire.SamplesAt: self._samples_at, wire.Pieces: self._pieces,
            wire.LeaseReturn: self._lease_return, wire.RewardRequest: self._reward_request, wire.Scores: self._scores,
            wire.Register: self._register, wire.Claim: self._claim, wire.Commit: self._commit,
            wire.Quarantine: self._quarantine, wire.LedgerRequest: self._ledger, wire.Checkpointed: self._checkpointed,
            wire.Goodbye: self._goodbye, wire.Tune: self._tune, wire.EvaluationsRequest: self._evaluations,
        }  # fmt: skip

    # ------------------------------------------------------------ the drain

    def handle(self, calls: Sequence[Call]) -> None:
        """The calls of one drain."""
        now = self._clock()
        for call in calls:
            handler = self._handlers.get(type(call.message))
            try:
                if handler is None:
                    raise WireError("wire.unexpected", f"the buffer takes no {type(call.message).__name__}")
                handler(call, now)
            except AsyncRLError as error:
                if error.code == "internal":
                    raise
                self._refuse(call, error)
        self._look_at_polls(now)
        self.flush()

    def tick(self) -> None:
        """Called every 0.2 s: leases of the silent, deadlines of polls."""
        now = self._clock()
        self.groups.tick(now)
        self.evaluations.tick(now)
        if self._registering is not None:
            (call, since), self._registering = self._registering, None
            try:
                self._register(call, now, since=since)
            except AsyncRLError as error:
                self._refuse(call, error)
        self._look_at_polls(now, clock=True)
        self.flush()

    def flush(self) -> None:
        self.segments.flush()
        self.evaluations.settle(self._clock())
        taken, held_out = self.groups.take(), self.evaluations.take()
        events = [*taken.events, *held_out.events] if held_out.events else taken.events
        lines = lines_of(events) if events else b""
        changes = [*taken.changes, *held_out.changes]
        changes += [Change(KEY, lines)] if lines else []
        self._evaluation_files.write_samples(held_out.samples)
        if changes:
            failpoint("buffer.before_apply")
            try:
                self.store.apply(changes)
            except StoreLost:
                print(f"buffer: the {self.store.kind} store lost its state; it is written again", flush=True)
                failpoint("buffer.at_reseed")
                self.store.reseed([*self.groups.rows(), *self.evaluations.rows(), Change(KEY, lines)])
                failpoint("buffer.after_reseed")
            failpoint("buffer.after_apply")
            self.history.write(lines)
            failpoint("buffer.before_answer")
        self._lengths.take(taken.events)
        self._evaluation_files.write_ended(held_out.ended)
        replies, self._replies = self._replies, []
        for call, message, payloads in replies:
            call.reply(message, payloads)
        if taken.freed or held_out.freed:
            failpoint("buffer.before_release")
            self.segments.release([*taken.freed, *held_out.freed])

    # ------------------------------------------------------------ polls

    def _look_at_polls(self, now: float, *, clock: bool = False) -> None:
        """Answer what can be answered. Without a change since the last look, only deadlines can have passed."""
        generation = self.groups.generation, self.evaluations.generation
        changed = generation != self._seen_generation
        if not changed and not clock:
            return
        ended = self._ended()
        # The learner first: what it takes makes room for the producers; then both could make work for the rewards.
        if self._claim_poll is not None:
            self._look_at_claim(self._claim_poll, now)
        for name, poll in list(self._lease_polls.items()):
            self._look_at_lease(name, poll, now, ended)
        for name, poll in list(self._reward_polls.items()):
            self._look_at_reward(name, poll, now, ended)
        self._seen_generation = self.groups.generation, self.evaluations.generation

    def _ended(self) -> bool:
        """No more work will come: the run is complete, or the service stops."""
        return (self.groups.meta.done and not self._goes_on) or bool(self.stop_reason)

    def _why_ended(self) -> str:
        return f"the buffer stops: {self.stop_reason}" if self.stop_reason else "the run is complete"

    def _look_at_lease(self, name: str, poll: Poll, now: float, ended: bool) -> None:
        ask: wire.LeaseRequest = poll.call.message
        leases: tuple[wire.Lease, ...] = ()
        if not ended and self.groups.fault is None:
            leases = self.groups.lease(
                name, engine_version=ask.engine_version, max_groups=ask.max_groups, request=poll.call.request, now=now
            ) + self.evaluations.lease(name, engine_version=ask.engine_version, request=poll.call.request, now=now)
        if leases or ended or now >= poll.until:
            del self._lease_polls[name]
            self._answer_lease(poll.call, leases, ended)

    def _answer_lease(self, call: Call, leases: tuple[wire.Lease, ...], ended: bool = False, why: str = "") -> None:
        ask: wire.LeaseRequest = call.message
        self._note_answered("producer", ask.producer, call)
        reason = why or (
            ""
            if leases
            else self._why_ended()
            if ended
            else self.groups.fault[1]
            if self.groups.fault
            else self.groups.lease_blocked(ask.engine_version, ask.producer)
        )
        begun, payloads = self._begun_of(leases)
        self._answer(call, wire.Leases(leases, self.groups.meta.version, reason, ended, begun), payloads)

    def _note_answered(self, role: str, name: str, call: Call) -> None:
        """Copies of this request, and of those before it, get nothing new."""
        worker = self.groups.workers.get((role, name))
        if worker is not None:  # it may have been forgotten
            worker.answered = max(worker.answered, call.request)

    def _begun_of(self, leases: Sequence[wire.Lease]) -> tuple[tuple[wire.Begun, ...], list[Buffer]]:
        """What other producers began of these, with its payloads."""
        leases = [lease for lease in leases if not is_evaluation(lease.group)]  # these have no checkpoints
        if not any(self.groups.groups[lease.group].underway for lease in leases):
            return (), []
        limit = self.config.network.max_message_bytes
        begun, payloads, damaged = checkpoints.begun_of(leases, self.groups, self.segments, max_bytes=limit)
        if damaged:
            self.groups.lose_pieces(damaged, now=self._clock())
        return begun, payloads

    def _look_at_reward(self, name: str, poll: Poll, now: float, ended: bool) -> None:
        ask: wire.RewardRequest = poll.call.message
        items = reward_items(self.groups, self.evaluations, ask=ask, request=poll.call.request, now=now)
        if items or ended or now >= poll.until:
            del self._reward_polls[name]
            self._answer_reward(poll.call, items, now, ended)

    def _answer_reward(self, call: Call, items: list[ToScore], now: float, ended: bool) -> None:
        self._note_answered("reward", call.message.worker, call)
        owners: ChainMap[int, Any] = ChainMap(self.evaluations.prompts, self.groups.groups)  # type: ignore[arg-type]
        work, payloads, damaged = reward_reply(items, owners, self.segments)
        self.groups.lose_payloads([number for number in damaged if not is_evaluation(number)], now=now)
        self.evaluations.lose_payloads([number for number in damaged if is_evaluation(number)], now=now)
        self._answer(call, wire.RewardWork(work, ended and not items), payloads)

    def _look_at_claim(self, poll: Poll, now: float) -> None:
        ask: wire.Claim = poll.call.message
        self._claim_poll = None
        try:
            claimed = self.groups.claim(epoch=ask.epoch, step=ask.step, version=ask.version, now=now)
            if claimed is not None:
                self.segments.flush()
                lengths = self._lengths.values()
                if ask.by_place:
                    reply = batch_by_place(claimed, self.groups)
                    self._answer(poll.call, msgspec.structs.replace(reply, lengths=lengths))
                    return
                batch, payloads, damaged = batch_reply(claimed, self.groups, self.segments)
                if not damaged:
                    self._answer(poll.call, msgspec.structs.replace(batch, lengths=lengths), payloads)
                    return
                self.groups.lose_payloads(damaged, now=now)  # the claim is looked at again at the next tick
        except AsyncRLError as error:
            if error.code == "internal":
                raise
            self._refuse(poll.call, error)
            return
        if now >= poll.until or self.stop_reason:
            ready = len(self.groups.ready_order)
            wanted = self.groups.batch_size(ask.step)
            self._answer(poll.call, wire.NotYet(self.groups.diagnosis(now), ready, wanted))
        else:
            self._claim_poll = poll

    # ------------------------------------------------------------ general messages

    def _stop(self, call: Call, now: float) -> None:
        self.stop_reason = call.message.reason or "asked to stop"
        self._answer(call, wire.Ok())
        self._look_at_polls(now, clock=True)

    # ------------------------------------------------------------ producers and rewards

    def _lease_request(self, call: Call, now: float) -> None:
        ask: wire.LeaseRequest = call.message
        worker = self.groups.saw("producer", ask.producer, now)
        waiting = self._lease_polls.get(ask.producer)
        if waiting is not None and waiting.call.request > call.request:
            return  # an old request sent again: its asker waits for a newer one by now
        if waiting is not None and waiting.call.request < call.request:
            self._answer_lease(waiting.call, (), why="superseded by a newer request")
        if call.request <= worker.answered:  # its answer was lost, or crossed with this copy
            self._answer_lease(
                call,
                self.groups.lease(
                    ask.producer, engine_version=ask.engine_version, max_groups=0, request=call.request, now=now
                )
                + self.evaluations.lease(
                    ask.producer, engine_version=ask.engine_version, request=call.request, now=now
                ),
                ended=self._ended(),
            )
            return
        self._lease_polls[ask.producer] = Poll(call, now + min(max(0.0, ask.wait_s), MAX_WAIT_S))
        self._seen_generation = (-1, -1)

    def _samples(self, call: Call, now: float) -> None:
        head: wire.Samples = call.message
        if len(call.payloads) != 1:
            raise WireError("wire.decode", f"samples come with one payload frame, not {len(call.payloads)}")
        # As they came, verified by the decoder.
        self._take_samples(call, head, bytes(call.header), call.payloads[0], checksum=call.checksum, now=now)

    def _samples_at(self, call: Call, now: float) -> None:
        ask: wire.SamplesAt = call.message
        limit = self.config.network.max_message_bytes
        header, payload = self.segments.guests.read(ask.producer, ask.place, max_bytes=limit)
        head = wire.decode_samples(header)
        if head.producer != ask.producer:
            raise WireError("wire.unexpected", f"samples of {head.producer} come from {ask.producer}")
        self._take_samples(call, head, header, payload, checksum=ask.place.checksum, now=now, place=ask.place)

    def _shown(self, hello: wire.Hello) -> tuple[str, str, int, int]:
        if hello.role != "producer":
            return "", "", 0, 0
        buffer = self.config.buffer
        return (*self.segments.shown(), min(buffer.segment_bytes, GUEST_BYTES), buffer.place_bytes)

    def _take_samples(
        self,
        call: Call,
        head: wire.Samples,
        header: Buffer,
        payload: Buffer,
        *,
        checksum: int,
        now: float,
        place: wire.Place | None = None,
    ) -> None:
        """Samples that came with their payload, or that lie at a place."""

        held_out = is_evaluation(head.group)

        def invalid() -> str:
            # A publish is known to producers before the learner's commit arrives here, hence one version more.
            settings, newest = self.groups.settings, self.groups.meta.newest + 1
            asked = self.evaluations.config.samples if held_out else settings.group_size + settings.over_issue
            return wire.validate_samples(head, payload, group_size=asked, newest_version=newest)

        def keep() -> Record:
            self.counters["ingest_bytes"] += memoryview(payload).nbytes
            unscored = len(head.rewards) < len(head.samples)  # reward workers will ask for it
            if place is not None:
                self.counters["place_bytes"] += memoryview(payload).nbytes
                return self.segments.adopt(place, header, payload, again=unscored)
            return self.segments.append(header, payload, checksum, again=unscored)

        takes = self.evaluations.samples if held_out else self.groups.samples
        reply = takes(head, checksum=checksum, invalid=invalid, keep=keep, now=now)
        if reply.refused and any(why.startswith("poison: ") for why in reply.refused.values()):
            self._dead.put(group=head.group, token=head.token, header=header, payload=payload)
        self.counters["duplicates"] += len(reply.duplicate)
        self.counters["refused_samples"] += len(reply.refused)
        self._answer(call, reply)

    def _pieces(self, call: Call, now: float) -> None:
        head: wire.Pieces = call.message
        if len(call.payloads) != 1:
            raise WireError("wire.decode", f"pieces come with one payload frame, not {len(call.payloads)}")
        settings, newest = self.groups.settings, self.groups.meta.newest + 1
        arrays, wrong = checkpoints.checked(
            head,
            call.payloads[0],
            group_size=settings.group_size + settings.over_issue,
            max_tokens=self.config.sampling.max_new_tokens,
            newest_version=newest,
        )
        reply = self.groups.pieces(
            head,
            invalid=lambda: wrong,
            now=now,
            keep=lambda item: checkpoints.stored(head, item, arrays, self.segments),
        )
        self.counters["refused_pieces"] += len(reply.refused)
        self._answer(call, reply)

    def _lease_return(self, call: Call, now: float) -> None:
        self.groups.give_back(call.message, now=now)
        self.evaluations.give_back(call.message, now=now)
        self._answer(call, wire.Ok())

    def _reward_request(self, call: Call, now: float) -> None:
        ask: wire.RewardRequest = call.message
        self._check_judge(ask)
        worker = self.groups.saw("reward", ask.worker, now)
        waiting = self._reward_polls.get(ask.worker)
        if waiting is not None and waiting.call.request > call.request:
            return
        if waiting is not None and waiting.call.request < call.request:
            self._answer(waiting.call, wire.RewardWork(()))
        if call.request <= worker.answered:  # its answer was lost, or crossed with this copy
            items = reward_items(self.groups, self.evaluations, ask=ask, request=call.request, now=now)
            self._answer_reward(call, items, now, self._ended())
            return
        self._reward_polls[ask.worker] = Poll(call, now + min(max(0.0, ask.wait_s), MAX_WAIT_S))
        self._seen_generation = (-1, -1)

    def _check_judge(self, ask: wire.RewardRequest | wire.Scores) -> None:
        if ask.judge not in (names := self.groups.judge_names()):
            known = ", ".join(map(display_name, names))
            raise error_for(
                "reward.judge", f"{ask.worker} scores for judge {display_name(ask.judge)!r}: this run has {known}"
            )

    def _scores(self, call: Call, now: float) -> None:
        self._check_judge(call.message)
        self._answer(call, take_scores(self.groups, self.evaluations, call.message, now=now))

    # ------------------------------------------------------------ learner

    def _register(self, call: Call, now: float, *, since: float = math.inf) -> None:
        """`since`: from when on it waits to hear of the learner before it."""
        ask: wire.Register = call.message
        self._check_fingerprint(ask.name, ask.fingerprint)
        name, pid, host = self.groups.meta.learner
        try:
            epoch = self.groups.register(
                name=ask.name,
                pid=ask.pid,
                host=ask.host,
                step=ask.step,
                ledger=ledger_of(ask.ledger),
                takeover=ask.takeover,
                now=now,
                process_gone=bool(name) and self._process_gone(pid, host),
                digests=ask.digests,
                once=ask.once,
            )
        except AsyncRLError as error:
            first = self.groups.workers.get(("learner", name))
            waits = error.code == "learner.duplicate" and not self.groups.meta.done
            if not waits or (first is not None and first.seen > since):
                raise
            # Whether the first one still lives shows at its next heartbeat, or in 10 s.
            self._registering = call, min(since, now)
            return
        failpoint("buffer.after_reconcile")
        if ask.step == 0 and is_evaluation_due(self.config, 0):
            self.evaluations.due(0, "", now)
        folder, nonce = self.segments.shown()
        self._answer(call, wire.Registered(epoch, run_id(self.config), self.groups.replay_to, folder, nonce))

    def _claim(self, call: Call, now: float) -> None:
        ask: wire.Claim = call.message
        self.groups.fence(ask.epoch)
        self.groups.saw_learner(now)
        if self._claim_poll is not None and self._claim_poll.call.request != call.request:
            self._answer(self._claim_poll.call, wire.NotYet("superseded by a newer claim", 0, 0))
        self._claim_poll = Poll(call, now + min(max(0.0, ask.wait_s), MAX_WAIT_S))
        self._seen_generation = (-1, -1)

    def _commit(self, call: Call, now: float) -> None:
        ask: wire.Commit = call.message
        self.groups.commit(
            epoch=ask.epoch, step=ask.step, version=ask.version, digest=ask.digest, now=now, groups=ask.groups
        )
        if is_evaluation_due(self.config, ask.step):
            self.evaluations.due(ask.step, ask.digest, now)
        self.write_metrics(step=ask.step)
        self._answer(call, wire.Ok())

    def _quarantine(self, call: Call, now: float) -> None:
        ask: wire.Quarantine = call.message
        self._keep_dead(ask)
        self.groups.quarantine(epoch=ask.epoch, step=ask.step, groups=ask.groups, reason=ask.reason, now=now)
        self._answer(call, wire.Ok())

    def _keep_dead(self, ask: wire.Quarantine) -> None:
        """Keep the messages of groups that the learner cannot use, before the state machine frees them."""
        self.groups.fence(ask.epoch)
        for number in ask.groups:
            group = self.groups.groups.get(number)
            for at, record in enumerate(group.records if group is not None and group.step == ask.step else ()):
                token = min((s.token for s in group.samples.values() if s.record == at), default=0) if group else 0
                try:
                    header, payload = self.segments.read(record)
                except (AsyncRLError, OSError):
                    continue  # damaged: the claim reports it
                self._dead.put(group=number, token=token, header=header, payload=payload)

    def _ledger(self, call: Call, now: float) -> None:
        self._answer(
            call, wire.LedgerReply(self.groups.ledger(epoch=call.message.epoch, step=call.message.step).to_json())
        )

    def _checkpointed(self, call: Call, now: float) -> None:
        self.groups.checkpointed(epoch=call.message.epoch, step=call.message.step, now=now)
        self._answer(call, wire.Ok())

    def _goodbye(self, call: Call, now: float) -> None:
        ask: wire.Goodbye = call.message
        self.groups.goodbye(epoch=ask.epoch, done=ask.done, reason=ask.reason, now=now, step=ask.step)
        self._goes_on = False
        if ask.done:
            self.evaluations.finish(now)
        self._answer(call, wire.Ok())

    def _evaluations(self, call: Call, now: float) -> None:
        lines = (line for line in self.evaluations.ended if line["round"] > call.message.seen)
        ended = tuple(msgspec.json.encode(line).decode() for line in lines)
        self._answer(call, wire.EvaluationsReply(ended, self.evaluations.running(now)))

    # ------------------------------------------------------------ metrics and end

    def tidy(self) -> None:
        """Called every second: files of producers that are silent go, when nothing in them lives."""
        now, limit = self._clock(), self.groups.settings.lease_timeout_s
        workers = self.groups.workers.items()
        self.segments.guests.keep_only({name for (_, name), worker in workers if now - worker.seen <= limit})

    def close(self) -> None:
        """Answer every poll, write what is left, close."""
        self.stop_reason = self.stop_reason or "stop"
        failpoint("buffer.at_close")
        self._look_at_polls(self._clock(), clock=True)
        if self._registering is not None:
            self._refuse(self._registering[0], error_for("net.unreachable", "the buffer stops"))
        self.flush()
        self.write_metrics()
        self.history.close()
        self._evaluation_files.close()
        self.segments.close()
        self.store.close()
        self._roles_log.close()
        self._buffer_log.close()
