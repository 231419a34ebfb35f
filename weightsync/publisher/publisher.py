"""The learner's end of weight sync: stages versions, announces them, leads collective groups.

`publish` runs on the training thread; other threads do the rest: one announces the
newest version, one asks how the rounds stand and sends where the transport needs a sender, and with deltas one encodes
what changed since the version before (`weightsync.publisher.delta_chain`). Guarantees:
1. `publish` blocks for the copy into a staging slot and for nothing else: no network, no generator, no older round, no
   encoding; `stats` says how much was copied (how long: `publish_s` of the learner's metrics);
2. a newer version supersedes an older one, whatever is being sent or encoded; what is being sent is not overwritten
   (up to the limit of `weightsync.staging`). With deltas a version is announced once its hop is encoded, or dropped;
   an encoding that takes longer than the time between two versions skips versions, it is not given up for a newer one;
   nothing is encoded while the service has no generator that could take it (all on this host, say);
3. a service that does not answer or has forgotten everything is told again, for as long as this object is open;
4. an error that trying again cannot mend (`fenced`, `handshake.mismatch`) is raised by the next call;
5. every wait has a deadline;
6. the base of adapters stays in its slot while adapters of it are published, and is offered beside each;
7. with keys every manifest is signed (`weightsync.plan.signature`).
Memory: two copies of the weights (of adapters: and one of their base); with deltas three, and less than one more for
the hops; up to four while older ones are read.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import AsyncRLError, Unavailable, WorkError
from asyncrl.net.keys import Keys
from asyncrl.net.requester import Requester
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import BaseOffer, Hello, Manifest, Publish, Published, RoundReply, RoundRequest, Welcome
from weightsync.coordinator.queries import WANTED, mark
from weightsync.copy_digest import cores
from weightsync.encoding import full
from weightsync.plan.buckets import Plan
from weightsync.plan.digest import whole_digest
from weightsync.plan.signature import signed
from weightsync.publisher.delta_chain import Chain, Staged
from weightsync.publisher.outboxes import Outboxes
from weightsync.staging import SLOTS, Chunks, Staging
from weightsync.transports.base import TransportError
from weightsync.transports.catalogue import outbox

REQUEST_S = 4.0
HOLD_S = 0.5
PAUSE_S = 0.2
HELLO_S = 60.0


class Publisher:
    """One learner process. `digests[v]` is the digest of every version that was published; `stats` are metrics of the
    newest one: `publish_bytes`, and with deltas `delta_bytes` and `delta_s` of the newest that was encoded."""

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None,
        config: WeightSyncConfig,
        name: str,
        fingerprint: str,
        scratch: Path,
        run_dir: Path | None = None,
        insecure: bool = False,
    ) -> None:
        self.digests: dict[int, str] = {}
        self.stats: dict[str, float] = {}
        self._address = address
        self._keys = keys
        self._config = config
        self._name = name
        self._fingerprint = fingerprint
        self._staging = Staging(scratch)
        folder = run_dir or scratch.parent
        self._outboxes = Outboxes(
            config.transport, lambda name: outbox(name, config, run_dir=folder, keys=keys, insecure=insecure)
        )
        self._chain: Chain | None = None  # hops are of no use where shared memory is all there is
        if config.encoding == "delta" and config.transport != "local":
            self._chain = Chain(limit=config.delta_chain, deadline_s=config.timeout_s, threads=cores() // 2)
        self._epoch = 0
        self._offers: list[Staged] = []  # at most one per slot, oldest first
        self._base: Staged | None = None  # the weights that the adapters are added to; its slot is pinned
        self._announced: Staged | None = None
        self._reply = RoundReply(0, "unknown")
        self._life = 0  # grows when the service is found not to know us: rounds of before mean nothing then
        self._error: AsyncRLError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._announcing = threading.Lock()  # held from a request to publish until its round is noted
        self._requester = self._connect()
        self._threads: list[threading.Thread] = []

    def _connect(self) -> Requester:
        return Requester(self._address, keys=self._keys, resend_s=1.0)

    # ------------------------------------------------------------ training thread

    def start(self, *, epoch: int) -> None:
        """Introduce this learner and start the threads. Raises `net.unreachable` where no service answers."""
        self._epoch = epoch
        self._staging.remove_stale()
        self._hello(self._requester, HELLO_S)
        for work in (self._announce_all, self._watch, *([self._encode_all] if self._chain is not None else [])):
            thread = threading.Thread(target=self._guard, args=(work,), name=f"weightsync{work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def committed_version(self) -> int:
        """The newest version that a generator acknowledged with its digest; -1 where there is none."""
        self._raise_error()
        return self._hello(self._requester, REQUEST_S).version

    def publish(self, version: int, plan: Plan, chunks: Chunks, *, base: str = "", adapter: str = "") -> Manifest:
        """Copy the weights out; the round runs behind. `chunks` are all tensors of the plan in its order, kept as
        `weightsync.staging.Staging.fill` asks for. `base` and `adapter` as in a manifest, for an adapter: generators
        without the base get it first, where it was published or given by `stage_base`."""
        self._raise_error()
        self._keep_base(base)
        slot, digests = self._staging.fill(plan, chunks)
        failpoint("weightsync.staged")
        whole = whole_digest(digests, base=base, adapter=adapter)
        encoding = "adapter" if base else full.NAME
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, whole, encoding, base, adapter)
        manifest = signed(manifest, self._keys)
        with self._changed:
            self.digests[version] = manifest.digest
            self.stats["publish_bytes"] = float(plan.nbytes)
            kept = [offer for offer in self._offers if offer.slot is not slot]
            ready = self._chain is None
            self._offers = [*kept, Staged(manifest, plan, self._staging, slot, slot.order, ready=ready)]
            self._changed.notify_all()
        return manifest

    def stage_base(self, version: int, plan: Plan, chunks: Chunks) -> Manifest:
        """Copy out the weights that the adapters to come are added to, without making them the target: for a learner
        that goes on with adapters after a restart. `version`: by which these weights were published."""
        self._raise_error()
        slot, digests = self._staging.fill(plan, chunks)
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, whole_digest(digests))
        manifest = signed(manifest, self._keys)
        self._pin(Staged(manifest, plan, self._staging, slot, slot.order, ready=True))
        return manifest

    def _keep_base(self, digest: str) -> None:
        """Before the slot of these weights can be overwritten; other ones are let go."""
        if self._base is not None and self._base.manifest.digest == digest:
            return
        known = [offer for offer in self._offers if digest and offer.manifest.digest == digest]
        self._pin(known[-1] if known else None)

    def _pin(self, base: Staged | None) -> None:
        old = self._base
        if base is not None and not self._staging.pin(base.slot, base.order):
            base = None
        with self._changed:
            # without its hops: who lacks the base needs all of it
            self._base = replace(base, hops=(), encoded=()) if base is not None else None
        if old is not None and (base is None or old.slot is not base.slot):
            self._staging.unpin(old.slot)

    def settle(self) -> None:
        """Copy all chunks that were given so far: for an iterator of chunks that takes their bytes back."""
        self._staging.settle()

    def wait_committed(self, version: int, *, members: int, timeout_s: float) -> RoundReply:
        """Wait until so many generators serve this version or a newer one.

        Raises:
            WorkError: `sync.failed` after `timeout_s`, naming the members and where they stand.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._serving(version) >= members, timeout_s)
            reply, serving = self._reply, self._serving(version)
        self._raise_error()
        if serving < members:
            raise WorkError(
                "sync.failed",
                f"version {version}: {serving} of {members} generators serve it after {timeout_s:g} s; "
                f"round {reply.round} is {reply.state} {reply.detail}, members {reply.members or 'none'}",
                where="weightsync",
            )
        return reply

    def _serving(self, version: int) -> int:
        """Members that serve the newest announced version, where that is at least `version`; else 0."""
        offer = self._announced
        if offer is None or offer.manifest.version < version or not 0 < offer.round <= self._reply.round:
            return 0
        return sum(state == "serving" for state in self._reply.members.values())

    def close(self, *, hurry: bool = False) -> None:
        """Stop the threads and remove the staged versions. `hurry`: without waiting for a request or a round that is
        under way, for a process that ends now."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._chain is not None:
            self._chain.stop()
        for thread in self._threads:
            thread.join(0.0 if hurry else REQUEST_S + HOLD_S + self._config.timeout_s)
        self._requester.close()
        if not any(thread.is_alive() for thread in self._threads):  # else they are in use, until the process ends
            self._outboxes.close()
        self._staging.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------ announcing thread

    def _announce_all(self) -> None:
        requester = self._connect()
        try:
            while (offer := self._next_offer()) is not None:
                try:
                    with self._announcing:
                        self._announce(requester, offer)
                    self._staging.prepare(offer.slot.size, SLOTS + self._encodes())
                except (Unavailable, TransportError):  # also: overwritten before it could be offered
                    time.sleep(PAUSE_S)
                except AsyncRLError as error:
                    self._give_up(error)
                    return
        finally:
            requester.close()

    def _encodes(self) -> bool:
        """Whether a version more is held, to encode from."""
        return self._chain is not None and self._reply.round > 0 and self._reply.hops_wanted

    def _next_offer(self) -> Staged | None:
        """The newest version that is ready once the service does not know it; None at the end."""
        with self._changed:
            # bounded: work of this process alone; close() wakes it
            self._changed.wait_for(lambda: self._closing or self._newest_ready() is not self._announced)
            return None if self._closing else self._newest_ready()

    def _newest_ready(self) -> Staged | None:
        ready = [offer for offer in self._offers if offer.ready]
        return ready[-1] if ready else self._announced

    def _announce(self, requester: Requester, offer: Staged) -> None:
        base = self._base_of(offer)
        ways = self._outboxes.ways(offer)
        answer = self._tell(requester, offer, ways, base, with_tensors=False)
        if answer.needs_tensors:
            self._hello(requester, REQUEST_S)
            with self._changed:
                self._life += 1
                for known in self._offers:
                    known.round = 0
                self._reply = RoundReply(0, "unknown")
            answer = self._tell(requester, offer, ways, base, with_tensors=True)
        with self._changed:
            offer.round = answer.round
            if offer.round:
                self._announced = offer
            self._changed.notify_all()

    def _base_of(self, offer: Staged) -> BaseOffer | None:
        """The base of an adapter, with where it can be fetched; the transports see it before the adapter."""
        base = self._base
        if base is None or offer.manifest.base != base.manifest.digest:
            return None
        return BaseOffer(base.manifest, self._outboxes.ways(base), base.tensors)

    def _tell(
        self, requester: Requester, offer: Staged, ways: dict[str, str], base: BaseOffer | None, *, with_tensors: bool
    ) -> Published:
        tensors = offer.tensors if with_tensors else ()
        if base is not None and not with_tensors:
            base = msgspec.structs.replace(base, tensors=())
        message = Publish(self._name, self._epoch, offer.manifest, ways, tensors, offer.hops, base)
        answer: Published = requester.request(message, timeout_s=REQUEST_S).message
        return answer

    def _hello(self, requester: Requester, timeout_s: float) -> Welcome:
        hello = Hello("learner", self._name, os.getpid(), socket.gethostname(), "", self._fingerprint)
        welcome: Welcome = requester.request(hello, timeout_s=timeout_s).message
        return welcome

    # ------------------------------------------------------------ encoding thread

    def _encode_all(self) -> None:
        assert self._chain is not None
        try:
            while (offer := self._next_unready()) is not None:
                self._chain.extend(offer, wanted=self._reply.hops_wanted)
                with self._changed:
                    offer.ready = True
                    self.stats |= {"delta_bytes": float(self._chain.hop_bytes), "delta_s": self._chain.encode_s}
                    self._changed.notify_all()
        finally:
            self._chain.close()

    def _next_unready(self) -> Staged | None:
        """The newest version until its hops are settled; those before it are left out. None at the end."""
        with self._changed:
            # bounded: work of this process alone; close() wakes it
            self._changed.wait_for(lambda: self._closing or (self._offers and not self._offers[-1].ready))
            return None if self._closing else self._offers[-1]

    # ------------------------------------------------------------ watching thread

    def _watch(self) -> None:
        requester = self._connect()
        done = ""
        try:
            while (offer := self._wait_announced()) is not None:
                reply, life = self._reply, self._life
                question = RoundRequest(self._epoch, reply.round or offer.round, HOLD_S, mark(reply), done)
                try:
                    packet = requester.request(question, timeout_s=REQUEST_S + HOLD_S, wait_s=HOLD_S)
                    if life == self._life:
                        done = self._follow(packet.message)
                except Unavailable:
                    time.sleep(PAUSE_S)
                except AsyncRLError as error:
                    self._give_up(error)
                    return
        finally:
            requester.close()

    def _wait_announced(self) -> Staged | None:
        with self._changed:
            # bounded: work of this process alone; close() wakes it
            self._changed.wait_for(lambda: self._closing or self._announced is not None)
            return None if self._closing else self._announced

    def _follow(self, reply: RoundReply) -> str:
        """Act on what the service says; how the sending of `reply.round` went, empty where nothing was sent."""
        with self._changed:
            self._reply = reply
            self._changed.notify_all()
        if reply.state == "unknown":
            self._announce_again()
        elif reply.rendezvous == WANTED:
            self._outboxes.need()
            self._announce_again()
        elif reply.ranks:
            return self._send(reply)
        return ""

    def _announce_again(self) -> None:
        with self._changed:
            self._announced = None
            self._changed.notify_all()

    def _send(self, reply: RoundReply) -> str:
        offer = self._offer_of(reply.round, reply.digest)
        if offer is None:
            return "failed: the version was superseded"
        with offer.blobs(reply.hops) as blobs:
            if blobs is None:
                return "failed: the version was superseded"
            try:
                self._outboxes.send(reply, blobs, deadline_s=self._config.timeout_s)
            except TransportError as error:
                return f"failed: {error.message}"
        return "sent"

    def _offer_of(self, round_: int, digest: str) -> Staged | None:
        """The version that a round carries: the base, or the newest that was announced no later."""
        with self._announcing, self._changed:
            if self._base is not None and self._base.manifest.digest == digest:
                return self._base
            known = [offer for offer in self._offers if 0 < offer.round <= round_]
            return max(known, key=lambda offer: offer.round, default=None)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; should it end by a bug, the next call on the training thread says so."""
        try:
            work()
        finally:
            with self._changed:
                if not self._closing and self._error is None:
                    self._error = AsyncRLError("internal", f"{work.__name__} ended: see its traceback in the log")
                    self._changed.notify_all()

    def _give_up(self, error: AsyncRLError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
