"""The learner's end of weight sync: stages versions, announces them, leads collective groups.

`publish` runs on the training thread. Other threads do the rest: one announces the newest version, one asks for the
state of the rounds and sends if the transport needs a sender; with deltas one encodes the changes since the version
before (`weightsync.publisher.delta_chain`). Guarantees:
1. `publish` blocks only for the copy into a staging slot: not for the network, a generator, an older round or the
   encoding; `stats` has the copied bytes (the time is `publish_s` of the learner's metrics);
2. a newer version supersedes an older one, also while that is sent or encoded; a version that is being sent is not
   overwritten (up to the limit of `weightsync.staging`). With deltas a version is announced once its hop is encoded, or
   dropped; an encoding that takes longer than the time between two versions skips versions, it is not given up for a
   newer one; nothing is encoded while no generator could take it (all on this host, for example);
3. a service that does not answer or has forgotten everything gets the version again, as long as this object is open;
4. an error that a retry cannot fix (`fenced`, `handshake.mismatch`) is raised by the next call;
5. every wait has a deadline;
6. the base of adapters stays in its slot while adapters of it are published, and is offered with each;
7. with keys every manifest is signed (`weightsync.plan.signature`).
Memory: two copies of the weights (for adapters one more, of their base); with deltas three, and less than one more for
the hops; up to four while older ones are read.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import AsyncRLError, Unavailable, WorkError
from asyncrl.net.keys import Keys
from asyncrl.net.requester import Requester
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import BaseOffer, Hello, Manifest, Publish, Published, RoundReply, RoundRequest, Welcome
from weightsync.coordinator.queries import FORMING, WANTED, reply_digest
from weightsync.copy_digest import cores
from weightsync.encoding import ADAPTER, FULL
from weightsync.plan.buckets import Plan
from weightsync.plan.digest import version_digest
from weightsync.plan.limits import limit_for
from weightsync.plan.signature import sign
from weightsync.publisher.delta_chain import DeltaChain, Staged
from weightsync.publisher.direct import Direct
from weightsync.publisher.offers import Offers
from weightsync.publisher.outboxes import Outboxes
from weightsync.publisher.senders import Peers, Tensors
from weightsync.staging import SLOTS, Chunks, Fill, Slot, Staging
from weightsync.transports.base import TransportError
from weightsync.transports.catalogue import make_outbox

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
        self._offers = Offers(self._staging)
        folder = run_dir or scratch.parent
        self._outboxes = Outboxes(
            config.transport, lambda name: make_outbox(name, config, run_dir=folder, keys=keys, insecure=insecure)
        )
        self._chain: DeltaChain | None = None  # with shared memory alone hops have no use
        if config.encoding == "delta" and config.transport != "local":
            self._chain = DeltaChain(limit=config.delta_chain, deadline_s=config.timeout_s, threads=cores() // 2)
        self.stage_wanted = -1  # transport `direct`: the newest version, if engines wait for it to be staged
        self._direct = Direct()
        self._newest: Staged | None = None  # of `direct`
        self._epoch = 0
        self._announcing = threading.Lock()  # from a request to publish until its round is recorded
        self._requester = self._connect()
        self._threads: list[threading.Thread] = []

    def _connect(self) -> Requester:
        return Requester(self._address, keys=self._keys, resend_s=1.0)

    # ------------------------------------------------------------ training thread

    def start(self, *, epoch: int) -> None:
        """Introduce this learner and start the threads. Raises `net.unreachable` if no service answers."""
        self._epoch = epoch
        self._staging.remove_stale()
        self._hello(self._requester, HELLO_S)
        for work in (self._announce_all, self._watch, *([self._encode_all] if self._chain is not None else [])):
            thread = threading.Thread(target=self._guard, args=(work,), name=f"weightsync{work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def committed_version(self) -> int:
        """The newest version that a generator acknowledged with its digest; -1 if there is none."""
        self._offers.raise_error()
        return self._hello(self._requester, REQUEST_S).version

    def publish(
        self, version: int, plan: Plan, weights: Chunks | Fill, *, base: str = "", adapter: str = ""
    ) -> Manifest:
        """Copy the weights out; the round runs in the background. `weights` are all tensors of the plan in its order,
        valid as `weightsync.staging.Staging.fill` requires, or a function that fills a slot. `base` and `adapter` as in
        a manifest, for an adapter: generators without the base get it first, if it was published or given to
        `stage_base`."""
        self._offers.raise_error()
        self._offers.keep_base(base)
        slot, digests = self._fill(plan, weights)
        failpoint("weightsync.staged")
        digest = version_digest(digests, base=base, adapter=adapter)
        encoding = ADAPTER if base else FULL
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, digest, encoding, base, adapter)
        manifest = sign(manifest, self._keys)
        with self._offers.changed:
            self.digests[version] = manifest.digest
            self.stats["publish_bytes"] = float(plan.nbytes)
        ready = self._chain is None
        self._offers.add(Staged(manifest, plan, self._staging, slot, slot.order, ready=ready))
        return manifest

    def _fill(self, plan: Plan, weights: Chunks | Fill) -> tuple[Slot, tuple[str, ...]]:
        return weights(self._staging) if callable(weights) else self._staging.fill(plan, weights)

    def stage_base(self, version: int, plan: Plan, chunks: Chunks) -> Manifest:
        """Copy out the weights under the adapters to come, without making them the target: for a learner that goes on
        with adapters after a restart. `version` is the one by which these weights were published."""
        self._offers.raise_error()
        slot, digests = self._staging.fill(plan, chunks)
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, version_digest(digests))
        manifest = sign(manifest, self._keys)
        self._offers.pin_base(Staged(manifest, plan, self._staging, slot, slot.order, ready=True))
        return manifest

    def announce(self, version: int, plan: Plan, digests: tuple[str, ...]) -> Manifest:
        """Transport `direct`: announce the weights on their device, which stay as they are until `send_direct`, by the
        digests of their buckets."""
        self._offers.raise_error()
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, version_digest(digests))
        manifest = sign(manifest, self._keys)
        self._direct.open(manifest.digest)
        with self._offers.changed:
            self.digests[version] = manifest.digest
            self.stats["publish_bytes"] = float(plan.nbytes)
        self._newest = Staged(manifest, plan, self._staging, None, 0, ready=True)
        self.stage_wanted = -1
        self._offers.add(self._newest)
        return manifest

    def wait_group(self) -> bool:
        """Whether engines take the announced version now."""
        return self._direct.wait_group()

    def send_direct(self, plan: Plan, tensors: Tensors, peers: Peers) -> str:
        """Send the announced weights, those of this rank's buckets, to the engines of the group: "sent", or why not."""
        limit_s = limit_for(self._config.timeout_s, plan.nbytes)
        return self._direct.send(tensors, plan, self._outboxes.group(), limit_s=limit_s, peers=peers)

    def stage_direct(self, plan: Plan, weights: Chunks | Fill) -> None:
        """Copy out the announced weights for engines that missed them (`stage_wanted`). `weights`: as in `publish`."""
        slot, _ = self._fill(plan, weights)
        self.stage_wanted = -1
        if self._newest is not None:
            self._offers.fill(self._newest, slot, slot.order)

    def settle(self) -> None:
        """Copy all chunks that were given so far: for an iterator of chunks that reuses their memory."""
        self._staging.settle()
        self._direct.settle()

    def wait_committed(self, version: int, *, members: int, timeout_s: float) -> RoundReply:
        """Wait until this many generators serve this version or a newer one.

        Raises:
            WorkError: `sync.failed` after `timeout_s`, naming the members and their states.
        """
        reply, serving = self._offers.wait_serving(version, members, timeout_s)
        self._offers.raise_error()
        if serving < members:
            raise WorkError(
                "sync.failed",
                f"version {version}: {serving} of {members} generators serve it after {timeout_s:g} s; "
                f"round {reply.round} is {reply.state} {reply.detail}, members {reply.members or 'none'}",
                where="weightsync",
            )
        return reply

    def close(self, *, hurry: bool = False) -> None:
        """Stop the threads and remove the staged versions. `hurry`: without waiting for a request or a round that is
        under way, for a process that ends now."""
        self._offers.end()
        if self._chain is not None:
            self._chain.stop()
        for thread in self._threads:
            thread.join(0.0 if hurry else REQUEST_S + HOLD_S + self._config.timeout_s)
        self._requester.close()
        if not any(thread.is_alive() for thread in self._threads):  # else they use the outboxes until the process ends
            self._outboxes.close()
        self._staging.close()

    # ------------------------------------------------------------ announcing thread

    def _announce_all(self) -> None:
        requester = self._connect()
        try:
            while (version := self._offers.next_ready()) is not None:
                try:
                    with self._announcing:
                        self._announce(requester, version)
                    if version.slot is not None and self._newest is None:
                        self._staging.prepare(version.slot.size, SLOTS + self._encodes())
                except (Unavailable, TransportError):  # also: overwritten before it could be offered
                    time.sleep(PAUSE_S)
                except AsyncRLError as error:
                    self._offers.fail(error)
                    return
        finally:
            requester.close()

    def _encodes(self) -> bool:
        """Whether one more version is kept, to encode from."""
        return self._chain is not None and self._offers.reply.round > 0 and self._offers.reply.hops_wanted

    def _announce(self, requester: Requester, version: Staged) -> None:
        base = self._base_offer(version)
        addresses = self._outboxes.addresses(version)
        answer = self._send_offer(requester, version, addresses, base, with_tensors=False)
        if answer.needs_tensors:
            self._hello(requester, REQUEST_S)
            self._offers.forget_rounds()
            answer = self._send_offer(requester, version, addresses, base, with_tensors=True)
        self._offers.set_round(version, answer.round)

    def _base_offer(self, version: Staged) -> BaseOffer | None:
        """The base of an adapter with its addresses; the transports get it before the adapter."""
        base = self._offers.base
        if base is None or version.manifest.base != base.manifest.digest:
            return None
        return BaseOffer(base.manifest, self._outboxes.addresses(base), base.tensors)

    def _send_offer(
        self,
        requester: Requester,
        version: Staged,
        addresses: dict[str, str],
        base: BaseOffer | None,
        *,
        with_tensors: bool,
    ) -> Published:
        tensors = version.tensors if with_tensors else ()
        if base is not None and not with_tensors:
            base = msgspec.structs.replace(base, tensors=())
        message = Publish(self._name, self._epoch, version.manifest, addresses, tensors, version.hops, base)
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
            while (version := self._offers.next_unready()) is not None:
                self._chain.extend(version, wanted=self._offers.reply.hops_wanted)
                with self._offers.changed:
                    self.stats |= {"delta_bytes": float(self._chain.hop_bytes), "delta_s": self._chain.encode_s}
                self._offers.set_ready(version)
        finally:
            self._chain.close()

    # ------------------------------------------------------------ watching thread

    def _watch(self) -> None:
        requester = self._connect()
        done = ""
        try:
            while (version := self._offers.wait_announced()) is not None:
                reply, life = self._offers.reply, self._offers.life
                question = RoundRequest(self._epoch, reply.round or version.round, HOLD_S, reply_digest(reply), done)
                try:
                    packet = requester.request(question, timeout_s=REQUEST_S + HOLD_S, wait_s=HOLD_S)
                    if life == self._offers.life:
                        done = self._follow(packet.message)
                except Unavailable:
                    time.sleep(PAUSE_S)
                except AsyncRLError as error:
                    self._offers.fail(error)
                    return
        finally:
            requester.close()

    def _follow(self, reply: RoundReply) -> str:
        """Act on the service's reply; the result of the sending of `reply.round`, empty if nothing was sent."""
        self._offers.take_reply(reply)
        announced = self._offers.announced
        if announced is not None and not reply.ranks and reply.rendezvous != FORMING and reply.round >= announced.round:
            self._direct.note_nobody(announced.manifest.digest)
        if reply.state == "unknown":
            self._offers.announce_again()
        elif reply.rendezvous == WANTED and announced is not None and announced.slot is None:
            self.stage_wanted = announced.manifest.version
        elif reply.rendezvous == WANTED:
            self._outboxes.open_remote()
            self._offers.announce_again()
        elif reply.ranks:
            return self._send(reply)
        return ""

    def _send(self, reply: RoundReply) -> str:
        with self._announcing:  # after it every announced version has its round
            version = self._offers.find(reply.round, reply.digest)
        if version is None:
            return "failed: the version was superseded"
        if self._newest is not None:
            limit_s = limit_for(self._config.timeout_s, version.plan.nbytes)
            return self._direct.hand_over(reply, self._outboxes.group(), limit_s=limit_s)
        with version.blobs(reply.hops) as blobs:
            if blobs is None:
                return "failed: the version was superseded"
            try:
                limit_s = limit_for(self._config.timeout_s, sum(map(len, blobs)))
                self._outboxes.send(reply, blobs, deadline_s=limit_s)
            except TransportError as error:
                return f"failed: {error.message}"
        return "sent"

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; if it ends by a bug, the next call on the training thread raises."""
        try:
            work()
        finally:
            if not self._offers.ended and self._offers.error is None:
                what = f"{work.__name__} ended: see its traceback in the log"
                self._offers.fail(AsyncRLError("internal", what))
