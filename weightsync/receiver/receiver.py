"""The generator's end of weight sync: polls the service, takes versions into the engine, proves what it loaded.

Runs on a producer's event loop, next to generation. Guarantees:
1. the engine's version changes only after every bucket had the digest of the manifest; anything else is aborted, the
   old version stays, and the service gets the reason;
2. the engine digests what the model holds after the commit; if that is not the manifest's digest, the service gets the
   error and `engine.broken` ends `run`, because samples of unknown weights must not exist. The same happens if a later
   check (`weightsync.receiver.attestation`) finds other weights;
3. `digests[v]` is the last digest of the model as version v. `wait_version` does not return during a commit: no sample
   leaves before the weights that may have made it were digested;
4. hops are taken only from what this engine holds; if they fail, the next poll asks for whole weights (`encodings`),
   until a version was committed, or permanently from an engine that cannot be read;
5. an engine that loads in place is dirty from before the first byte to the commit: a separate poll reports this
   (version -1, "joining") before the engine is touched, and it gets no deltas and no adapters;
6. versions that came over a network are kept and relayed to others (`weightsync.relay_fanout`), an old one until the
   new one is committed;
7. with keys, only manifests that the learner signed are loaded;
8. while `hold` is active the engine keeps its version; weights that are under way are given up;
9. blocking transport work runs in threads; every wait has a deadline. A service that is silent for `max_outage_s` ends
   `run` with `net.unreachable`; a shorter silence only delays fresh weights.
Bucket bytes are checked after the engine copied them: bytes that a writer overwrites meanwhile cannot pass (it never
writes the old bytes again).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import WeightSyncConfig
from asyncrl.engine import Engine
from asyncrl.errors import AsyncRLError, HandshakeError, Unavailable, WorkError
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import Keys
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Instruction, Manifest, MemberPoll, Tensor
from weightsync.plan.buckets import check_layout
from weightsync.plan.limits import limit_for
from weightsync.plan.signature import is_genuine
from weightsync.receiver.attestation import EVERY_S, Attestor
from weightsync.receiver.dequantised import DequantisedEngine
from weightsync.receiver.digests import Digests
from weightsync.receiver.hold import POLL_S as HOLD_POLL_S
from weightsync.receiver.hold import Hold
from weightsync.receiver.relay_copy import Relay, RelayCopy
from weightsync.receiver.transfer import HopsUseless, make_transfer
from weightsync.transports.base import InboxMaker, Outbox, TransportError
from weightsync.transports.catalogue import make_inboxes, make_outbox

LONGEST_POLL_S = 2.0
STOP_LOOK_S = 0.05
ANSWER_S = 5.0  # beyond the poll's own time
KINDS = ("full", "adapter")  # of manifests


def built_in_transports(config: WeightSyncConfig | None = None, *, keys: Keys | None = None) -> dict[str, InboxMaker]:
    """Makers of inboxes by transport name; torch is loaded when the collective one is first used."""
    return make_inboxes(config or WeightSyncConfig(), keys=keys)


def _retrieve(ended: asyncio.Future[str]) -> None:
    """Retrieve the error of a commit after `run` ended in the middle of it."""
    if not ended.cancelled():
        ended.exception()


async def _wait_set(stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(STOP_LOOK_S)


class Receiver:
    """One generator. `version` is -1 until the first commit; `waiting_for` is a text for status displays.

    `relay` makes the outbox of relayed versions (default: transport `stream`); `attest_every_s` is the shortest pause
    between two checks of the engine's weights, 0 for none.
    """

    def __init__(
        self,
        address: str,
        *,
        engine: Engine,
        name: str,
        keys: Keys | None,
        config: WeightSyncConfig,
        transports: Mapping[str, InboxMaker] | None = None,
        max_outage_s: float = 300.0,
        insecure: bool = False,
        relay: Callable[[], Outbox] | None = None,
        attest_every_s: float = EVERY_S,
    ) -> None:
        self.version = -1
        self.digests = Digests()
        self.waiting_for = "the first weights"
        self.dirty = False  # in place: the engine is of no version
        self.hold = Hold(lambda: -1 if self.dirty or self._attestor.committing else self.version)
        self.waited_s = 0.0  # time in the last transfer that was spent waiting
        self._address = address
        decoded: Any = DequantisedEngine(engine, keep=config.encoding == "delta") if config.quantised else engine
        self._engine: Engine = decoded
        self._name = self._given_name = name  # with a suffix if another process has the name
        self._keys = keys
        self._config = config
        self._transports = dict(transports if transports is not None else built_in_transports(config, keys=keys))
        if config.transport != "direct" or not hasattr(self._engine, "receive_update"):
            self._transports.pop("direct", None)
        self._max_outage_s = max_outage_s
        self._wait_s = min(LONGEST_POLL_S, config.member_timeout_s / 4)
        self._commit_s = config.timeout_s
        self._turn_s: float = getattr(engine, "commit_turn_s", 0.0)  # longest wait of a commit for its device
        self._layout: tuple[str, tuple[Tensor, ...]] = ("", ())
        self._fingerprint = ""
        self._pending: Manifest | None = None  # received whole, waiting for the instruction to commit
        self._base = ""  # digest of the whole weights that the engine holds, under an adapter if there is one
        self._without: set[str] = set()  # encodings that cannot be used until the next commit
        self._unreadable = False  # the engine cannot say what it holds
        self._attestor = Attestor(self._engine, self.digests, every_s=attest_every_s, name=name)
        self._relay = Relay(
            relay or (lambda: make_outbox("stream", config, run_dir=Path(), keys=keys, insecure=insecure))
        )
        self._received: RelayCopy | None = None  # of the pending version
        self._round = 0
        self._error = ""
        self._advanced = asyncio.Condition()

    @property
    def _in_place(self) -> bool:
        return self._engine.capabilities().in_place

    @property
    def encodings(self) -> tuple[str, ...]:
        """What this member can take now."""
        if self._in_place:
            return ("full",)
        without = self._without | ({"delta"} if self._unreadable else set())
        takes = (*self._engine.capabilities().encodings, "delta")
        return tuple(name for name in ("full", "delta", "adapter") if name in takes and name not in without)

    async def wait_version(self, at_least: int, timeout_s: float) -> int:
        """Wait until this version or a newer one was committed and digested, and no commit is under way.

        Raises:
            WorkError: `sync.failed` after `timeout_s`.
        """

        def is_attested() -> bool:
            return not self._attestor.committing and (self.version >= at_least or at_least in self.digests)

        try:
            async with asyncio.timeout(timeout_s), self._advanced:
                await self._advanced.wait_for(is_attested)
        except TimeoutError:
            raise WorkError(
                "sync.failed",
                f"version {at_least} did not arrive within {timeout_s:g} s: holds {self.version}, "
                f"waits for {self.waiting_for}",
                where=self._name,
            ) from None
        return self.version

    async def wait_newer(self, version: int, timeout_s: float) -> bool:
        """Wait for a commit of a newer version than this; False if there was none in time."""
        try:
            async with asyncio.timeout(timeout_s), self._advanced:
                await self._advanced.wait_for(lambda: self.version > version)
        except TimeoutError:
            return False
        return True

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the service until `stop` is set or it sends `stop`."""
        self._fingerprint = self._engine.fingerprint()
        requester = AsyncRequester(self._address, keys=self._keys, resend_s=1.0)
        stopped = asyncio.ensure_future(_wait_set(stop))
        followed = asyncio.ensure_future(self._follow(requester))
        attesting = asyncio.ensure_future(self._attestor.run(lambda error: self._report(requester, error)))
        tasks: set[asyncio.Future[None]] = {stopped, followed, attesting}
        try:
            # bounded: the life of the role; the service's silence ends it after max_outage_s
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in (followed, attesting):
                if ended.done():
                    ended.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=self._commit_s)
            requester.close()
            await self._relay.close()

    # ------------------------------------------------------------ the service

    async def _follow(self, requester: AsyncRequester) -> None:
        answered = time.monotonic()
        while True:
            try:
                if self.hold.active:
                    await self._drop_pending()
                instruction = await self._poll(requester, wait_s=HOLD_POLL_S if self.hold.active else self._wait_s)
            except Unavailable:
                silent = time.monotonic() - answered
                self.waiting_for = f"the weight-sync service ({self._address}), silent for {silent:.0f} s"
                if silent > self._max_outage_s:
                    raise
                continue
            except HandshakeError as error:
                if error.code != "handshake.name" or self._name != self._given_name:
                    raise
                self._name = f"{self._given_name}-{secrets.token_hex(2)}"
                print(f"{error.message}: this member works as {self._name}", flush=True)
                continue
            answered = time.monotonic()
            if instruction.action == "stop":
                return
            try:
                await self._execute(instruction)
            except AsyncRLError as error:
                await self._report(requester, error)
                raise

    async def _report(self, requester: AsyncRequester, error: AsyncRLError) -> None:
        """Send the service the reason why this member ends; it may not answer."""
        self._error = f"{error.code}: {error.message}"
        try:
            await self._poll(requester, wait_s=0.0)
        except AsyncRLError:
            return

    async def _poll(self, requester: AsyncRequester, *, wait_s: float) -> Instruction:
        pending, version = self._pending, -1 if self.dirty else self.version
        state = "prepared" if pending is not None else "serving" if version >= 0 else "joining"
        state = "holding" if self.hold.active and pending is None else state
        digest = pending.digest if pending is not None else self.digests.get(version, "")
        packet = await requester.request(
            MemberPoll(
                self._name,
                os.getpid(),
                socket.gethostname(),
                self._fingerprint,
                state,
                version,
                digest,
                self._round,
                wait_s,
                tuple(self._transports),
                self._layout[0],
                self._error,
                self.encodings,
                "" if self.dirty else self._relay.address,
                time.monotonic_ns(),
                "" if self.dirty else self._base,
            ),
            timeout_s=wait_s + ANSWER_S,
            wait_s=wait_s,
        )
        self._error = ""
        instruction: Instruction = packet.message
        return instruction

    async def _drop_pending(self) -> None:
        """Give up a version that was received and not committed."""
        if self._pending is not None:
            self._pending = self._received = None
            await self._engine.abort_update()

    async def _execute(self, instruction: Instruction) -> None:
        grouped = instruction.transport == "collective" and not self._in_place
        if self.hold.active and not grouped:  # a group waits for every rank: received, then given up
            return  # the next report says why
        if instruction.action == "receive" and instruction.manifest is not None:
            await self._receive(instruction, instruction.manifest)
        elif instruction.action == "commit" and self._pending is not None:
            await self._commit(self._pending)
        elif instruction.action == "abort":
            await self._drop_pending()
        else:
            self.waiting_for = instruction.detail or "the next version"

    # ------------------------------------------------------------ a transfer

    async def _receive(self, instruction: Instruction, manifest: Manifest) -> None:
        """Take a version into the engine without a commit; on failure abort it and keep the reason."""
        if self._in_place and not self.dirty:
            self.dirty = True  # the next poll reports it, with the old round; its answer is this instruction again
            self._attestor.note_change()
            return
        self._round = instruction.round
        self._error = self._refusal(instruction, manifest)
        if self._error:
            return
        tensors = instruction.tensors if self._layout[0] != manifest.plan else self._layout[1]
        check_layout(manifest, tensors)
        self._layout = (manifest.plan, tensors)
        self.waiting_for = f"version {manifest.version} by {instruction.transport}"
        self._pending = self._received = None
        whole = False
        try:
            whole = await self._take(instruction, manifest, tensors)
        finally:  # also if `run` ends in the middle of it
            if not whole:
                await self._engine.abort_update()
        self._pending = manifest if whole else None

    def _refusal(self, instruction: Instruction, manifest: Manifest) -> str:
        """Why this instruction cannot be followed; empty if it can."""
        if not is_genuine(manifest, self._keys):
            return f"version {manifest.version} is not signed by this run's key"
        if instruction.transport not in self._transports or manifest.encoding not in KINDS:
            return f"cannot receive {manifest.encoding!r} by {instruction.transport or 'nothing'}"
        if manifest.encoding == "adapter" and self._in_place:
            return "cannot receive an adapter: the engine loads in place"
        if not instruction.hops:
            return ""
        committed = self._attestor.committed
        first, held = instruction.hops[0], committed[0] if committed is not None and not self.dirty else None
        if "delta" not in self.encodings:
            return "cannot receive deltas now"
        if held is None or (first.base, first.base_digest, manifest.plan) != (held.version, held.digest, held.plan):
            self._without.add("delta")
            holds = f"version {held.version} ({held.digest[:12]})" if held is not None else "nothing"
            return f"the delta starts at version {first.base} ({first.base_digest[:12]}), this engine holds {holds}"
        if any(len(hop.nbytes) != len(manifest.bucket_bytes) for hop in instruction.hops):
            self._without.add("delta")
            return "the delta has another number of buckets than the version"
        return ""

    async def _take(self, instruction: Instruction, manifest: Manifest, tensors: tuple[Tensor, ...]) -> bool:
        """True if the engine has every bucket with its digest."""
        try:
            committed = self._attestor.committed
            self._relay.end_older(committed[0].digest if committed is not None else "")
            async with asyncio.timeout(instruction.deadline_s):
                transfer = make_transfer(self._engine, instruction, tensors, self._transports, self._config)
                await transfer.run()
        except HopsUseless as error:
            self._without.add("delta")
            self._unreadable = self._unreadable or "cannot say" in error.message
            self._error = error.message
        except TransportError as error:
            self._error = error.message
        except TimeoutError:
            self._error = f"{instruction.transport}: not complete within {instruction.deadline_s:.1f} s"
        except WorkError as error:  # from the engine: an adapter of another base
            if error.code != "sync.failed":
                raise
            self._error = error.message
        else:
            self.waited_s = transfer.waited_s
            self._received = transfer.copy
            return True
        return False

    async def _commit(self, manifest: Manifest) -> None:
        self._pending = None
        self._attestor.committing = True  # stays set after a failure: later samples must not leave
        self._attestor.note_change()
        failpoint("weightsync.before_commit")
        # Not cancelled at the deadline: half a commit leaves a model of two versions.
        commit = asyncio.ensure_future(self._engine.commit_update())
        commit.add_done_callback(_retrieve)
        limit_s = limit_for(self._commit_s, sum(manifest.bucket_bytes)) + self._turn_s
        done, _ = await asyncio.wait({commit}, timeout=limit_s)
        if not done:
            raise WorkError("engine.broken", f"no commit of version {manifest.version} within {limit_s:g} s")
        digest = commit.result()
        failpoint("weightsync.after_commit")
        self._check_digest(manifest, digest)
        self.digests.commit(manifest.version, digest)
        self._attestor.committed = (manifest, self._layout[1])
        self._base = manifest.base or manifest.digest
        self._without.clear()
        self.dirty = False
        async with self._advanced:
            self.version = manifest.version
            self._attestor.committing = False
            self._advanced.notify_all()
        await self._relay_committed()

    def _check_digest(self, manifest: Manifest, digest: str) -> None:
        if digest != manifest.digest:
            raise WorkError(
                "engine.broken",
                f"after the commit of version {manifest.version} the model holds {digest}, not {manifest.digest}",
                where=self._name,
            )

    async def _relay_committed(self) -> None:
        """Serve the committed version to others, if there is a host copy of it."""
        received, self._received = self._received, None
        try:
            await self._relay.offer(received)
        except AsyncRLError as error:  # relaying is optional
            self._error = f"cannot pass versions on: {error.message}"
