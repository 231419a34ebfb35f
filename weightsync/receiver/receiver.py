"""The generator's end of weight sync: polls the service, takes versions into the engine, proves what it loaded.

Runs on a producer's event loop beside generation. Guarantees:
1. the engine's version changes only after every bucket had the digest of the manifest; anything else is aborted, the
   old version stays, and the service hears why;
2. what the model holds after the commit is digested by the engine; if that is not the manifest's digest, the service is
   told and `engine.broken` ends `run`, since samples of unknown weights must not exist. So it is where a later look
   (`weightsync.receiver.attestation`) finds other weights than were committed;
3. `digests[v]` is what the model was last seen to hold as version v. While a commit is under way `wait_version` does
   not return: no sample leaves before the weights that may have made it were digested;
4. hops are taken only where they start at what this engine holds; where they turn out useless, the next poll asks for
   whole weights (`encodings`), until a version was committed, or for good from an engine that cannot be read;
5. an engine that loads in place is dirty from before the first byte to the commit: the service is told so (version -1,
   "joining") in a poll of its own before the engine is touched, and gets no deltas and no adapters;
6. versions that came over a network are kept and served to others (`weightsync.relay_fanout`), an old one until the
   new one is committed;
7. with keys, nothing is loaded that the learner did not sign;
8. blocking transport work runs in threads; every wait has a deadline. A service that is silent for `max_outage_s` ends
   `run` with `net.unreachable`; a shorter silence costs nothing but fresh weights.
Bucket bytes are checked after the engine copied them: what a writer overwrites meanwhile cannot pass (it never writes
the old bytes again).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config import WeightSyncConfig
from asyncrl.engine import Engine
from asyncrl.errors import AsyncRLError, Unavailable, WorkError
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import Keys
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Instruction, Manifest, MemberPoll, Tensor
from weightsync.plan.buckets import check_layout
from weightsync.plan.signature import is_genuine
from weightsync.receiver.attestation import EVERY_S, SHARE, held_digest
from weightsync.receiver.relay_copy import HeldVersion
from weightsync.receiver.transfer import HopsUseless, Intake
from weightsync.transports.base import InboxMaker, Outbox, TransportError
from weightsync.transports.catalogue import inboxes, outbox

LONGEST_POLL_S = 2.0
STOP_LOOK_S = 0.05
ANSWER_S = 5.0  # beyond the poll's own time
KINDS = ("full", "adapter")  # of manifests
ATTEST_LOOK_S = 0.25


def built_in_transports(config: WeightSyncConfig | None = None, *, keys: Keys | None = None) -> dict[str, InboxMaker]:
    """Inboxes by transport name; torch is loaded when the collective one is first used."""
    return inboxes(config or WeightSyncConfig(), keys=keys)


def _heard(ended: asyncio.Future[str]) -> None:
    """Take note of a failure that nobody waits for any more: `run` was left in the middle of a commit."""
    if not ended.cancelled():
        ended.exception()


async def _until(stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(STOP_LOOK_S)


class Receiver:
    """One generator. `version` is -1 until the first commit; read `waiting_for` to say what it waits for.

    `relay` makes the outbox through which versions are passed on (default: transport `stream`); `attest_every_s` is the
    shortest pause between two looks at what the engine holds, 0 for none.
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
        self.digests: dict[int, str] = {}
        self.waiting_for = "the first weights"
        self.dirty = False  # in place: the engine is of no version
        self.waited_s = 0.0  # of the last transfer: time without anything to do
        self._address = address
        self._engine = engine
        self._name = name
        self._keys = keys
        self._config = config
        self._transports = dict(transports if transports is not None else built_in_transports(config, keys=keys))
        self._max_outage_s = max_outage_s
        self._wait_s = min(LONGEST_POLL_S, config.member_timeout_s / 4)
        self._commit_s = config.timeout_s
        self._layout: tuple[str, tuple[Tensor, ...]] = ("", ())
        self._fingerprint = ""
        self._pending: Manifest | None = None  # received whole, waiting for the word to commit
        self._base = ""  # digest of the whole weights that the engine holds, under an adapter where there is one
        self._held: tuple[Manifest, tuple[Tensor, ...]] | None = None  # what was committed
        self._without: set[str] = set()  # encodings that are of no use until the next commit
        self._unreadable = False  # the engine cannot say what it holds
        self._committing = False
        self._touched = 0  # grows with all that may change the engine's weights
        self._attest_every_s = attest_every_s
        self._make_relay = relay or (lambda: outbox("stream", config, run_dir=Path(), keys=keys, insecure=insecure))
        self._relay: Outbox | None = None
        self._relay_address = ""
        self._taken: HeldVersion | None = None  # what is passed on of the pending version
        self._passed_on: list[HeldVersion] = []  # offered to others, and not ended
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

        def attested() -> bool:
            return not self._committing and (self.version >= at_least or at_least in self.digests)

        try:
            async with asyncio.timeout(timeout_s), self._advanced:
                await self._advanced.wait_for(attested)
        except TimeoutError:
            raise WorkError(
                "sync.failed",
                f"version {at_least} did not arrive within {timeout_s:g} s: holds {self.version}, "
                f"waits for {self.waiting_for}",
                where=self._name,
            ) from None
        return self.version

    async def wait_newer(self, version: int, timeout_s: float) -> bool:
        """Wait for a commit of a newer version than this; False where there was none in time."""
        try:
            async with asyncio.timeout(timeout_s), self._advanced:
                await self._advanced.wait_for(lambda: self.version > version)
        except TimeoutError:
            return False
        return True

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the service until `stop` is set or it says stop."""
        self._fingerprint = self._engine.fingerprint()
        requester = AsyncRequester(self._address, keys=self._keys, resend_s=1.0)
        stopped = asyncio.ensure_future(_until(stop))
        followed = asyncio.ensure_future(self._follow(requester))
        looking = asyncio.ensure_future(self._attest(requester))
        tasks: set[asyncio.Future[None]] = {stopped, followed, looking}
        try:
            # bounded: the life of the role; the service's silence ends it after max_outage_s
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for ended in (followed, looking):
                if ended.done():
                    ended.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=self._commit_s)
            requester.close()
            if self._relay is not None:
                await asyncio.to_thread(self._relay.close)

    # ------------------------------------------------------------ the service

    async def _follow(self, requester: AsyncRequester) -> None:
        heard = time.monotonic()
        while True:
            try:
                instruction = await self._poll(requester, wait_s=self._wait_s)
            except Unavailable:
                silent = time.monotonic() - heard
                self.waiting_for = f"the weight-sync service ({self._address}), silent for {silent:.0f} s"
                if silent > self._max_outage_s:
                    raise
                continue
            heard = time.monotonic()
            if instruction.action == "stop":
                return
            try:
                await self._obey(instruction)
            except AsyncRLError as error:
                await self._say_why(requester, error)
                raise

    async def _say_why(self, requester: AsyncRequester, error: AsyncRLError) -> None:
        """Tell the service why this member ends; it may not answer."""
        self._error = f"{error.code}: {error.message}"
        try:
            await self._poll(requester, wait_s=0.0)
        except AsyncRLError:
            return

    async def _poll(self, requester: AsyncRequester, *, wait_s: float) -> Instruction:
        pending, version = self._pending, -1 if self.dirty else self.version
        state = "prepared" if pending is not None else "serving" if version >= 0 else "joining"
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
                "" if self.dirty else self._relay_address,
                time.monotonic_ns(),
                "" if self.dirty else self._base,
            ),
            timeout_s=wait_s + ANSWER_S,
            wait_s=wait_s,
        )
        self._error = ""
        instruction: Instruction = packet.message
        return instruction

    async def _obey(self, instruction: Instruction) -> None:
        if instruction.action == "receive" and instruction.manifest is not None:
            await self._receive(instruction, instruction.manifest)
        elif instruction.action == "commit" and self._pending is not None:
            await self._commit(self._pending)
        elif instruction.action == "abort" and self._pending is not None:
            self._pending = self._taken = None
            await self._engine.abort_update()
        else:
            self.waiting_for = instruction.detail or "the next version"

    # ------------------------------------------------------------ a transfer

    async def _receive(self, instruction: Instruction, manifest: Manifest) -> None:
        """Take a version into the engine without committing it; on failure it is aborted and the reason is kept."""
        if self._in_place and not self.dirty:
            self.dirty = True  # the next poll says so, still of the round before; its answer is this instruction again
            self._touched += 1
            return
        self._round = instruction.round
        self._error = self._refusal(instruction, manifest)
        if self._error:
            return
        tensors = instruction.tensors if self._layout[0] != manifest.plan else self._layout[1]
        check_layout(manifest, tensors)
        self._layout = (manifest.plan, tensors)
        self.waiting_for = f"version {manifest.version} by {instruction.transport}"
        self._pending = self._taken = None
        whole = False
        try:
            whole = await self._take(instruction, manifest, tensors)
        finally:  # also where `run` ends in the middle of it
            if not whole:
                await self._engine.abort_update()
        self._pending = manifest if whole else None

    def _refusal(self, instruction: Instruction, manifest: Manifest) -> str:
        """Why this instruction cannot be followed; empty where it can."""
        if not is_genuine(manifest, self._keys):
            return f"version {manifest.version} is not signed by this run's key"
        if instruction.transport not in self._transports or manifest.encoding not in KINDS:
            return f"cannot receive {manifest.encoding!r} by {instruction.transport or 'nothing'}"
        if manifest.encoding == "adapter" and self._in_place:
            return "cannot receive an adapter: the engine loads in place"
        if not instruction.hops:
            return ""
        first, held = instruction.hops[0], self._held[0] if self._held is not None and not self.dirty else None
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
        """True where the engine has every bucket with its digest."""
        try:
            self._end_older()
            async with asyncio.timeout(instruction.deadline_s):
                await self._engine.begin_update(manifest, tensors)
                inbox = self._transports[instruction.transport](instruction)
                pulls = self._config.transport in ("auto", "stream")  # a copy for others costs more than the transfer
                keep = pulls and self._config.relay_fanout > 0 and instruction.transport != "local"
                intake = Intake(self._engine, instruction, tensors, inbox, keep=keep)
                await intake.run()
        except HopsUseless as error:
            self._without.add("delta")
            self._unreadable = self._unreadable or "cannot say" in error.message
            self._error = error.message
        except TransportError as error:
            self._error = error.message
        except TimeoutError:
            self._error = f"{instruction.transport}: not complete within {instruction.deadline_s:.1f} s"
        except WorkError as error:  # the engine's own word: an adapter of another base
            if error.code != "sync.failed":
                raise
            self._error = error.message
        else:
            self.waited_s = intake.waited_s
            self._taken = intake.taken
            return True
        return False

    async def _commit(self, manifest: Manifest) -> None:
        self._pending = None
        self._committing = True  # stays where it fails: what is decoded then must not leave
        self._touched += 1
        failpoint("weightsync.before_commit")
        # Not cancelled at the deadline: a commit that was cut in the middle leaves a model of two versions.
        commit = asyncio.ensure_future(self._engine.commit_update())
        commit.add_done_callback(_heard)
        done, _ = await asyncio.wait({commit}, timeout=self._commit_s)
        if not done:
            raise WorkError("engine.broken", f"no commit of version {manifest.version} within {self._commit_s:g} s")
        digest = commit.result()
        failpoint("weightsync.after_commit")
        self._check_held(manifest, digest)
        self.digests[manifest.version] = digest
        self._held = (manifest, self._layout[1])
        self._base = manifest.base or manifest.digest
        self._without.clear()
        self.dirty = False
        async with self._advanced:
            self.version = manifest.version
            self._committing = False
            self._advanced.notify_all()
        await self._pass_on()

    def _check_held(self, manifest: Manifest, digest: str) -> None:
        if digest != manifest.digest:
            raise WorkError(
                "engine.broken",
                f"after the commit of version {manifest.version} the model holds {digest}, not {manifest.digest}",
                where=self._name,
            )

    def _end_older(self) -> None:
        """Before the engine makes room: end what is passed on, but for the version in force."""
        now = self._held[0].digest if self._held is not None else ""
        last = [version for version in self._passed_on[-1:] if version.manifest.digest == now]
        for version in self._passed_on[: len(self._passed_on) - len(last)]:
            version.end()
        self._passed_on = last

    async def _pass_on(self) -> None:
        """Serve the committed version to others, where there is a host copy of it."""
        taken, self._taken = self._taken, None
        self._relay_address = ""
        if taken is None:
            return
        self._passed_on.append(taken)
        if self._relay is None:
            self._relay = self._make_relay()
        try:
            self._relay_address = await asyncio.to_thread(self._relay.offer, taken)
        except AsyncRLError as error:  # it does not have to relay
            self._error = f"cannot pass versions on: {error.message}"

    # ------------------------------------------------------------ attestation

    async def _attest(self, requester: AsyncRequester) -> None:
        """Look now and then whether the engine still holds what it committed; raises `engine.broken` where not."""
        due = time.monotonic() + self._attest_every_s
        while True:
            await asyncio.sleep(ATTEST_LOOK_S)
            if not self._attest_every_s or time.monotonic() < due or self._held is None or self._committing:
                continue
            started = time.monotonic()
            try:
                await self._look()
            except WorkError as error:
                await self._say_why(requester, error)
                raise
            ended = time.monotonic()
            due = ended + max(self._attest_every_s, (ended - started) / SHARE)

    async def _look(self) -> None:
        assert self._held is not None
        manifest, tensors = self._held
        touched = self._touched
        digest = await held_digest(self._engine, manifest, tensors, still=lambda: touched == self._touched)
        if digest and digest != manifest.digest:
            self.digests[manifest.version] = digest
            raise WorkError(
                "engine.broken",
                f"the weights of version {manifest.version} have changed since the commit: the model "
                f"holds {digest}, not {manifest.digest}",
                where=self._name,
            )
