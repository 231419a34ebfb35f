"""The generator's end of weight sync: polls the service, takes buckets into the engine, proves what it loaded.

Runs on a producer's event loop beside generation. Guarantees:
1. the engine's version changes only after every bucket had the digest of the manifest; anything else is aborted, the
   old version stays, and the service hears why;
2. what the model holds after the commit is digested by the engine; if that is not the manifest's digest, the service is
   told and `engine.broken` ends `run`, since samples of unknown weights must not exist;
3. `digests[v]` is what the model held when it committed version v, and equals the manifest's digest;
4. blocking transport work runs in threads; every wait has a deadline. A service that is silent for `max_outage_s` ends
   `run` with `net.unreachable`; a shorter silence costs nothing but fresh weights.
Bucket bytes are checked after the engine copied them: what a writer overwrites meanwhile cannot pass (it never writes
the old bytes again).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import AsyncRLError, Unavailable, WorkError
from asyncrl.failpoints import failpoint
from asyncrl.plugins import Engine
from asyncrl.sockets import AsyncRequester, Keys
from asyncrl.wire import Instruction, Manifest, MemberPoll, Tensor
from weightsync.digest import bucket_digest, whole_digest
from weightsync.encoding.full import ENCODINGS
from weightsync.plan import by_bucket, check_layout
from weightsync.transports.base import Inbox, InboxMaker, TransportError

LONGEST_POLL_S = 2.0
STOP_LOOK_S = 0.05
ANSWER_S = 5.0  # beyond the poll's own time


def built_in_transports() -> dict[str, InboxMaker]:
    """Inboxes by transport name; torch is loaded when the collective one is first used."""
    from weightsync.transports.local import LocalInbox

    def collective(instruction: Instruction) -> Inbox:
        from weightsync.transports.collective import CollectiveInbox

        return CollectiveInbox(instruction)

    return {"local": LocalInbox, "collective": collective}


async def _until(stop: asyncio.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(STOP_LOOK_S)


class Receiver:
    """One generator. `version` is -1 until the first commit; read `waiting_for` to say what it waits for."""

    def __init__(
        self, address: str, *, engine: Engine, name: str, keys: Keys | None, config: WeightSyncConfig,
        transports: Mapping[str, InboxMaker] | None = None, max_outage_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.version = -1
        self.digests: dict[int, str] = {}
        self.waiting_for = "the first weights"
        self._address = address
        self._engine = engine
        self._name = name
        self._keys = keys
        self._transports = dict(transports if transports is not None else built_in_transports())
        self._max_outage_s = max_outage_s
        self._wait_s = min(LONGEST_POLL_S, config.member_timeout_s / 4)
        self._commit_s = config.timeout_s
        self._layout: tuple[str, tuple[Tensor, ...]] = ("", ())
        self._fingerprint = ""
        self._pending: Manifest | None = None  # received whole, waiting for the word to commit
        self._round = 0
        self._error = ""
        self._advanced = asyncio.Condition()

    async def wait_version(self, at_least: int, timeout_s: float) -> int:
        """Wait until the engine holds this version or a newer one. Raises `sync.failed` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._advanced:
                await self._advanced.wait_for(lambda: self.version >= at_least)
        except TimeoutError:
            raise WorkError(
                "sync.failed", f"version {at_least} did not arrive within {timeout_s:g} s: holds {self.version}, "
                f"waits for {self.waiting_for}", where=self._name,
            ) from None  # fmt: skip
        return self.version

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the service until `stop` is set or it says stop."""
        self._fingerprint = self._engine.fingerprint()
        requester = AsyncRequester(self._address, keys=self._keys, resend_s=1.0)
        stopped = asyncio.ensure_future(_until(stop))
        followed = asyncio.ensure_future(self._follow(requester))
        try:
            # bounded: the life of the role; the service's silence ends it after max_outage_s
            await asyncio.wait({stopped, followed}, return_when=asyncio.FIRST_COMPLETED)
            if followed.done():
                followed.result()
        finally:
            stopped.cancel()
            followed.cancel()
            await asyncio.wait({stopped, followed}, timeout=self._commit_s)
            requester.close()

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
                self._error = f"{error.code}: {error.message}"
                await self._poll_once_more(requester)
                raise

    async def _poll_once_more(self, requester: AsyncRequester) -> None:
        """Tell the service why this member ends; it may not answer."""
        try:
            await self._poll(requester, wait_s=0.0)
        except AsyncRLError:
            return

    async def _poll(self, requester: AsyncRequester, *, wait_s: float) -> Instruction:
        pending = self._pending
        state = "prepared" if pending is not None else "serving" if self.version >= 0 else "joining"
        digest = pending.digest if pending is not None else self.digests.get(self.version, "")
        packet = await requester.request(
            MemberPoll(
                self._name, os.getpid(), socket.gethostname(), self._fingerprint, state, self.version, digest,
                self._round, wait_s, tuple(self._transports), self._layout[0], self._error,
            ),
            timeout_s=wait_s + ANSWER_S, wait_s=wait_s,
        )  # fmt: skip
        self._error = ""
        instruction: Instruction = packet.message
        return instruction

    async def _obey(self, instruction: Instruction) -> None:
        if instruction.action == "receive":
            self._round = instruction.round
            await self._receive(instruction)
        elif instruction.action == "commit" and self._pending is not None:
            await self._commit(self._pending)
        elif instruction.action == "abort" and self._pending is not None:
            self._pending = None
            await self._engine.abort_update()
        else:
            self.waiting_for = instruction.detail or "the next version"

    async def _receive(self, instruction: Instruction) -> None:
        """Take a version into the engine without committing it; on failure it is aborted and the reason is kept."""
        manifest = instruction.manifest
        if manifest is None or instruction.transport not in self._transports or manifest.encoding not in ENCODINGS:
            self._error = f"cannot receive {instruction.transport or 'nothing'}"
            return
        tensors = instruction.tensors if self._layout[0] != manifest.plan else self._layout[1]
        check_layout(manifest, tensors)
        self._layout = (manifest.plan, tensors)
        self.waiting_for = f"version {manifest.version} by {instruction.transport}"
        inbox = self._transports[instruction.transport](instruction)
        await self._engine.begin_update(manifest, tensors)
        try:
            async with asyncio.timeout(instruction.deadline_s):
                await self._take(inbox, manifest, tensors)
        except TransportError as error:
            self._error = error.message
        except TimeoutError:
            self._error = f"{instruction.transport}: not complete within {instruction.deadline_s:.1f} s"
        else:
            self._pending = manifest
            return
        finally:
            await asyncio.to_thread(inbox.close)
        await self._engine.abort_update()

    async def _take(self, inbox: Inbox, manifest: Manifest, tensors: tuple[Tensor, ...]) -> None:
        if whole_digest(manifest.bucket_digests) != manifest.digest:
            raise TransportError("the manifest's bucket digests do not make its digest")
        await asyncio.to_thread(inbox.open)
        for number, group in enumerate(by_bucket(tensors, len(manifest.bucket_bytes))):
            view = await asyncio.to_thread(inbox.read, number)
            await self._engine.apply_bucket(number, view)
            failpoint("weightsync.after_bucket")
            if await asyncio.to_thread(bucket_digest, group, view) != manifest.bucket_digests[number]:
                raise TransportError(f"bucket {number} of version {manifest.version} has another digest than published")

    async def _commit(self, manifest: Manifest) -> None:
        self._pending = None
        failpoint("weightsync.before_commit")
        # Not cancelled at the deadline: a commit that was cut in the middle leaves a model of two versions.
        commit = asyncio.ensure_future(self._engine.commit_update())
        done, _ = await asyncio.wait({commit}, timeout=self._commit_s)
        if not done:
            raise WorkError("engine.broken", f"no commit of version {manifest.version} within {self._commit_s:g} s")
        digest = commit.result()
        failpoint("weightsync.after_commit")
        if digest != manifest.digest:
            raise WorkError(
                "engine.broken", f"after the commit of version {manifest.version} the model holds {digest}, not "
                f"{manifest.digest}", where=self._name,
            )  # fmt: skip
        self.digests[manifest.version] = digest
        async with self._advanced:
            self.version = manifest.version
            self._advanced.notify_all()
