"""The producer's work: leases groups, generates them with one engine, sends the samples.

Guarantees:
1. it asks for work with the version that its engine holds, not with one that it has only heard of (the gate race), and
   not at all while the engine is of no version (an update in place);
2. each sample leaves as it finishes, with the digests of the weights that made it;
3. while an evaluation needs its version it takes no newer one, at most for `evaluation.timeout_s`: held-out prompts are
   finished before a swap. With `evaluation.lane = "second_weights"` it takes newer ones, and its engine keeps this one
   for the held-out prompts. Leases of a version that it has left go back;
4. a lost lease stops its generation, and so does one that the buffer cancels (dropped, or complete without it); a
   prompt that cannot be encoded is given back as dead with its reason.
It owns no state: its leases are granted again elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from asyncrl.config import Config, SamplingConfig
from asyncrl.engine import Engine, EngineCapabilities, GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import Unavailable
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.model_inputs import open_inputs
from asyncrl.images.rows import takes_images
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.liveness import Sign
from asyncrl.wire import Lease, Leases, PiecesReply, SamplesReply
from buffers.client.producer import ProducerClient
from producers.data.evaluation_prompts import HeldOutPrompts
from producers.data.images import store_images
from producers.data.prompts import BadPrompt, Prompts, Row, encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.engines.logprob_probe import check_logprobs
from producers.environments.by_row import Environments
from producers.environments.single_turn import SingleTurn
from producers.rollout.capacity import make_capacity
from producers.rollout.kept_turns import TurnTrail
from producers.rollout.partial_samples import Trail
from producers.rollout.rollout import Finished, fits_message, roll_out, run_together, submit_fields
from producers.support.progress_line import ProgressLine
from producers.support.retry import Patience
from weightsync.receiver.receiver import Receiver

T = TypeVar("T")
#: A lease request names the engine's version. After a swap a new one is sent at once, and after this long anyway.
POLL_S = 0.25
REASON_LETTERS = 300
SWAPPED = "swapped"
GIVE_BACK_S = 5.0  # at the end of the process
ATTESTED_S = 5.0  # for the digest of what was committed
#: First words of the reasons of a lost lease, as opposed to a bad sample.
LOST = ("token", "gone", "unknown", "poison", "lease", "cancel", "not published")


class Producer:
    """One engine and the groups it is working on."""

    poll_s = POLL_S
    evaluates = False  # it asks for held-out prompts alone
    holds = False  # an evaluation needs the engine's version
    kept = -1  # version that the engine keeps next to newer ones for it

    def __init__(
        self,
        config: Config,
        *,
        client: ProducerClient,
        engine: Engine,
        receiver: Receiver,
        patience: Patience,
        held_out: HeldOutPrompts | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.patience = patience
        self.engine = engine
        self.receiver = receiver
        self.waiting_for = ""
        self.leaving = False  # set to end `run` between two requests, so that no granted lease is overlooked
        self.images = open_inputs(config)
        self.tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self.prompts = Prompts(config.data, seed=config.run.seed, sees=takes_images(config.model.path))
        self.held_out = held_out or HeldOutPrompts(config)
        self.environments = Environments(config, self.tokenizer)
        self.work: dict[asyncio.Task[None], Lease] = {}
        self.capacity = make_capacity(config, EngineCapabilities("unknown", config.producers.slots, 0))
        self.requests: dict[tuple[int, int], list[str]] = {}  # at the engine, by (group, token) of the lease
        self.samples = self.refused = 0
        self.progress = ProgressLine("samples")
        self.continued = self.saved_tokens = 0  # continued samples, tokens not generated again
        self.cancelled = 0  # leases that the buffer cancelled
        self._swaps = 0
        self._version = -1
        self._last = (time.monotonic(), 0.0)  # (when, busy_s) of the last heartbeat

    async def run(self) -> None:
        """Keep groups in flight until the run is done."""
        await self.environments.open()
        await self.receiver.wait_version(0, timeout_s=self.config.run.hang_timeout_s)
        if not self.evaluates:  # nothing is trained on what an evaluator samples
            await check_logprobs(self.engine, self.config, self.tokenizer.ordinary_ids())
        self.capacity = make_capacity(self.config, self.engine.capabilities())
        done = False
        while (self.work or not done) and not self.leaving:
            idle = done or self.evaluates
            groups = 0 if idle else self.capacity.groups_wanted(preempted=self.engine.health().preempted)
            if groups or (not done and (self.holds or self.evaluates)):
                done = await self._ask(groups)
            elif self.work:
                await asyncio.wait(self.work, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self.work if task.done()]:
                self.capacity.end_group(self.work.pop(task))
                if not task.cancelled():
                    task.result()

    async def _ask(self, groups: int) -> bool:
        """Lease up to this many groups and start them; True when no more will come."""
        asked = time.monotonic()
        version, committed = self.engine.health().version, self.receiver.version
        if version < 0:  # dirty; leased groups stand still as well
            self.waiting_for = self.receiver.waiting_for
            await self.receiver.wait_newer(committed, self.poll_s)
            return False
        asking = [asyncio.ensure_future(self._lease(version, groups))]
        newer = asyncio.ensure_future(self.receiver.wait_newer(committed, self.client.interval(self.poll_s)))
        try:
            # bounded: the receiver's wait is
            await asyncio.wait({*asking, newer}, return_when=asyncio.FIRST_COMPLETED)
            if not asking[0].done() and self.engine.health().version > version:
                # The service then answers the older request at once: with nothing if it was not granted.
                asking.append(asyncio.ensure_future(self._lease(self.engine.health().version, groups)))
            answers = [await self._take(await task) for task in asking]  # bounded: a request has its deadline
        finally:
            for task in (*asking, newer):
                task.cancel()
        if not any(answer.leases or answer.done for answer in answers):
            # A service that answers at once must not make this a busy loop.
            await asyncio.sleep(max(0.0, min(0.05, self.poll_s - (time.monotonic() - asked))))
        return any(answer.done for answer in answers)

    async def _lease(self, version: int, groups: int) -> Leases:
        ask = partial(self.client.lease, engine_version=version, max_groups=groups, rows=self.prompts.chosen_among)
        return await self._patiently(partial(ask, wait_s=self.client.interval(self.poll_s), kept=self.kept))

    async def _take(self, answer: Leases) -> Leases:
        """Start the leased groups."""
        self._note_answer(answer)
        if answer.leases:
            failpoint("producer.after_lease")
        left = await self._hold(answer)
        for lease in [lease for lease in answer.leases if lease not in left]:
            if not is_evaluation(lease.group):  # on top of training: the buffer bounds it
                self.capacity.add_group(lease, len(lease.missing))
            self.work[asyncio.create_task(self._group(lease))] = lease
        self.waiting_for = "" if self.work else answer.reason or "a lease"
        if left:
            await self._patiently(lambda: self.client.give_back(left, reason=SWAPPED))
        return answer

    async def _hold(self, answer: Leases) -> list[Lease]:
        """Keep the version that an evaluation needs, or let it go. Returns held-out leases of a version that the engine
        left while their grant was on its way."""
        held_out = [lease for lease in answer.leases if is_evaluation(lease.group)]
        if answer.hold < 0 and not self.holds:
            return held_out
        limit_s = self.config.evaluation.timeout_s
        if self.config.evaluation.second_weights:
            keeping: Any = self.engine  # asyncrl.engine.Keeping
            self.holds = await keeping.keep_version(answer.hold, limit_s)
            self.kept = answer.hold if self.holds else -1
        elif answer.hold >= 0:
            self.holds = self.receiver.hold.keep(answer.hold, limit_s)
        else:
            self.receiver.hold.release()
            self.holds = False
        return [] if self.holds else held_out

    def _note_answer(self, answer: Leases) -> None:
        """Hook for subclasses: an answer to a lease request."""

    async def _group(self, lease: Lease) -> None:
        """Generate the missing samples of one leased group."""
        prompts: Prompts | HeldOutPrompts = self.prompts
        sampling, version = self.config.training_sampling, -1
        begun = self.client.begun.pop((lease.group, lease.token), ())
        if is_evaluation(lease.group):
            prompts, sampling = self.held_out, self.held_out.sampling
            version = lease.deadline_version if self.config.evaluation.second_weights else -1
        try:
            row = prompts.row_for(lease.group, lease.row)
            environment = self.environments.find(row)
            images = prompts.images_of(row)
            prompt_ids = encode_prompt(
                row, self.config.data, self.tokenizer, environment.tools, inputs=self.images, images=images
            )
            await store_images(images, self._store)
        except (BadPrompt, ImageProblem) as problem:
            reason = problem.reason
            await self._patiently(lambda: self.client.give_back([lease], reason=reason, dead=True))
            return
        request = replace(self._request(lease, prompt_ids, sampling, version), images=images)
        trail = (Trail if isinstance(environment, SingleTurn) else TurnTrail)(request, begun, self.receiver.digests)

        async def deliver(finished: list[Finished]) -> bool:
            await self._wait_attested([item.sample for item in finished])
            samples = [trail.complete_sample(item.sample) for item in finished]
            if len(finished) > 1 and not fits_message(samples):
                half = len(finished) // 2
                return await deliver(finished[:half]) and await deliver(finished[half:])
            try:
                await store_images([image for item in finished for _, image in item.images], self._store)
            except ImageProblem as problem:
                raise EnvironmentFailure("observation", problem.reason) from None
            failpoint("producer.before_send")
            reply = await self._patiently(
                lambda: self.client.submit(
                    lease,
                    prompt_ids=prompt_ids,
                    samples=samples,
                    row=row,
                    digests=trail.digests([sample.runs for sample in samples], self.receiver.digests),
                    **submit_fields(finished),
                )
            )
            failpoint("producer.after_ack")
            self.samples += len(samples)
            for sample in samples if not is_evaluation(lease.group) else ():
                self.capacity.end_sample(lease, prompt_tokens=len(prompt_ids), response_tokens=len(sample.token_ids))
            self.refused += len(reply.refused)
            counts = trail.count_saved([sample for sample in samples if sample.index in reply.accepted])
            self.continued, self.saved_tokens = self.continued + counts[0], self.saved_tokens + counts[1]
            return await self._is_held(lease, reply)

        try:
            await self._play(lease, row, trail, sampling, deliver)
        except EnvironmentFailure as failure:
            print(f"group {lease.group}: {failure.reason}", flush=True)
            why = failure.reason[:REASON_LETTERS]
            await self._patiently(lambda: self.client.give_back([lease], reason=why))

    async def _store(self, images: dict[str, bytes]) -> None:
        await self._patiently(lambda: self.client.store_images(images))

    def _request(self, lease: Lease, prompt_ids: Any, sampling: SamplingConfig, version: int) -> GenRequest:
        return GenRequest(
            f"{lease.group}:{lease.token}",
            prompt_ids,
            tuple(lease.missing),
            lease.seed,
            sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            support=sampling.wants_support,
            experts=self.config.learner.router_replay and not is_evaluation(lease.group),
            trained=not is_evaluation(lease.group),
            stop_ids=self.tokenizer.eos_ids,
            delta_tokens=0 if is_evaluation(lease.group) else self.config.producers.checkpoint_tokens,
            version=version,
        )

    async def _play(
        self,
        lease: Lease,
        row: Row,
        trail: Trail | TurnTrail,
        sampling: SamplingConfig,
        deliver: Callable[[list[Finished]], Awaitable[bool]],
    ) -> None:
        """All parts of a group in parallel: new samples, and each continued sample."""
        keep, environment = partial(self._keep, lease, trail), self.environments.find(row)
        engine = trail.engine(self.engine, keep)

        async def one_after_the_other(parts: Sequence[GenRequest]) -> bool:
            for part in parts:
                if not await roll_out(engine, environment, part, row=row, deliver=deliver, keep=keep):
                    return False
            return True

        started, going_on = trail.parts(sampling)
        self.requests[lease.group, lease.token] = [part.id for part in (*started, *going_on)]
        try:
            await run_together([one_after_the_other(parts) for parts in (started, *([part] for part in going_on))])
        finally:
            del self.requests[lease.group, lease.token]

    async def _keep(self, lease: Lease, trail: Trail | TurnTrail, deltas: list[GenDelta]) -> bool:
        """Send new tokens of samples under way; False once the lease is lost."""
        await self._wait_attested(deltas)
        for delta in deltas:
            trail.take(delta)
        pieces = trail.pieces({delta.index for delta in deltas})
        if not pieces:
            return True
        digests = trail.digests([piece.runs for piece in pieces], self.receiver.digests)
        failpoint("producer.before_piece")
        reply = await self._patiently(lambda: self.client.keep(lease, pieces, digests))
        failpoint("producer.after_piece")
        trail.take_reply(reply)
        return await self._is_held(lease, reply)

    async def _wait_attested(self, made: Sequence[GenDelta]) -> None:
        """Wait for the digest of the weights: a token can come before it, in the first step after a swap."""
        newest = max(version for delta in made for version, _ in delta.runs)
        # Longer than a commit may take: a hanging commit ends this process with `engine.broken`.
        limit_s = self.config.weightsync.timeout_s + ATTESTED_S
        await self.receiver.wait_version(newest, timeout_s=limit_s)

    async def _is_held(self, lease: Lease, reply: SamplesReply | PiecesReply) -> bool:
        """Whether the lease is still valid after this answer; stops the leases that it cancels."""
        await self._stop_work(reply.cancelled, but=lease)
        if (lease.group, lease.token) in reply.cancelled:
            return False
        return not any(reason.lower().startswith(LOST) for reason in reply.refused.values())

    async def _stop_work(self, cancelled: Sequence[tuple[int, int]], *, but: Lease | None = None) -> None:
        """Stop cancelled leases, except `but`, whose own delivery reports it."""
        wanted = set(cancelled)
        for task, lease in list(self.work.items()):
            if (lease.group, lease.token) in wanted and lease is not but and not task.done():
                self.cancelled += 1
                await self.engine.abort(self.requests.get((lease.group, lease.token), []))
                task.cancel()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        def waits(code: str) -> None:
            self.waiting_for = f"the buffer ({code})"

        return await self.patience.ask(call, on_wait=waits)

    async def heartbeats(self) -> None:
        """Send heartbeats to the buffer; they renew the leases."""
        while True:
            stats, holds = self.stats(), tuple(self.work.values())
            beat = partial(self.client.heartbeat, stats, waiting_for=self.waits(), holds=holds)
            await self._stop_work(await self._patiently(beat))
            await asyncio.sleep(self.client.interval(self.config.log.heartbeat_s))

    def waits(self) -> str:
        """The reason of its waiting; empty while it works."""
        waits = self.receiver.waiting_for if self.engine.health().version < 0 else self.waiting_for
        return waits or self.patience.waits_for or getattr(self.engine, "waiting_for", "")

    async def signs(self, sign: Sign) -> None:
        """Write signs of life for the launcher."""
        try:
            while True:
                sign.beat(self.waits())
                state = f"version {self.engine.health().version}, {len(self.work)} groups in flight"
                self.progress.tick(self.samples, self.waits() or state)
                await asyncio.sleep(self.config.log.heartbeat_s)
        finally:
            sign.close()

    def stats(self) -> dict[str, float]:
        """Numbers of the heartbeat, by catalogue name."""
        health = self.engine.health()
        now, (then, busy) = time.monotonic(), self._last
        self._last = (now, health.busy_s)
        self._swaps += health.version != self._version
        self._version = health.version
        return {
            "busy_share": min(1.0, (health.busy_s - busy) / max(1e-9, now - then)),
            **health.numbers(),
            "generated_samples": self.samples,
            "groups_in_flight": len(self.work),
            "samples_in_flight": self.capacity.leased_samples,
            "held_tokens": self.capacity.tokens_per_sample,
            "swaps": self._swaps,
            "refused_samples": self.refused,
            "continued_samples": self.continued,
            "saved_tokens": self.saved_tokens,
            **self.environments.counts(),
        }

    async def give_back(self, reason: str) -> None:
        """Cancel all work and return its leases; without the buffer they expire."""
        leases = list(self.work.values())
        for task in self.work:
            task.cancel()
        if leases:
            await asyncio.wait(self.work, timeout=GIVE_BACK_S)
            self.work.clear()
            failpoint("producer.before_give_back")
        if leases and not self.patience.gave_up:
            try:
                await asyncio.wait_for(self.client.give_back(leases, reason=reason), GIVE_BACK_S)
            except (Unavailable, TimeoutError):
                print(f"{len(leases)} leases could not be given back; they expire", file=sys.stderr, flush=True)
