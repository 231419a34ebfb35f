"""The only door to the buffer: one client per role. Imports neither torch nor redis.

Guarantees:
1. every call ends: with its answer, with the service's refusal as an error of the catalogue, or with `net.unreachable`
   after `timeout_s` (plus the time that the service was asked to wait);
2. a call may be sent twice under way (the service is idempotent), never answered twice;
3. arrays of a claimed batch are read-only views into the received frames, or into bytes read from the service's segment
   files where the learner sees them (measured: half the service's CPU for large payloads).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl import wire
from asyncrl.engine import GenDelta
from asyncrl.errors import Unavailable, WireError
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import Keys
from asyncrl.net.requester import Requester
from asyncrl.runtime.failpoints import failpoint
from asyncrl.wire import Buffer, IntArray
from asyncrl.wire.batch_arrays import ClaimedBatch as ClaimedBatch  # noqa: PLC0414
from asyncrl.wire.batch_arrays import Frames as Frames  # noqa: PLC0414
from asyncrl.wire.batch_arrays import GroupData as GroupData  # noqa: PLC0414
from asyncrl.wire.batch_arrays import SampleData as SampleData  # noqa: PLC0414
from asyncrl.wire.batch_arrays import decode_batch, decode_row
from asyncrl.wire.batch_arrays import group_data as group_data  # noqa: PLC0414
from buffers.client.offline_ledger import epoch_of as epoch_of  # noqa: PLC0414
from buffers.client.offline_ledger import grown_ledger as grown_ledger  # noqa: PLC0414
from buffers.client.partial_samples import BegunSample as BegunSample  # noqa: PLC0414
from buffers.client.partial_samples import PieceData as PieceData  # noqa: PLC0414
from buffers.client.partial_samples import packed, unpacked
from buffers.client.place_reader import PlaceReader
from buffers.client.place_writer import PlaceWriter

MAX_BYTES = 1 << 30
Rows = tuple[tuple[int, int], ...]
Turns = tuple[tuple[int, float], ...]


class RewardTask(msgspec.Struct, frozen=True):
    """One sample to score."""

    item: wire.RewardItem
    prompt_ids: IntArray
    response_ids: IntArray
    row: dict[str, Any]
    mask: Any = None  # u1 [T]: 1 where the policy sampled the token; None: everywhere


class _AsyncClient:
    """What the clients on an event loop share."""

    role = ""

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._requester = AsyncRequester(address, keys=keys, max_bytes=max_bytes)

    async def _ask(self, message: wire.Message, payloads: Sequence[Buffer] = (), *, wait_s: float = 0.0) -> wire.Packet:
        return await self._requester.request(message, payloads, timeout_s=self._timeout_s + wait_s, wait_s=wait_s)

    async def hello(
        self, fingerprint: str = "", role: str = "", run_id: str = "", *, evaluation_rows: int = 0
    ) -> wire.Welcome:
        """Introduce this process; must be first. What the name held before is lost."""
        hello = wire.Hello(
            role or self.role, self.name, self._pid, self._host, run_id, fingerprint, evaluation_rows=evaluation_rows
        )
        welcome: wire.Welcome = (await self._ask(hello)).message
        return welcome

    async def heartbeat(
        self,
        stats: Mapping[str, float],
        *,
        waiting_for: str = "",
        holds: Sequence[wire.Lease | wire.RewardItem] | None = None,
    ) -> tuple[tuple[int, int], ...]:
        """This process is alive: its leases are renewed. `holds`: those it works on; others are lost after a while.

        The answer: leases (group, token) whose samples nobody wants any more.
        """
        named = None if holds is None else tuple((held.group, held.token) for held in holds)
        beat = wire.Heartbeat(self.role, self.name, self._pid, self._host, waiting_for, dict(stats), named)
        answer: wire.Ok = (await self._ask(beat)).message
        return answer.cancelled

    def close(self) -> None:
        self._requester.close()


class ProducerClient(_AsyncClient):
    """For producers: lease, submit, give back. A newer `lease` ends the wait of an older one. `begun`, by (group,
    token), is what others began of the samples of a lease; who starts the lease takes it out.

    On the service's host payloads of `place_from` bytes and more (None: what the service says) are written to a file
    that the service reads.
    """

    role = "producer"
    place_from: int | None = None
    _writer: PlaceWriter | None = None

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        super().__init__(address, name=name, keys=keys, max_bytes=max_bytes, timeout_s=timeout_s)
        self.begun: dict[tuple[int, int], tuple[BegunSample, ...]] = {}
        self._orphans: set[asyncio.Future[None]] = set()

    async def hello(
        self, fingerprint: str = "", role: str = "", run_id: str = "", *, evaluation_rows: int = 0
    ) -> wire.Welcome:
        """Introduce this process; must be first. What the name held before is lost."""
        welcome = await super().hello(fingerprint, role, run_id, evaluation_rows=evaluation_rows)
        if self._writer is None:
            self._writer = PlaceWriter.of(welcome)
        if self.place_from is None:
            self.place_from = welcome.place_bytes
        return welcome

    def close(self) -> None:
        """Close the socket and the file."""
        super().close()
        if self._writer is not None:
            self._writer.close()

    async def lease(self, *, engine_version: int, max_groups: int, wait_s: float) -> wire.Leases:
        """Groups to generate, maybe none; waits in the service up to `wait_s`.

        Cancelled while it waits, the request is finished in the background and what it got is given back.
        """
        asked = asyncio.ensure_future(
            self._ask(wire.LeaseRequest(self.name, engine_version, max_groups, wait_s), wait_s=wait_s)
        )
        try:
            packet = await asyncio.shield(asked)
        except asyncio.CancelledError:
            orphan = asyncio.ensure_future(self._return_orphans(asked))
            self._orphans.add(orphan)
            orphan.add_done_callback(self._orphans.discard)
            raise
        leases: wire.Leases = packet.message
        self.begun |= unpacked(leases, packet.payloads)
        return leases

    async def keep(
        self, lease: wire.Lease, pieces: Sequence[PieceData], digests: Mapping[int, str]
    ) -> wire.PiecesReply:
        """Checkpoints of samples under way: should this process die, another goes on from there."""
        message, payload = packed(self.name, lease, pieces, digests)
        reply: wire.PiecesReply = (await self._ask(message, (payload,))).message
        return reply

    async def _return_orphans(self, asked: asyncio.Future[wire.Packet]) -> None:
        try:
            leases = (await asked).message.leases  # bounded: the request has its timeout
            await self.give_back(leases, reason="stop")
        except Unavailable:
            return  # the service is gone: the leases expire there

    async def submit(
        self,
        lease: wire.Lease,
        *,
        prompt_ids: IntArray,
        samples: Sequence[GenDelta],
        digests: Mapping[int, str],
        row: Mapping[str, Any],
        rewards: Mapping[int, float] | None = None,
        masks: Mapping[int, Any] | None = None,
        rows: Mapping[int, Rows] | None = None,
        turns: Mapping[int, Turns] | None = None,
        parts: Mapping[int, Mapping[str, float]] | None = None,
    ) -> wire.SamplesReply:
        """Finished samples of a leased group. `digests`: version -> digest of the weights that the engine loaded.

        `masks` (sample index -> u1 `[T]`) where some tokens were not sampled by the policy; `rows` and `turns` as in
        `wire.SampleHead`; `parts` of `rewards` by name.
        """
        rows, turns = rows or {}, turns or {}
        arrays: dict[str, tuple[str, list[Any]]] = {
            "prompt": ("i4", [np.asarray(prompt_ids, wire.DTYPES["i4"])]),
            "response": ("i4", _joined([sample.token_ids for sample in samples], "i4")),
            "logprobs": ("f4", _joined([sample.logprobs for sample in samples], "f4")),
        }
        if masks:
            ones = [masks.get(sample.index, np.ones(len(sample.token_ids), np.uint8)) for sample in samples]
            arrays["mask"] = ("u1", _joined(ones, "u1"))
        fields, payload = wire.pack_parts(arrays)
        heads = tuple(
            wire.SampleHead(
                item.index,
                len(item.token_ids),
                item.finish,
                item.runs,
                rows.get(item.index, ()),
                turns.get(item.index, ()),
            )
            for item in samples
        )
        used = {version for sample in samples for version, _ in sample.runs}
        message = wire.Samples(
            self.name,
            lease.group,
            lease.token,
            heads,
            {v: digests[v] for v in sorted(used) if v in digests},
            fields,
            msgspec.json.encode(row).decode(),
            fields[0].count,
            rewards=dict(rewards or {}),
            parts={index: dict(named) for index, named in (parts or {}).items()},
        )
        if self._writer is not None and len(payload) >= (self.place_from or 0):
            found = await self._by_place(self._writer, message, payload)
            if found is not None:
                return found
        reply: wire.SamplesReply = (await self._ask(message, (payload,))).message
        return reply

    async def _by_place(self, writer: PlaceWriter, message: wire.Samples, payload: bytes) -> wire.SamplesReply | None:
        """The answer to samples whose payload lies in a file; None where the service cannot read it there."""
        place = writer.write(wire.encode_header(message), payload)
        if place is None:
            return None
        failpoint("producer.after_place")
        try:
            reply: wire.SamplesReply = (await self._ask(wire.SamplesAt(self.name, place))).message
        except WireError as error:
            if error.code != "wire.place":
                raise
            writer.refused(place)
            return None
        writer.accepted()
        return reply

    async def give_back(self, leases: Sequence[wire.Lease], *, reason: str, dead: bool = False) -> None:
        """Return leases; reason "stop" is no fault of the prompt. With `dead` the prompt is not tried again."""
        if leases:
            groups = tuple((lease.group, lease.token) for lease in leases)
            await self._ask(wire.LeaseReturn(self.name, groups, reason, dead))


def _joined(parts: Sequence[Any], dtype: str) -> list[Any]:
    """The arrays in a row, as they are sent."""
    return [np.concatenate(parts, dtype=wire.DTYPES[dtype], casting="unsafe")] if parts else []


class RewardClient(_AsyncClient):
    """For reward workers: work, scores."""

    role = "reward"

    def __init__(
        self,
        address: str,
        *,
        name: str,
        judge: str = "",
        keys: Keys | None = None,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(address, name=name, keys=keys, max_bytes=max_bytes, timeout_s=timeout_s)
        self.judge = judge  # for whom it scores

    async def work(self, *, max_samples: int, wait_s: float) -> tuple[list[RewardTask], bool]:
        """Samples to score, and whether the run is complete."""
        packet = await self._ask(wire.RewardRequest(self.name, max_samples, wait_s, self.judge), wait_s=wait_s)
        work: wire.RewardWork = packet.message
        tasks = []
        for item, payload in zip(work.items, packet.payloads, strict=True):
            arrays = wire.unpack_arrays(item.fields, payload)
            tasks.append(
                RewardTask(item, arrays["prompt"], arrays["response"], decode_row(item.row), arrays.get("mask"))
            )
        return tasks, work.done

    async def submit(
        self, scores: Sequence[wire.Score], failures: Sequence[wire.RewardFailure] = (), *, reward_version: str = ""
    ) -> wire.ScoresReply:
        """Rewards, and failures with their reason."""
        reply: wire.ScoresReply = (
            await self._ask(wire.Scores(self.name, tuple(scores), tuple(failures), reward_version, self.judge))
        ).message
        return reply


class LearnerClient:
    """For the learner; blocking. `heartbeat` may be called from another thread: it has a socket of its own."""

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        self.name = name
        self.epoch = 0
        self._step = 0  # steps in the weights, as told by `register` and `commit`
        self._batch: tuple[int, set[int]] = (0, set())  # step and groups of the newest batch, less those quarantined
        self._timeout_s = timeout_s
        self.answered = 0.0  # monotonic time of the newest answer to `claim`; what follows is reading
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._requester = Requester(address, keys=keys, max_bytes=max_bytes)
        self._beats = Requester(address, keys=keys, max_bytes=max_bytes)
        self._places: PlaceReader | None = None

    def _ask(self, message: wire.Message, *, wait_s: float = 0.0) -> wire.Packet:
        return self._requester.request(message, timeout_s=self._timeout_s + wait_s, wait_s=wait_s)

    def hello(self, fingerprint: str = "", run_id: str = "") -> wire.Welcome:
        hello = wire.Hello("learner", self.name, self._pid, self._host, run_id, fingerprint)
        welcome: wire.Welcome = self._ask(hello).message
        return welcome

    def register(
        self,
        *,
        step: int,
        ledger: str,
        takeover: bool = False,
        fingerprint: str = "",
        digests: Mapping[int, str] | None = None,
    ) -> wire.Registered:
        """Become the run's learner, from a checkpoint of `step` with its ledger. May wait for signs of an
        earlier one.
        """
        message = wire.Register(
            self.name,
            self._pid,
            self._host,
            step,
            ledger,
            takeover,
            fingerprint,
            dict(digests or {}),
            secrets.randbits(63),
        )
        registered: wire.Registered = self._ask(message, wait_s=15.0).message
        self.epoch, self._step = registered.epoch, step
        self._places = PlaceReader.of(registered)
        return registered

    def claim(self, *, step: int, version: int, wait_s: float) -> ClaimedBatch | wire.NotYet:
        """The batch of `step`; `NotYet` with a diagnosis where it is not complete within `wait_s`."""
        by_place = self._places is not None
        packet = self._ask(wire.Claim(self.epoch, step, version, wait_s, by_place), wait_s=wait_s)
        self.answered = time.monotonic()
        batch = packet.message
        if isinstance(batch, wire.NotYet):
            return batch
        self._batch = (batch.step, {head.group for head in batch.groups})
        if self._places is None or not batch.places:
            return decode_batch(batch, packet.payloads)
        try:
            batch, payloads = self._places.fill(batch)
        except (OSError, WireError):
            self._places = None  # the files are not what they seemed: the service looks itself, and sends frames
            return self.claim(step=step, version=version, wait_s=wait_s)
        return decode_batch(batch, payloads)

    def commit(self, *, step: int, version: int, digest: str) -> None:
        """The optimizer step is done; `digest` is that of the weights of `version`."""
        self._step = step
        groups = tuple(sorted(self._batch[1])) if self._batch[0] == step else None
        self._ask(wire.Commit(self.epoch, step, version, digest, groups))

    def quarantine(self, *, step: int, groups: Sequence[int], reason: str) -> None:
        """Groups of a claimed step that cannot be used; they are dead."""
        self._ask(wire.Quarantine(self.epoch, step, tuple(groups), reason))
        self._batch[1].difference_update(groups)

    def ledger(self, *, step: int) -> str:
        """What to store in the checkpoint of `step`."""
        reply: wire.LedgerReply = self._ask(wire.LedgerRequest(self.epoch, step)).message
        return reply.ledger

    def checkpointed(self, *, step: int) -> None:
        """A checkpoint that contains `step` is durable."""
        self._ask(wire.Checkpointed(self.epoch, step))

    def evaluations(self, *, seen: int) -> tuple[list[dict[str, Any]], str]:
        """Evaluations that ended after round `seen`, as lines of metrics; and which one runs or waits, in words."""
        reply: wire.EvaluationsReply = self._ask(wire.EvaluationsRequest(seen)).message
        return [msgspec.json.decode(line) for line in reply.ended], reply.running

    def goodbye(self, *, done: bool, reason: str = "") -> None:
        """The learner ends; `done` when the run is complete."""
        self._ask(wire.Goodbye(self.epoch, done, reason, self._step))

    def heartbeat(self, stats: Mapping[str, float], *, waiting_for: str = "") -> None:
        """This process is alive."""
        beat = wire.Heartbeat("learner", self.name, self._pid, self._host, waiting_for, dict(stats))
        self._beats.request(beat, timeout_s=self._timeout_s)

    def close(self) -> None:
        self._requester.close()
        self._beats.close()
        if self._places is not None:
            self._places.close()
