"""Requests of producers: leases, samples, pieces of samples, returns."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.config.mode import demonstrates, evaluation_sampling, streams
from asyncrl.errors import WireError
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.images.digests import IMAGES, image_digests, is_digest
from asyncrl.images.folder import ImageFolder
from asyncrl.net.keys import is_guest
from asyncrl.net.responder import Call
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import Buffer
from asyncrl.wire.batch_arrays import decode_row
from buffers.groups.records import Record
from buffers.payloads import partial_samples
from buffers.service.context import Context
from buffers.service.polls import Poll, Polls

SUPERSEDED = "superseded by a newer request"


def sample_limits(config: Config, max_new_tokens: int, *, guest: bool, support: bool = False) -> wire.SampleLimits:
    """What the configuration allows a sample. A guest sends rewards only of a row of a data set or an environment;
    without keys all processes are those of one user. `support`: draws are cut exactly.
    """
    longest = config.data.max_prompt_tokens + max_new_tokens
    turns = [one.max_turns for one in config.environments if not one.is_single_turn]
    return wire.SampleLimits(
        prompt_tokens=longest if turns else config.data.max_prompt_tokens,
        sequence_tokens=longest if turns else max_new_tokens,
        sequences=max(turns, default=1),
        reward=config.reward_workers.max_reward,
        scores=not guest or streams(config) or demonstrates(config) or any(one.scores for one in config.environments),
        support=support,
        experts=config.learner.router_replay,
    )


def held_out_version(ask: wire.LeaseRequest) -> int:
    """The version with which the producer generates held-out prompts."""
    return ask.kept if ask.kept >= 0 else ask.engine_version


class ProducerRequests:
    """A lease request waits here until there is work for it. A newer one of the same producer supersedes it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.polls = Polls(lambda ask: ask.engine_version)
        config = context.config
        self._images = ImageFolder(RunDir(config.run_dir).images)
        trained, held_out = config.sampling.max_new_tokens, evaluation_sampling(config).max_new_tokens
        self._cut = config.training_sampling.wants_support
        self._limits = {
            guest: sample_limits(config, trained, guest=guest, support=self._cut) for guest in (False, True)
        }
        self._held_out_limits = {guest: sample_limits(config, held_out, guest=guest) for guest in (False, True)}

    def look_at_polls(self) -> None:
        """Answer the polls that have work, or whose time is over."""
        ended, now, machine = self.context.ended, self.context.now, self.context.machine
        works = not ended and machine.budget.fault is None
        held_out = works and self.context.evaluations.table.meta.round is not None

        def has_work(engine_version: int) -> bool:
            return works and machine.schedule.has_work(engine_version)

        def may_have_work(poll: Poll) -> bool:
            return not poll.looked or held_out or has_work(poll.call.message.engine_version)

        found = self.polls.to_look_at(now, has_work=has_work, everyone=ended or held_out)
        if works and any(may_have_work(poll) for _, poll in found):
            machine.group_leases.note_waiting(
                {name: poll.call.message.max_groups for name, poll in found if poll.looked}
            )
        for name, poll in found:
            leases: tuple[wire.Lease, ...] = ()
            if works and may_have_work(poll):
                leases, poll.looked = self._lease(poll.call, poll.call.message.max_groups), True
            if leases or ended or now >= poll.until:
                self.polls.remove(name)
                self._answer(poll.call, leases, ended)

    def _lease(self, call: Call, max_groups: int) -> tuple[wire.Lease, ...]:
        ask: wire.LeaseRequest = call.message
        version, request = ask.engine_version, call.request
        if self.context.peers.paused_s("producer", ask.producer, self.context.now):
            return ()
        groups: tuple[wire.Lease, ...] = ()
        if ask.max_groups:
            groups = self.context.machine.lease(
                ask.producer, engine_version=version, max_groups=max_groups, request=request, now=self.context.now
            )
        return groups + self.context.evaluations.prompt_leases.lease(
            ask.producer, engine_version=held_out_version(ask), request=request, trains=ask.max_groups > 0
        )

    def _answer(self, call: Call, leases: tuple[wire.Lease, ...], ended: bool = False, why: str = "") -> None:
        ask: wire.LeaseRequest = call.message
        machine = self.context.machine
        self.context.mark_answered("producer", ask.producer, call)
        if not why and not leases:
            fault = machine.budget.fault
            why = fault[1] if fault else machine.lease_blocked(ask.engine_version, ask.producer)
            paused_s = self.context.peers.paused_s("producer", ask.producer, self.context.now)
            why = f"{ask.producer} sent what may not be trained: no work for {paused_s:.0f} s" if paused_s else why
            why = self.context.end_reason if ended else why if ask.max_groups else "held-out prompts"
        begun, payloads = self._partial_samples(leases)
        prompts, version = self.context.evaluations.prompt_leases, held_out_version(ask)
        hold = -1 if ended else prompts.hold(version, trains=ask.max_groups > 0)
        answer = wire.Leases(leases, machine.table.meta.version, why, ended, begun, hold)
        self.context.answer(call, answer, payloads)

    def _partial_samples(self, leases: Sequence[wire.Lease]) -> tuple[tuple[wire.Begun, ...], list[Buffer]]:
        """The partial samples that other producers made of these groups, with their payloads."""
        machine = self.context.machine
        leases = [lease for lease in leases if not is_evaluation(lease.group)]  # held-out prompts have none
        if not any(machine.table.groups[lease.group].partial for lease in leases):
            return (), []
        limit = self.context.config.network.max_message_bytes
        begun, payloads, damaged = partial_samples.load(leases, machine, self.context.segments, max_bytes=limit)
        if damaged:
            machine.partial.discard_damaged(damaged)
        return begun, payloads

    def lease(self, call: Call) -> None:
        """A `LeaseRequest`: it becomes a poll, unless it was answered before."""
        ask: wire.LeaseRequest = call.message
        self.context.check_early(ask.producer)
        self.context.machine.prompts.greet(ask.producer, ask.rows)
        worker = self.context.machine.workers.see("producer", ask.producer, self.context.now)
        waiting = self.polls.get(ask.producer)
        if waiting is not None and waiting.call.request < call.request:
            self._answer_again(waiting.call, why=SUPERSEDED)
        superseded = waiting is not None and waiting.call.request > call.request
        if superseded or call.request <= worker.answered:  # its answer was lost, or crossed with this copy
            self._answer_again(call, why=SUPERSEDED if superseded else "")
            return
        self.polls.add(ask.producer, self.context.poll(call, ask.wait_s))

    def _answer_again(self, call: Call, why: str) -> None:
        """Answer with what the request was granted before, maybe by a service that died before it could answer."""
        self.context.mark_answered("producer", call.message.producer, call)
        self._answer(call, self._lease(call, 0), self.context.ended, why)

    # ------------------------------------------------------------ samples

    def samples(self, call: Call) -> None:
        """Samples that come with their payload, verified by the decoder."""
        if len(call.payloads) != 1:
            raise WireError("wire.decode", f"samples come with one payload frame, not {len(call.payloads)}")
        self._take(call, call.message, bytes(call.header), call.payloads[0], checksum=call.checksum)

    def samples_at(self, call: Call) -> None:
        """Samples that lie in a file of their producer on this host."""
        ask: wire.SamplesAt = call.message
        limit = self.context.config.network.max_message_bytes
        header, payload = self.context.segments.guests.read(ask.producer, ask.place, max_bytes=limit)
        head = wire.decode_samples(header)
        if head.producer != ask.producer:
            raise WireError("wire.unexpected", f"samples of {head.producer} come from {ask.producer}")
        self._take(call, head, header, payload, checksum=ask.place.checksum, place=ask.place)

    def _take(
        self,
        call: Call,
        head: wire.Samples,
        header: Buffer,
        payload: Buffer,
        *,
        checksum: int,
        place: wire.Place | None = None,
    ) -> None:
        context, machine = self.context, self.context.machine
        intake = context.evaluations.intake if is_evaluation(head.group) else machine.intake
        guest = is_guest(call.holder)

        def invalid() -> str:
            # Producers hear of a publish before the learner's commit arrives here, hence one version more.
            newest = machine.table.meta.newest + 1
            more, limits = 0, self._held_out_limits[guest]
            if intake is machine.intake:
                more, limits = machine.settings.over_issue, self._limits[guest]
            size = intake.target.size + more
            why = wire.validate_samples(head, payload, group_size=size, newest_version=newest, limits=limits)
            return why or (self._find_missing_image(head) if guest else "")

        def keep() -> Record:
            context.counters["ingest_bytes"] += memoryview(payload).nbytes
            unscored = len(head.rewards) < len(head.samples)  # reward workers will ask for it
            if place is not None:
                context.counters["place_bytes"] += memoryview(payload).nbytes
                return context.segments.adopt(place, header, payload, again=unscored)
            return context.segments.append(header, payload, checksum, again=unscored)

        reply = intake.take(head, checksum=checksum, invalid=invalid, keep=keep, guest=guest)
        if reply.refused and any(why.startswith("poison: ") for why in reply.refused.values()):
            context.dead_letters.put(group=head.group, token=head.token, header=header, payload=payload)
            if guest:
                context.peers.pause("producer", head.producer, context.now)
        if reply.accepted:
            context.peers.note_good("producer", head.producer)
        context.counters["duplicates"] += len(reply.duplicate)
        context.counters["refused_samples"] += len(reply.refused)
        context.answer(call, reply)

    def _find_missing_image(self, head: wire.Samples) -> str:
        """An image that row or samples name and that was not stored: the learner would have to set the group aside."""
        digests = [digest for sample in head.samples for _, digest in sample.images]
        try:
            digests += image_digests(decode_row(head.row)) if f'"{IMAGES}"' in head.row else ()
        except WireError as error:
            return error.message
        if bad := next((digest for digest in digests if not is_digest(digest)), ""):
            return f"image: {bad[:8]!r} is no digest"
        return next((f"image: {digest[:8]} was not stored" for digest in digests if not self._images.has(digest)), "")

    def pieces(self, call: Call) -> None:
        """Pieces of samples that are still being generated."""
        head: wire.Pieces = call.message
        context, machine = self.context, self.context.machine
        if len(call.payloads) != 1:
            raise WireError("wire.decode", f"pieces come with one payload frame, not {len(call.payloads)}")
        arrays, wrong = partial_samples.check(
            head,
            call.payloads[0],
            group_size=machine.settings.group_size + machine.settings.over_issue,
            max_tokens=context.config.sampling.max_new_tokens,
            newest_version=machine.table.meta.newest + 1,
            cut=self._cut,
        )
        reply = machine.pieces(
            head,
            invalid=lambda: wrong,
            keep=lambda item: partial_samples.store(head, item, arrays, context.segments),
            now=context.now,
        )
        context.counters["refused_pieces"] += len(reply.refused)
        context.answer(call, reply)

    def give_back(self, call: Call) -> None:
        """A `LeaseReturn`."""
        self.context.peers.note_returned(call, len(call.message.groups), self.context.now)
        guest = is_guest(call.holder)
        self.context.machine.give_back(call.message, now=self.context.now, guest=guest)
        self.context.evaluations.prompt_leases.give_back(call.message, guest=guest)
        self.context.answer(call, wire.Ok())
