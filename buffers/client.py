"""The only door to the buffer: one client per role. Imports neither torch nor redis.

Called by producers, reward workers, the learner, the front door. Guarantees:
1. every call ends: with its answer, with the service's refusal as an error of the catalogue, or with `net.unreachable`
   after `timeout_s` (plus the time that the service was asked to wait);
2. a call may be sent twice under way (the service is idempotent), never answered twice;
3. arrays of a claimed batch are read-only views into the received frames, or into bytes read from the service's segment
   files where the learner sees them (measured: half the service's CPU for large payloads).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl import wire
from asyncrl.errors import Unavailable, WireError
from asyncrl.plugins import GenSample
from asyncrl.sockets import AsyncRequester, Keys, Requester
from asyncrl.versions import Runs
from asyncrl.wire import Buffer, FloatArray, IntArray
from buffers.places import PlaceReader

MAX_BYTES = 1 << 30


class SampleData(msgspec.Struct, frozen=True, gc=False):
    """One sample of a claimed group: `response` i4 `[T]`, `logprobs` f4 `[T]`, `mask` u1 `[T]` or None
    (all sampled).
    """

    index: int
    response: IntArray
    logprobs: FloatArray
    mask: Any  # NDArray[uint8] | None
    runs: Runs
    finish: str
    reward: float
    parts: dict[str, float]
    digests: dict[int, str]


class GroupData(msgspec.Struct, frozen=True, gc=False):
    """One claimed group: `prompt_ids` i4 `[P]`, the samples sorted by index."""

    group: int
    bound: int
    row: dict[str, Any]
    prompt_ids: IntArray
    samples: tuple[SampleData, ...]
    times: dict[str, float]


class ClaimedBatch(msgspec.Struct, frozen=True):
    """The batch of a step. `invalid` are groups that fail validation here (reason), left out of `groups`."""

    step: int
    version: int
    replayed: bool
    groups: tuple[GroupData, ...]
    ledger: dict[str, int]
    invalid: dict[int, str] = {}


class RewardTask(msgspec.Struct, frozen=True):
    """One sample to score."""

    item: wire.RewardItem
    prompt_ids: IntArray
    response_ids: IntArray
    row: dict[str, Any]


def _row(text: str) -> dict[str, Any]:
    """The row of a prompt; it came from a peer, so it may be anything."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("wire.decode", f"row: {error}") from None


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

    async def hello(self, fingerprint: str = "", role: str = "", run_id: str = "") -> wire.Welcome:
        """Introduce this process; must be first. What the name held before is lost."""
        hello = wire.Hello(role or self.role, self.name, self._pid, self._host, run_id, fingerprint)
        welcome: wire.Welcome = (await self._ask(hello)).message
        return welcome

    async def heartbeat(self, stats: Mapping[str, float], *, waiting_for: str = "") -> None:
        """This process is alive: its leases are renewed."""
        await self._ask(wire.Heartbeat(self.role, self.name, self._pid, self._host, waiting_for, dict(stats)))

    def close(self) -> None:
        """Close the socket."""
        self._requester.close()


class ProducerClient(_AsyncClient):
    """For producers: lease, submit, give back. One `lease` at a time."""

    role = "producer"

    async def lease(self, *, engine_version: int, max_groups: int, wait_s: float) -> wire.Leases:
        """Groups to generate, maybe none; waits in the service up to `wait_s`.

        Cancelled while it waits, the request is finished in the background and what it got is given back.
        """
        asked = asyncio.ensure_future(
            self._ask(wire.LeaseRequest(self.name, engine_version, max_groups, wait_s), wait_s=wait_s)
        )
        try:
            leases: wire.Leases = (await asyncio.shield(asked)).message
        except asyncio.CancelledError:
            self._orphan = asyncio.ensure_future(self._return_orphans(asked))
            raise
        return leases

    async def _return_orphans(self, asked: asyncio.Future[wire.Packet]) -> None:
        try:
            await self.give_back((await asked).message.leases, reason="stop")
        except Unavailable:
            return  # the service is gone: the leases expire there

    async def submit(
        self, lease: wire.Lease, *, prompt_ids: IntArray, samples: Sequence[GenSample], digests: Mapping[int, str],
        row: Mapping[str, Any], rewards: Mapping[int, float] | None = None,
        masks: Mapping[int, Any] | None = None,
    ) -> wire.SamplesReply:  # fmt: skip
        """Finished samples of a leased group. `digests`: version -> digest of the weights that the engine loaded.

        `masks` (sample index -> u1 `[T]`) where some tokens were not sampled by the policy.
        """
        arrays: dict[str, tuple[str, list[Any]]] = {
            "prompt": ("i4", _parts([prompt_ids], "i4")),
            "response": ("i4", _parts([sample.token_ids for sample in samples], "i4")),
            "logprobs": ("f4", _parts([sample.logprobs for sample in samples], "f4")),
        }
        if masks:
            ones = [masks.get(sample.index, np.ones(len(sample.token_ids), np.uint8)) for sample in samples]
            arrays["mask"] = ("u1", _parts(ones, "u1"))
        fields, payload = wire.pack_parts(arrays)
        heads = tuple(wire.SampleHead(item.index, len(item.token_ids), item.finish, item.runs) for item in samples)
        used = {version for sample in samples for version, _ in sample.runs}
        message = wire.Samples(
            self.name, lease.group, lease.token, heads, {v: digests[v] for v in sorted(used) if v in digests}, fields,
            msgspec.json.encode(row).decode(), fields[0].count, rewards=dict(rewards or {}),
        )  # fmt: skip
        reply: wire.SamplesReply = (await self._ask(message, (payload,))).message
        return reply

    async def give_back(self, leases: Sequence[wire.Lease], *, reason: str, dead: bool = False) -> None:
        """Return leases; reason "stop" is no fault of the prompt. With `dead` the prompt is not tried again."""
        if leases:
            groups = tuple((lease.group, lease.token) for lease in leases)
            await self._ask(wire.LeaseReturn(self.name, groups, reason, dead))


def _parts(parts: Sequence[Any], dtype: str) -> list[Any]:
    """The arrays as they are sent; where they have the wire's dtype already, without a copy."""
    return [np.asarray(part, dtype=wire.DTYPES[dtype]) for part in parts]


class RewardClient(_AsyncClient):
    """For reward workers: work, scores."""

    role = "reward"

    async def work(self, *, max_samples: int, wait_s: float) -> tuple[list[RewardTask], bool]:
        """Samples to score, and whether the run is complete."""
        packet = await self._ask(wire.RewardRequest(self.name, max_samples, wait_s), wait_s=wait_s)
        work: wire.RewardWork = packet.message
        tasks = []
        for item, payload in zip(work.items, packet.payloads, strict=True):
            arrays = wire.unpack_arrays(item.fields, payload)
            tasks.append(RewardTask(item, arrays["prompt"], arrays["response"], _row(item.row)))
        return tasks, work.done

    async def submit(
        self, scores: Sequence[wire.Score], failures: Sequence[wire.RewardFailure] = (), *, reward_version: str = ""
    ) -> wire.ScoresReply:
        """Rewards, and failures with their reason."""
        reply: wire.ScoresReply = (
            await self._ask(wire.Scores(self.name, tuple(scores), tuple(failures), reward_version))
        ).message
        return reply


class LearnerClient:
    """For the learner; blocking. `heartbeat` may be called from another thread: it has a socket of its own."""

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        self.name = name
        self.epoch = 0
        self._timeout_s = timeout_s
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._requester = Requester(address, keys=keys, max_bytes=max_bytes)
        self._beats = Requester(address, keys=keys, max_bytes=max_bytes)
        self._places: PlaceReader | None = None

    def _ask(self, message: wire.Message, *, wait_s: float = 0.0) -> wire.Packet:
        return self._requester.request(message, timeout_s=self._timeout_s + wait_s, wait_s=wait_s)

    def hello(self, fingerprint: str = "", run_id: str = "") -> wire.Welcome:
        """Introduce this process."""
        hello = wire.Hello("learner", self.name, self._pid, self._host, run_id, fingerprint)
        welcome: wire.Welcome = self._ask(hello).message
        return welcome

    def register(
        self, *, step: int, ledger: str, takeover: bool = False, fingerprint: str = "",
        digests: Mapping[int, str] | None = None,
    ) -> wire.Registered:  # fmt: skip
        """Become the run's learner, from a checkpoint of `step` with its ledger. May wait for signs of an
        earlier one.
        """
        message = wire.Register(
            self.name, self._pid, self._host, step, ledger, takeover, fingerprint, dict(digests or {})
        )
        registered: wire.Registered = self._ask(message, wait_s=15.0).message
        self.epoch = registered.epoch
        self._places = PlaceReader.of(registered)
        return registered

    def claim(self, *, step: int, version: int, wait_s: float) -> ClaimedBatch | wire.NotYet:
        """The batch of `step`; `NotYet` with a diagnosis where it is not complete within `wait_s`."""
        by_place = self._places is not None
        packet = self._ask(wire.Claim(self.epoch, step, version, wait_s, by_place), wait_s=wait_s)
        batch = packet.message
        if isinstance(batch, wire.NotYet):
            return batch
        if self._places is None or not batch.places:
            return _claimed(batch, packet.payloads)
        try:
            batch, payloads = self._places.fill(batch)
        except (OSError, WireError):
            self._places = None  # the files are not what they seemed: the service looks itself, and sends frames
            return self.claim(step=step, version=version, wait_s=wait_s)
        return _claimed(batch, payloads)

    def commit(self, *, step: int, version: int, digest: str) -> None:
        """The optimizer step is done; `digest` is that of the weights of `version`."""
        self._ask(wire.Commit(self.epoch, step, version, digest))

    def quarantine(self, *, step: int, groups: Sequence[int], reason: str) -> None:
        """Groups of a claimed step that cannot be used; they are dead."""
        self._ask(wire.Quarantine(self.epoch, step, tuple(groups), reason))

    def ledger(self, *, step: int) -> str:
        """What to store in the checkpoint of `step`."""
        reply: wire.LedgerReply = self._ask(wire.LedgerRequest(self.epoch, step)).message
        return reply.ledger

    def checkpointed(self, *, step: int) -> None:
        """A checkpoint that contains `step` is durable."""
        self._ask(wire.Checkpointed(self.epoch, step))

    def goodbye(self, *, done: bool, reason: str = "") -> None:
        """The learner ends; `done` when the run is complete."""
        self._ask(wire.Goodbye(self.epoch, done, reason))

    def heartbeat(self, stats: Mapping[str, float], *, waiting_for: str = "") -> None:
        """This process is alive."""
        beat = wire.Heartbeat("learner", self.name, self._pid, self._host, waiting_for, dict(stats))
        self._beats.request(beat, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Close the sockets."""
        self._requester.close()
        self._beats.close()
        if self._places is not None:
            self._places.close()


def _claimed(batch: wire.Batch, payloads: Sequence[Buffer]) -> ClaimedBatch:
    groups: list[GroupData] = []
    invalid: dict[int, str] = {}
    place = 0
    for head in batch.groups:
        mine = payloads[place : place + len(head.records)]
        place += len(head.records)
        try:
            groups.append(_group_data(head, mine))
        except WireError as error:
            invalid[head.group] = error.message
    return ClaimedBatch(batch.step, batch.version, batch.replayed, tuple(groups), batch.ledger, invalid)


def _group_data(head: wire.GroupHead, payloads: Sequence[Buffer]) -> GroupData:
    """Views into the payloads. Where two records hold the same sample the first one counts, as it did at the buffer."""
    samples: dict[int, SampleData] = {}
    prompt: Any = None
    row = head.row
    for record, payload in zip(head.records, payloads, strict=True):
        message = wire.decode_samples(record)
        row = row or message.row
        why = wire.validate_samples(message, payload, group_size=1 << 20)
        if why:
            raise WireError("wire.decode", why)
        arrays = wire.unpack_arrays(message.fields, payload)
        prompt = arrays["prompt"] if prompt is None else prompt
        start = 0
        for item in message.samples:
            place = slice(start, start + item.length)
            start += item.length
            if item.index in samples or item.index not in head.rewards:
                continue
            samples[item.index] = SampleData(
                item.index, arrays["response"][place], arrays["logprobs"][place],
                arrays["mask"][place] if "mask" in arrays else None, item.runs, item.finish,
                head.rewards[item.index], head.parts.get(item.index, {}), message.digests,
            )  # fmt: skip
    if prompt is None or set(samples) != set(head.rewards):
        raise WireError("wire.decode", "samples are missing")
    ordered = tuple(samples[index] for index in sorted(samples))
    return GroupData(head.group, head.bound, _row(row), prompt, ordered, head.times)


class ObserverClient:
    """For tools: the status, the stop. Blocking."""

    def __init__(self, address: str, *, keys: Keys | None = None, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._requester = Requester(address, keys=keys)

    def status(self) -> dict[str, Any]:
        """The state of the service."""
        reply: wire.StatusReply = self._requester.request(wire.StatusRequest(), timeout_s=self._timeout_s).message
        status: dict[str, Any] = msgspec.json.decode(reply.json)
        return status

    def stop(self, reason: str) -> None:
        """Ask the service to end after it has written everything."""
        self._requester.request(wire.Stop(reason), timeout_s=self._timeout_s)

    def close(self) -> None:
        """Close the socket."""
        self._requester.close()
