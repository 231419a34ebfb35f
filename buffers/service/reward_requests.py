"""Requests of reward workers: samples to score, and their scores."""

from __future__ import annotations

import operator
from collections import ChainMap
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.config.judges import display_name
from asyncrl.errors import WireError, error_for
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.net.keys import is_guest
from asyncrl.net.responder import Call
from buffers.groups.records import Record, Sample
from buffers.groups.scoring import ToScore
from buffers.service.context import Context
from buffers.service.polls import Polls
from buffers.service.replies import reward_reply


class RewardRequests:
    """A request for samples waits here until there are some. A newer one of the same worker supersedes it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.polls = Polls(lambda ask: ask.judge)

    def look_at_polls(self) -> None:
        """Answer the polls that have work, or whose time is over."""
        ended, now = self.context.ended, self.context.now
        queues = self.context.machine.scoring.queue, self.context.evaluations.scoring.queue

        def has_work(judge: str) -> bool:
            return any(queue.count_waiting(judge) for queue in queues)

        for name, poll in self.polls.to_look_at(now, has_work=has_work, everyone=ended):
            items: list[ToScore] = []
            if not poll.looked or has_work(poll.call.message.judge):
                items, poll.looked = self._lease(poll.call), True
            if items or ended or now >= poll.until:
                self.polls.remove(name)
                self._answer(poll.call, items, ended)

    def _lease(self, call: Call) -> list[ToScore]:
        """Samples of training first, then those of an evaluation, at least its share of `max_samples`."""
        ask: wire.RewardRequest = call.message
        machine, evaluations, request = self.context.machine, self.context.evaluations, call.request
        if self.context.peers.paused_s("reward", ask.worker, self.context.now):
            return []
        room, judge = ask.max_samples, ask.judge
        items = machine.scoring.lease(ask.worker, max_samples=room, request=request, judge=judge)
        share = max(1, int(evaluations.config.share * room), room - len(items))
        return items + evaluations.scoring.lease(ask.worker, max_samples=share, request=request, judge=judge)

    def _answer(self, call: Call, items: list[ToScore], ended: bool) -> None:
        context = self.context
        context.mark_answered("reward", call.message.worker, call)
        owners: ChainMap[int, Any] = ChainMap(
            context.evaluations.table.prompts,  # type: ignore[arg-type]
            context.machine.table.groups,
        )
        work, payloads, damaged = reward_reply(items, owners, context.segments)
        context.machine.batches.lose_payloads([number for number in damaged if not is_evaluation(number)])
        context.evaluations.lose_payloads([number for number in damaged if is_evaluation(number)])
        context.answer(call, wire.RewardWork(work, ended and not items), payloads)

    def lease(self, call: Call) -> None:
        """A `RewardRequest`: it becomes a poll, unless it was answered before."""
        ask: wire.RewardRequest = call.message
        self._check_judge(ask)
        worker = self.context.machine.workers.see("reward", ask.worker, self.context.now)
        waiting = self.polls.get(ask.worker)
        if waiting is not None and waiting.call.request > call.request:
            return
        if waiting is not None and waiting.call.request < call.request:
            self.context.answer(waiting.call, wire.RewardWork(()))
        if call.request <= worker.answered:  # its answer was lost, or crossed with this copy
            self._answer(call, self._lease(call), self.context.ended)
            return
        self.polls.add(ask.worker, self.context.poll(call, ask.wait_s))

    def _check_judge(self, ask: wire.RewardRequest | wire.Scores | wire.TeacherLogprobs) -> None:
        names = self.context.machine.judges.names
        if ask.judge not in names:
            known = ", ".join(map(display_name, names))
            text = f"{ask.worker} scores for judge {display_name(ask.judge)!r}: this run has {known}"
            raise error_for("reward.judge", text)

    def scores(self, call: Call) -> None:
        """`Scores` of training groups and of held-out prompts, which may come in one message."""
        message: wire.Scores = call.message
        self._check_judge(message)
        groups = [*[one.group for one in message.scores], *[one.group for one in message.failures]]
        mixed = any(map(is_evaluation, groups))
        trained, before = _select(message, held_out=False) if mixed else message, self._counts(message.judge)
        reply = self.context.machine.scores(trained, now=self.context.now)
        if mixed:
            accepted, refused = self.context.evaluations.scoring.take(_select(message, held_out=True))
            reply = wire.ScoresReply(reply.accepted + accepted, {**reply.refused, **refused})
        scored, failed = map(operator.sub, self._counts(message.judge), before)
        if scored >= failed:  # as they were taken: a score that is no number is a failure
            self.context.peers.note_good("reward", message.worker)
        elif is_guest(call.holder):
            self.context.peers.pause("reward", message.worker, self.context.now)
        self.context.answer(call, reply)

    def _counts(self, judge: str) -> tuple[int, int]:
        """How many scores and failures of a judge were taken so far."""
        counts = [one.counts for one in (self.context.machine.scoring, self.context.evaluations.scoring)]
        scored, failed = (sum(one[judge, what] for one in counts) for what in ("scored", "failures"))
        return scored, failed

    def teaching(self, call: Call) -> None:
        """A `TeacherLogprobs`: header and payload are stored as they came."""
        head: wire.TeacherLogprobs = call.message
        self._check_judge(head)
        context = self.context
        if len(call.payloads) != 1 or not context.machine.judges.teaches(head.judge):
            raise WireError("wire.unexpected", f"{head.worker} sends {len(call.payloads)} payloads for {head.judge!r}")
        payload, top_k = call.payloads[0], context.config.learner.distillation.asked_top_k

        def invalid(sample: Sample) -> str:
            return wire.checked_teacher(head, payload, length=sample.length, top_k=top_k)[1]

        def keep() -> Record:
            return context.segments.append(bytes(call.header), payload, call.checksum, again=False)

        machine = context.machine
        machine.begin(context.now)
        machine.workers.see("reward", head.worker, context.now).judge = head.judge
        reply = wire.ScoresReply(*machine.scoring.take_teaching(head, invalid=invalid, keep=keep))
        if reply.accepted:
            context.peers.note_good("reward", head.worker)
        elif is_guest(call.holder):
            context.peers.pause("reward", head.worker, context.now)
        context.answer(call, reply)


def _select(message: wire.Scores, *, held_out: bool) -> wire.Scores:
    """The scores of held-out prompts, or those of training groups."""
    return msgspec.structs.replace(
        message,
        scores=tuple(one for one in message.scores if is_evaluation(one.group) == held_out),
        failures=tuple(one for one in message.failures if is_evaluation(one.group) == held_out),
    )
