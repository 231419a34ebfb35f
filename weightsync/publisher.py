"""The learner's end of weight sync: stages versions, announces them, leads collective groups.

Called by rank 0 of the learner. `publish` runs on the training thread; two threads do the rest: one announces the
newest version, one asks how the rounds stand and sends where the transport needs a sender. Guarantees:
1. `publish` blocks for the copy into a staging slot and for nothing else: no network, no generator, no older round;
2. a newer version supersedes an older one; what is being sent is not overwritten;
3. a service that does not answer or has forgotten everything is told again, for as long as this object is open;
4. an error that trying again cannot mend (`fenced`, `handshake.mismatch`) is raised by the next call;
5. every wait has a deadline.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import AsyncRLError, Unavailable, WorkError
from asyncrl.failpoints import failpoint
from asyncrl.sockets import Keys, Requester
from asyncrl.wire import Hello, Manifest, Publish, Published, RoundReply, RoundRequest, Welcome
from weightsync.digest import whole_digest
from weightsync.encoding import full
from weightsync.plan import Plan
from weightsync.rounds import WANTED, mark
from weightsync.staging import Chunks, Slot, Staging
from weightsync.transports.base import Outbox, TransportError

REQUEST_S = 4.0
HOLD_S = 0.5
PAUSE_S = 0.2
HELLO_S = 60.0


@dataclass
class _Offer:
    """A staged version. `round` is 0 until the service took it; `order` says which filling of the slot it is."""

    manifest: Manifest
    plan: Plan
    slot: Slot
    order: int
    round: int = 0


class Publisher:
    """One learner process. `digests[v]` is the digest of every version that was published."""

    def __init__(
        self, address: str, *, keys: Keys | None, config: WeightSyncConfig, name: str, fingerprint: str, scratch: Path,
    ) -> None:  # fmt: skip
        self.digests: dict[int, str] = {}
        self._address = address
        self._keys = keys
        self._config = config
        self._name = name
        self._fingerprint = fingerprint
        self._staging = Staging(scratch)
        self._collective: Outbox | None = None
        self._epoch = 0
        self._offers: list[_Offer] = []  # at most one per slot, oldest first
        self._announced: _Offer | None = None
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
        for work in (self._announce_all, self._watch):
            thread = threading.Thread(target=self._guard, args=(work,), name=f"weightsync{work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def committed_version(self) -> int:
        """The newest version that a generator acknowledged with its digest; -1 where there is none."""
        self._raise_error()
        return self._hello(self._requester, REQUEST_S).version

    def publish(self, version: int, plan: Plan, chunks: Chunks) -> Manifest:
        """Copy the weights out; the round runs behind. `chunks` are all tensors of the plan in its order."""
        self._raise_error()
        slot, digests = self._staging.fill(plan, chunks)
        failpoint("weightsync.staged")
        manifest = Manifest(version, plan.digest, plan.bucket_bytes, digests, whole_digest(digests), full.NAME)
        with self._changed:
            self.digests[version] = manifest.digest
            kept = [offer for offer in self._offers if offer.slot is not slot]
            self._offers = [*kept, _Offer(manifest, plan, slot, slot.order)]
            self._changed.notify_all()
        return manifest

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
                "sync.failed", f"version {version}: {serving} of {members} generators serve it after {timeout_s:g} s; "
                f"round {reply.round} is {reply.state} {reply.detail}, members {reply.members or 'none'}",
                where="weightsync",
            )  # fmt: skip
        return reply

    def _serving(self, version: int) -> int:
        """Members that serve the newest announced version, where that is at least `version`; else 0."""
        offer = self._announced
        if offer is None or offer.manifest.version < version or not 0 < offer.round <= self._reply.round:
            return 0
        return sum(state == "serving" for state in self._reply.members.values())

    def close(self) -> None:
        """Stop the threads and remove the staged versions."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(REQUEST_S + HOLD_S + self._config.timeout_s)
        self._requester.close()
        if self._collective is not None:
            self._collective.close()
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
                except Unavailable:
                    time.sleep(PAUSE_S)
                except AsyncRLError as error:
                    self._give_up(error)
                    return
        finally:
            requester.close()

    def _next_offer(self) -> _Offer | None:
        """The newest version once the service does not know it; None at the end."""
        with self._changed:
            # bounded: work of this process alone; close() wakes it
            self._changed.wait_for(lambda: self._closing or (self._offers and self._offers[-1] is not self._announced))
            return None if self._closing else self._offers[-1]

    def _announce(self, requester: Requester, offer: _Offer) -> None:
        answer = self._tell(requester, offer, with_tensors=False)
        if answer.needs_tensors:
            self._hello(requester, REQUEST_S)
            with self._changed:
                self._life += 1
                for known in self._offers:
                    known.round = 0
                self._reply = RoundReply(0, "unknown")
            answer = self._tell(requester, offer, with_tensors=True)
        with self._changed:
            offer.round = answer.round
            if offer.round:
                self._announced = offer
            self._changed.notify_all()

    def _tell(self, requester: Requester, offer: _Offer, *, with_tensors: bool) -> Published:
        tensors = offer.plan.tensors if with_tensors else ()
        message = Publish(self._name, self._epoch, offer.manifest, self._ways(offer), tensors)
        answer: Published = requester.request(message, timeout_s=REQUEST_S).message
        return answer

    def _ways(self, offer: _Offer) -> dict[str, str]:
        """Transports that may carry the version, by name with their address; empty: opened when it is needed."""
        ways = {}
        if self._config.transport in ("auto", "local"):
            ways["local"] = str(offer.slot.path)
        if self._config.transport in ("auto", "collective"):
            ways["collective"] = self._collective.open() if self._collective is not None else ""
        return ways

    def _hello(self, requester: Requester, timeout_s: float) -> Welcome:
        hello = Hello("learner", self._name, os.getpid(), socket.gethostname(), "", self._fingerprint)
        welcome: Welcome = requester.request(hello, timeout_s=timeout_s).message
        return welcome

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

    def _wait_announced(self) -> _Offer | None:
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
            self._open_collective()
            self._announce_again()
        elif reply.ranks:
            return self._send(reply)
        return ""

    def _announce_again(self) -> None:
        with self._changed:
            self._announced = None
            self._changed.notify_all()

    def _open_collective(self) -> Outbox:
        if self._collective is None:
            from weightsync.transports.collective import CollectiveOutbox

            self._collective = CollectiveOutbox(self._config.collective_host, timeout_s=self._config.timeout_s)
            self._collective.open()
        return self._collective

    def _send(self, reply: RoundReply) -> str:
        offer = self._offer_of(reply.round)
        if offer is None:
            return "failed: the version was superseded"
        with self._staging.sending(offer.slot, offer.order) as intact:
            if not intact:
                return "failed: the version was superseded"
            buckets = offer.slot.buckets(offer.manifest.bucket_bytes)
            try:
                self._open_collective().send(reply, buckets, deadline_s=self._config.timeout_s)
            except TransportError as error:
                return f"failed: {error.message}"
        return "sent"

    def _offer_of(self, round_: int) -> _Offer | None:
        """The version that a round carries: the newest that was announced no later."""
        with self._announcing, self._changed:
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
