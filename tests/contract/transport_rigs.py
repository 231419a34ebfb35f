"""What the tests of transports share: a publisher with versions, and both ends of a round for every transport.

A rig offers one version at a time, as whole buckets (`hops=()`) or as the hops that lead to it; the bytes of a hop are
random here, since a transport knows no encoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.net.keys import Keys
from asyncrl.wire import Hop, Instruction, Manifest, RoundReply
from weightsync.plan.buckets import Plan, TensorSpec, group_by_bucket, plan_buckets
from weightsync.plan.digest import bucket_digest, version_digest
from weightsync.staging import Slot, Staging
from weightsync.transports.base import Inbox, Outbox, blob_sizes

#: Five buckets with padding between a U8 and an F32 tensor, an empty tensor and one that is larger than a bucket.
SPECS = [
    *(TensorSpec(f"layer.{i}.weight", "F32", (500 + i, 2)) for i in range(7)),
    TensorSpec("mask", "U8", (1001,)),
    TensorSpec("scale", "F32", ()),
    TensorSpec("none", "F32", (0, 4)),
    TensorSpec("embed", "BF16", (64, 100)),
]
PLAN = plan_buckets(SPECS, bucket_bytes=10_000)
CHUNK = 3000  # of `stream`: no bucket is a whole number of them
DEADLINE_S = 4.0


class Held:
    """A staged version with two hops, as an outbox is offered it."""

    def __init__(
        self, staging: Staging, slot: Slot, plan: Plan, manifest: Manifest, seed: int, *, count: int = 2
    ) -> None:
        random = np.random.default_rng([seed, 1])
        buckets = len(plan.bucket_bytes)
        self.manifest, self.tensors = manifest, plan.tensors
        sizes = [tuple(int(n) for n in random.integers(1, 9000, buckets)) for _ in range(count)]
        if sizes:
            sizes[0] = (sizes[0][0], 0, *sizes[0][2:])[:buckets]  # nothing changed in that bucket
        self.hops = tuple(
            Hop(10 + seed - count + number, f"{seed - count + number:032x}", size) for number, size in enumerate(sizes)
        )
        self.steps = [bytearray(random.bytes(n)) for size in sizes for n in size]
        self.opened = self.closed = 0
        self._staging, self._slot, self._order = staging, slot, slot.order
        self.ended = False

    def is_gone(self) -> bool:
        return self.ended

    @contextmanager
    def blobs(self, hops: Sequence[Hop]) -> Iterator[list[memoryview] | None]:
        self.opened += 1
        try:
            if self.ended:
                yield None
            elif hops:
                known = tuple(hops) == self.hops[len(self.hops) - len(hops) :]
                first = (len(self.hops) - len(hops)) * len(self.manifest.bucket_bytes)
                yield [memoryview(step) for step in self.steps[first:]] if known else None
            else:
                with self._staging.hold(self._slot, self._order) as intact:
                    yield self._slot.buckets(self.manifest.bucket_bytes) if intact else None
        finally:
            self.closed += 1


class Rig:
    """A publisher with one version. `hops` says whether members take hops or the whole."""

    name = ""
    pulls = True  # members read by themselves

    def __init__(self, folder: Path, *, hops: bool = False, plan: Plan = PLAN, deadline_s: float = DEADLINE_S) -> None:
        self.folder, self.plan, self.deadline_s = folder, plan, deadline_s
        self.with_hops = hops
        self.keys: Keys | None = None
        self.staging = Staging(folder, folders=[folder / "slots"])
        self.outbox = self.make_outbox()
        self.address = ""
        self.version = 0
        self.publish()

    def make_outbox(self) -> Outbox | None:
        raise NotImplementedError

    def publish(self, *, fails: tuple[type[BaseException], ...] = ()) -> None:
        """Stage the next version and offer it."""
        self.version += 1
        random = np.random.default_rng(self.version)
        chunks = [(tensor.name, random.integers(0, 256, tensor.nbytes, dtype=np.uint8)) for tensor in self.plan.tensors]
        self.slot, digests = self.staging.fill(self.plan, chunks)
        manifest = Manifest(self.version, self.plan.digest, self.plan.bucket_bytes, digests, version_digest(digests))
        self.held = Held(self.staging, self.slot, self.plan, manifest, self.version)
        if self.outbox is not None:
            self.address = self.outbox.offer(self.held)
        else:
            self.address = str(self.slot.path)

    @property
    def manifest(self) -> Manifest:
        return self.held.manifest

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.held.hops if self.with_hops else ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return blob_sizes(self.manifest, self.hops)

    def instruction(self, rank: int = 1, size: int = 2, generation: int = 1) -> Instruction:
        return Instruction(
            "receive",
            1,
            self.manifest,
            self.plan.tensors,
            self.name,
            self.address,
            rank,
            size,
            generation,
            self.deadline_s,
            hops=self.hops,
        )

    def inbox(self, rank: int = 1, size: int = 2, generation: int = 1) -> Inbox:
        return make_inbox(self.instruction(rank, size, generation), self.keys)

    def send(self, ranks: int, generation: int) -> None:
        """Lead the round, where the transport needs it."""
        assert self.outbox is None or self.pulls
        if self.outbox is not None:
            with self.held.blobs(self.hops) as blobs:
                self.outbox.send(reply_of(ranks, generation, self.hops), blobs or [], deadline_s=self.deadline_s)

    def expected(self) -> list[str]:
        """A digest per blob."""
        with self.held.blobs(self.hops) as blobs:
            assert blobs is not None
            return [digest_of(self, number, blob) for number, blob in enumerate(blobs)]

    def break_blob(self, number: int) -> None:
        """Flip a bit of it where members read it."""
        target = memoryview(self.held.steps[number]) if self.hops else self.slot.buckets(self.plan.bucket_bytes)[number]
        target[target.nbytes // 2] ^= 0x10

    def vanish(self) -> None:
        """The publisher and what it held are not there any more."""
        self.close()

    def close(self) -> None:
        if self.outbox is not None:
            self.outbox.close()
        self.staging.close()


class LocalRig(Rig):
    name = "local"

    def make_outbox(self) -> None:
        return None


class StreamRig(Rig):
    name = "stream"

    def make_outbox(self) -> Outbox:
        from weightsync.transports.stream import StreamOutbox

        return StreamOutbox(keys=self.keys)


class DiskRig(Rig):
    name = "disk"
    root = ""

    def make_outbox(self) -> Outbox:
        from weightsync.transports.disk import DiskOutbox

        return DiskOutbox(self.root or str(self.folder / "weights"))

    def break_blob(self, number: int) -> None:
        names = sorted(path for path in Path(self.address).iterdir() if path.suffix in (".bin", ".safetensors"))
        hop, bucket = divmod(number, len(self.plan.bucket_bytes))
        first = sum(self.hops[hop].nbytes[:bucket]) if self.hops else 0
        path = [one for one in names if one.name.startswith("hop-" if self.hops else "model-")][
            hop if self.hops else number
        ]
        data = bytearray(path.read_bytes())
        start = first if self.hops else len(data) - self.sizes[number] // 2
        data[start + (self.sizes[number] // 2 if self.hops else 0)] ^= 0x10
        path.write_bytes(data)

    def vanish(self) -> None:
        import shutil

        shutil.rmtree(Path(self.address).parent)
        super().vanish()


class CollectiveRig(Rig):
    name = "collective"
    pulls = False
    backend = "gloo"

    def make_outbox(self) -> Outbox:
        from weightsync.transports.collective import CollectiveOutbox

        return CollectiveOutbox("127.0.0.1", timeout_s=self.deadline_s, backend=self.backend)

    def send(self, ranks: int, generation: int) -> None:
        assert self.outbox is not None
        with self.held.blobs(self.hops) as blobs:
            assert blobs is not None
            self.outbox.send(reply_of(ranks, generation, self.hops), blobs, deadline_s=self.deadline_s)


class DirectRig(CollectiveRig):
    """Tensors are sent as the learner sends them, and read as an engine reads them."""

    name = "direct"

    def send(self, ranks: int, generation: int) -> None:
        from weightsync.transports.packing import Packing

        outbox: Any = self.outbox
        buckets = self.slot.buckets(self.plan.bucket_bytes)
        with outbox.form(reply_of(ranks, generation), deadline_s=self.deadline_s) as sending:
            packing = Packing(self.plan, begin=sending.begin, wait=sending.settle)
            for place in self.plan.tensors:
                packing.add(place.name, as_tensor(buckets[place.bucket], place))
                if place.offset % 3 == 0:
                    packing.settle()
            packing.end()


class DirectReader:
    """An engine's end of `direct`, as an inbox."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self.close = inbox.close

    def open(self) -> None:
        self._inbox.open()
        self._tensors = self._inbox.tensors()

    def read(self, number: int, into: memoryview | None = None) -> memoryview:
        return memoryview(next(self._tensors).numpy().tobytes())


def as_tensor(bucket: memoryview, place: Any) -> Any:
    import torch

    if not place.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bucket, dtype=torch.uint8, count=place.nbytes, offset=place.offset)


RIGS: dict[str, type[Rig]] = {one.name: one for one in (LocalRig, StreamRig, DiskRig, CollectiveRig, DirectRig)}
#: Every transport with every encoding that it carries; `local` and `direct` carry whole versions alone.
KINDS = [(name, hops) for name in RIGS for hops in (False, True) if not (hops and name in ("local", "direct"))]
KIND_NAMES = [f"{name}-{'hops' if hops else 'full'}" for name, hops in KINDS]


def make_inbox(instruction: Instruction, keys: Keys | None = None) -> Inbox:
    from asyncrl.config import WeightSyncConfig
    from weightsync.transports.catalogue import make_inboxes

    chunk = CHUNK if sum(instruction.manifest.bucket_bytes) < 1 << 20 else 1 << 20
    config = WeightSyncConfig(stream_chunk_bytes=chunk)
    inbox = make_inboxes(config, keys=keys)[instruction.transport](instruction)
    return DirectReader(inbox) if instruction.transport == "direct" else inbox


def reply_of(ranks: int, generation: int, hops: Sequence[Hop] = ()) -> RoundReply:
    members = {f"m{rank}": rank for rank in range(1, ranks + 1)}
    return RoundReply(1, "transferring", generation, {}, members, hops=tuple(hops))


def digest_of(rig: Any, number: int, blob: memoryview) -> str:
    """Of a bucket without its padding, of an encoded bucket whole."""
    if rig.hops:
        from blake3 import blake3

        return blake3(blob).hexdigest()
    return bucket_digest(group_by_bucket(rig.plan.tensors, len(rig.plan.bucket_bytes))[number], blob)


def digests_from(rig: Any, inbox: Inbox, each: Callable[[int], None] = lambda number: None) -> list[str]:
    """Read every blob as a receiver does: one ahead of the one that is worked on."""
    found: list[str] = []
    before: tuple[int, memoryview] | None = None
    try:
        inbox.open()
        for number in range(len(rig.sizes)):
            view = inbox.read(number)
            if before is not None:
                found.append(digest_of(rig, *before))
            each(number)
            before = (number, view)
        if before is not None:
            found.append(digest_of(rig, *before))
    finally:
        inbox.close()
    return found


def run_round(rig: Any, members: int, generation: int) -> list[list[str]]:
    with ThreadPoolExecutor(members + 1) as pool:
        inboxes = [rig.inbox(rank, members + 1, generation) for rank in range(1, members + 1)]
        reading = [pool.submit(digests_from, rig, inbox) for inbox in inboxes]
        pool.submit(rig.send, members, generation).result(rig.deadline_s * 2)
        return [future.result(rig.deadline_s * 2) for future in reading]


def wait_for(what: str, ready: Callable[[], Any], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < until, f"waited {within_s:g} s for {what}"
        time.sleep(0.01)
