"""The workers around the buffer, as the simulator plays them: producers and reward workers.

Each life is a generator for `sim_net.Process`; all messages are the real ones of `asyncrl.wire`.
"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from sim_net import Ask, Process, Task

from asyncrl import wire
from asyncrl.errors import Unavailable, WireError
from asyncrl.versions import Runs, joined_runs
from buffers.client.partial_samples import PieceData, pack_pieces, unpack_begun

if TYPE_CHECKING:
    from sim_world import World

HEARTBEAT_S = 1.6
LOST = ("token", "gone", "unknown", "poison", "lease", "cancel")
LOGPROB = struct.pack("<f", -0.5)
NAN = struct.pack("<f", float("nan"))
PAD = [bytes(-size % 64) for size in range(65)]


#: What the second judge gives, of what the first one does.
DEEP = 0.5
ROWS = 17  # of the data, where the buffer chooses among them


def reward_of(tokens: tuple[int, ...]) -> float:
    """The reward of a response by the first judge: told by its tokens alone."""
    return (tokens[1] % 997) / 997.0


def patiently(make: Any) -> Any:
    """The answer, asked for again and again."""
    while True:
        try:
            return (yield make())
        except Unavailable:
            yield 0.3


def _layout(total: int) -> tuple[wire.Field, ...]:
    at = 64 + (4 * total + 63) // 64 * 64
    return (
        wire.Field("prompt", "i4", 0, 1),
        wire.Field("response", "i4", 64, total),
        wire.Field("logprobs", "f4", at, total),
    )


_LAYOUTS = {total: _layout(total) for total in range(1, 40)}


def payload_of(group: int, responses: list[tuple[int, ...]], *, broken: bool) -> tuple[tuple[wire.Field, ...], bytes]:
    """Prompt, responses and log-probs as `pack_arrays` lays them out."""
    tokens = [token for response in responses for token in response]
    total = len(tokens)
    body = struct.pack(f"<{total}i", *tokens)
    chances = LOGPROB * (total - 1) + (NAN if broken else LOGPROB)
    padding = PAD[len(body) % 64] if len(body) % 64 else b""
    return _LAYOUTS[total], struct.pack("<i", group) + bytes(60) + body + padding + chances + padding


def responses_of(head: wire.Samples, payload: Any) -> dict[int, tuple[int, ...]]:
    """Sample index -> response, read from the bytes."""
    data, at, found = bytes(payload), head.fields[1].offset, {}
    for item in head.samples:
        found[item.index] = struct.unpack_from(f"<{item.length}i", data, at)
        at += 4 * item.length
    return found


# ---------------------------------------------------------------- producers


class Begun(NamedTuple):
    """The first tokens of a sample."""

    tokens: tuple[int, ...]
    runs: Runs
    digests: dict[int, str]


class Producer:
    """One producer process."""

    def __init__(self, world: World, process: Process, *, slots: int, eager: float) -> None:
        self.world = world
        self.process = process
        self.rng = random.Random(world.rng.getrandbits(32))
        self.slots = slots
        self.eager = eager  # chance to take new weights when there are some
        self.version, self.digest = -1, ""
        self.work: dict[tuple[int, int], wire.Lease] = {}
        self.stop = False
        self.by_place = False
        self.cancelled: set[tuple[int, int]] = set()
        self.begun: dict[tuple[int, int, int], Begun] = {}  # group, token, index -> what is there of the sample

    def life(self) -> Task:
        """Hello, then lease and generate until the run is done."""
        name, pid = self.process.name, self.process.pid
        welcome = yield from patiently(lambda: Ask(wire.Hello("producer", name, pid, "h")))
        rows = ROWS if self.world.chooses else 0
        self.by_place = bool(welcome.message.nonce) and self.rng.random() < 0.7
        yield self.beat()
        while self.world.weights.target is None:
            yield 0.2
        while True:
            self.sync()
            if self.stop:
                yield from self.leave()
                return
            room = self.slots - len(self.work)
            if room <= 0:
                yield 0.15
                continue
            packet = yield from patiently(
                lambda room=room: Ask(wire.LeaseRequest(name, self.version, room, 2.0, rows=rows), wait_s=2.0)
            )
            leases: wire.Leases = packet.message
            for lease in leases.leases:
                if (lease.group, lease.token) not in self.work:
                    self.work[lease.group, lease.token] = lease
                    self.take_over(lease, packet)
                    yield self.group(lease)
            if leases.done and not self.work:
                self.process.exit("")
                return
            if not leases.leases:
                yield 0.1

    def sync(self) -> None:
        """Take the newest weights, mostly."""
        target = self.world.weights.target
        if target is not None and (self.version < 0 or self.rng.random() < self.eager):
            self.version, self.digest = target[1], target[2]

    def beat(self) -> Task:
        """Heartbeats."""
        while True:
            yield HEARTBEAT_S
            packet = yield from patiently(
                lambda: Ask(
                    wire.Heartbeat("producer", self.process.name, self.process.pid, "h", "", {}, tuple(self.work))
                )
            )
            self.cancelled.update(getattr(packet.message, "cancelled", ()))

    def leave(self) -> Task:
        """SIGTERM: give back what is held."""
        groups = tuple(self.work)
        if groups:
            yield from patiently(lambda: Ask(wire.LeaseReturn(self.process.name, groups, "stopping")))
        self.process.exit("stopping")

    def group(self, lease: wire.Lease) -> Task:
        """Generate the missing samples, in one or several messages."""
        missing = list(lease.missing)
        while missing:
            count = self.rng.randint(1, len(missing))
            part, missing = missing[:count], missing[count:]
            begun, digest = self.version, self.digest
            if self.world.checkpoints:
                yield from self.checkpoint(lease, part)
                digest = self.digest if begun == self.version else digest
            yield 0.02 + self.rng.expovariate(6.0)
            if (lease.group, lease.token) in self.cancelled:
                break
            message, payload = self.make(lease, part, begun, digest)
            packet = yield from self.send(message, payload)
            reply: wire.SamplesReply = packet.message
            if any(reason.startswith(LOST) for reason in reply.refused.values()):
                break
        self.work.pop((lease.group, lease.token), None)

    def take_over(self, lease: wire.Lease, packet: Any) -> None:
        """What other producers began of this lease; now and then it is left alone."""
        for one in unpack_begun(packet.message, packet.payloads).get((lease.group, lease.token), ()):
            tokens = tuple(one.token_ids.tolist())
            if (lease.group, one.index, tokens) not in self.world.sent_pieces:
                self.world.fail("content", f"nobody began sample {lease.group}:{one.index} with {tokens}")
            if one.digests.get(self.version, self.digest) == self.digest and self.rng.random() < 0.8:
                self.begun[lease.group, lease.token, one.index] = Begun(tokens, one.runs, dict(one.digests))
                self.world.hits["continued"] += 1

    def checkpoint(self, lease: wire.Lease, part: list[int]) -> Any:
        """Send one token more of each of these samples, ahead of the whole."""
        pieces = []
        for index in part:
            key = (lease.group, lease.token, index)
            there = self.begun.get(key, Begun((), (), {}))
            if len(there.tokens) < 2 and self.rng.random() < 0.7:
                token = self.rng.getrandbits(30) if there.tokens else lease.group * 64 + index
                run = ((self.version, 1),)
                self.begun[key] = Begun(
                    (*there.tokens, token), joined_runs(there.runs, run), there.digests | {self.version: self.digest}
                )
                self.world.sent_pieces.add((lease.group, index, self.begun[key].tokens))
                start = len(there.tokens)
                pieces.append(PieceData(index, start, np.array([token], np.int32), np.array([-0.5], np.float32), run))
        if pieces:
            message, payload = pack_pieces(self.process.name, lease, pieces, {self.version: self.digest})
            yield from patiently(lambda: Ask(message, (payload,)))

    def send(self, message: wire.Samples, payload: bytes) -> Any:
        """By place, where the service is on the same host; else, and where it does not find it, with the payload."""
        if self.by_place:
            header = wire.encode_header(message)
            checksum = xxhash.xxh3_64_intdigest(header + payload)
            place = self.world.files.write_guest(self.process.pid, header, payload, checksum)

            def by_place() -> Ask:
                ask = Ask(wire.SamplesAt(self.process.name, place))
                ask.meaning = message
                return ask

            try:
                return (yield from patiently(by_place))
            except WireError:
                self.world.hits["sent_after_all"] += 1
        return (yield from patiently(lambda: Ask(message, (payload,))))

    def make(self, lease: wire.Lease, part: list[int], begun: int, digest: str) -> tuple[wire.Samples, bytes]:
        """The message: tokens of the version at the start, and of the newer one where it came meanwhile."""
        rng, world = self.rng, self.world
        ended, last = self.version, self.digest
        if world.odd("stale_tokens") and begun > 0:  # a worker that lies about its version: admission must not trust it
            begun, digest = begun - 1, world.weights.digests.get(begun - 1, "")
            world.hits["stale_tokens"] += 1
        heads, responses, digests = [], [], {begun: digest, ended: last}
        for index in part:
            length = rng.randint(2, 3)
            response = (lease.group * 64 + index, rng.getrandbits(30), 7)[:length]
            runs: Any = (
                ((begun, length),) if begun == ended or rng.random() < 0.5 else ((begun, 1), (ended, length - 1))
            )
            there = self.begun.pop((lease.group, lease.token, index), None)
            if there is not None:
                response, length = (*there.tokens, 7), len(there.tokens) + 1
                runs, digests = joined_runs(there.runs, ((ended, 1),)), there.digests | digests
            heads.append(wire.SampleHead(index, length, "stop", runs))
            responses.append(response)
        broken = world.odd("poison")
        fields, payload = payload_of(lease.group, responses, broken=broken)
        world.hits["poison"] += broken
        rewards: dict[int, float] = {}
        if world.own_rewards:
            rewards = {head.index: reward_of(text) for head, text in zip(heads, responses, strict=True)}
        message = wire.Samples(
            self.process.name,
            lease.group,
            lease.token,
            tuple(heads),
            digests,
            fields,
            "{}",
            1,
            rewards=rewards,
        )
        return message, payload


# ---------------------------------------------------------------- reward workers


class Rewarder:
    """One reward worker."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.rng = random.Random(world.rng.getrandbits(32))
        self.holding: tuple[tuple[int, int], ...] = ()

    def life(self) -> Task:
        """Ask for samples, score them, send the scores; sometimes a reward function raises."""
        name, pid = self.process.name, self.process.pid
        judge, factor = ("deep", DEEP) if name in ("r2", "r3") else ("", 1.0)
        yield from patiently(lambda: Ask(wire.Hello("reward", name, pid, "h")))
        yield self.beat()
        while True:
            packet = yield from patiently(lambda: Ask(wire.RewardRequest(name, 6, 2.5, judge), wait_s=2.5))
            work: wire.RewardWork = packet.message
            if work.done:
                self.process.exit("")
                return
            if not work.items:
                continue
            self.holding = tuple((item.group, item.token) for item in work.items)
            yield self.rng.random() * 0.1 if self.rng.random() < 0.9 else 2.0
            scores, failures = [], []
            for item, payload in zip(work.items, packet.payloads, strict=True):
                field = item.fields[1]
                response = struct.unpack_from(f"<{field.count}i", bytes(payload), field.offset)
                if response[0] != item.group * 64 + item.index:
                    self.world.fail("content", f"sample {item.group}:{item.index} to score is {response}")
                if self.world.odd("reward_raised"):
                    self.world.hits["reward_raised"] += 1
                    failures.append(wire.RewardFailure(item.group, item.index, item.token, "raised", "simulated"))
                else:
                    scores.append(wire.Score(item.group, item.index, item.token, factor * reward_of(response)))
            message = wire.Scores(name, tuple(scores), tuple(failures), judge=judge)
            yield from patiently(lambda m=message: Ask(m))
            self.holding = ()

    def beat(self) -> Task:
        """Heartbeats."""
        while True:
            yield HEARTBEAT_S
            yield from patiently(
                lambda: Ask(wire.Heartbeat("reward", self.process.name, self.process.pid, "h", "", {}, self.holding))
            )
