"""What the forked processes of `test_transport_faults` run: a member that reads in step, a publisher."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from transport_rigs import RIGS, digest_of, digests_from, make_inbox

import weightsync.transports.collective
import weightsync.transports.disk
import weightsync.transports.stream
from asyncrl.config import WeightSyncConfig
from asyncrl.wire import Instruction
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.transports.base import TransportError, blob_sizes
from weightsync.transports.catalogue import make_inboxes

SMALL = plan_buckets([TensorSpec(f"t{i}", "F32", (1000 + i,)) for i in range(3)], bucket_bytes=4000)
assert all((weightsync.transports.collective, weightsync.transports.disk, weightsync.transports.stream))


class Rigged:
    """What `digest_of` needs of a rig, at a reader."""

    sizes: tuple[int, ...] = ()

    def __init__(self, instruction: Any) -> None:
        self.hops = instruction.hops
        self.plan = Plan(instruction.tensors, instruction.manifest.bucket_bytes, instruction.manifest.plan)


def anonymous_kb() -> int:
    """Memory of this process alone; mapped files (slots) are not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    return 0


def read_all(pipe: Connection, order: bytes, gates: tuple[int, ...]) -> None:
    """A reader: `("up",)`, then `("blob", k, digest)` for every blob, with a wait for a word at a gate, then
    `("end", error, growth of its memory in KiB)`."""
    instruction = msgspec.msgpack.decode(order, type=Instruction)
    inbox = make_inbox(instruction)
    rig, error, growth, base = Rigged(instruction), "", 0, anonymous_kb()
    pipe.send(("up",))
    try:
        inbox.open()
        for number in range(len(blob_sizes(instruction.manifest, instruction.hops))):
            view = inbox.read(number)
            pipe.send(("blob", number, digest_of(rig, number, view)))
            growth = max(growth, anonymous_kb() - base)
            if number in gates:
                pipe.poll(20)
                pipe.recv()
    except TransportError as caught:
        error = caught.message
    inbox.close()
    pipe.send(("end", error, growth))


def hold(pipe: Connection, name: str, folder: str, deadline_s: float = 2.0) -> None:
    """A publisher: its instruction, then it leads a round for two members at every word."""
    rig = RIGS[name](Path(folder), plan=SMALL, deadline_s=deadline_s)
    pipe.send(msgspec.msgpack.encode(rig.instruction()))
    generation = 0
    while pipe.poll(30) and pipe.recv():
        generation += 1
        try:
            rig.send(2, generation)
        except TransportError:
            continue


def stay(pipe: Connection, gates: tuple[int, ...] = ()) -> None:
    """A member for many rounds: for each instruction `("at", blob)` at the gates, then the digests of what it read, or
    its error."""
    inboxes = make_inboxes(WeightSyncConfig())
    pipe.send(("up",))
    while pipe.poll(30) and (order := pipe.recv()):
        instruction = msgspec.msgpack.decode(order, type=Instruction)

        def at(number: int) -> None:
            if number in gates:
                pipe.send(("at", number))
                pipe.poll(20)
                pipe.recv()

        rig = Rigged(instruction)
        rig.sizes = blob_sizes(instruction.manifest, instruction.hops)
        try:
            pipe.send(digests_from(rig, inboxes[instruction.transport](instruction), at))
        except TransportError as error:
            pipe.send(error.message)
