"""The learner's end of transport `direct`: versions go from its device to those of the engines, on the training thread.

The weights are not staged, so they must stay as they are until they are sent: the training thread announces a version
with digests of the weights on their device (`digest`), waits for the group that the service forms (`wait_group`) and
sends (`send`). The watching thread passes the service's word (`hand_over`, `note_nobody`). Guarantees:
1. the training thread waits at most `GROUP_S` for a group, and sends for at most the limit of the round;
2. a group for a version that is no longer open is declined, so its members do not wait for it;
3. a failed transfer is reported, and the tensors that are left are passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.wire import RoundReply
from weightsync.plan.buckets import Plan
from weightsync.plan.sum_digest import hexdigest, padded
from weightsync.publisher.senders import Carrier, Meeting, Peers, Tensors
from weightsync.transports.base import TransportError

if TYPE_CHECKING:
    from torch import Tensor

    from weightsync.transports.collective import CollectiveOutbox

GROUP_S = 15.0  # longer than the service waits for members that are busy (`coordinator.queries.FORM_S`)


class Direct:
    """One version at a time. `outbox` leads the groups."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._digest = ""  # of the version that is open
        self._reply: RoundReply | None = None  # with its group
        self._nobody = False
        self._result = ""
        self._carrier = Carrier()
        self.settle = self._carrier.settle

    # ------------------------------------------------------------ training thread

    def open(self, digest: str) -> None:
        """A version is about to be announced."""
        with self._changed:
            self._digest, self._reply, self._nobody, self._result = digest, None, False, ""

    def wait_group(self) -> bool:
        """Whether there is a group to send to."""
        with self._changed:
            self._changed.wait_for(lambda: self._reply is not None or self._nobody, GROUP_S)
            if self._reply is None:
                self._digest = ""
            return self._reply is not None

    def send(self, tensors: Tensors, plan: Plan, outbox: CollectiveOutbox, *, limit_s: float, peers: Peers) -> str:
        """Send the tensors, which are those of this rank's buckets; "sent", or why it failed."""
        result = "failed: the learner could not read its weights"
        try:
            error = self._send(tensors, plan, outbox, limit_s, peers)
            result = f"failed: {error}" if error else "sent"
        finally:
            with self._changed:
                self._digest, self._reply, self._result = "", None, result
                self._changed.notify_all()
        return result

    def _send(self, tensors: Tensors, plan: Plan, outbox: CollectiveOutbox, limit_s: float, peers: Peers) -> str:
        reply = self._reply
        assert reply is not None
        try:
            sending = outbox.meet(reply, deadline_s=limit_s, senders=peers.senders)
        except TransportError as error:
            peers.tell(b"")
            return error.message
        meeting = Meeting(outbox.open(), reply.generation, limit_s, sending.choice)
        peers.tell(msgspec.msgpack.encode(meeting))
        return self._carrier.run(sending, sending.build, tensors, plan, peers.agree)

    # ------------------------------------------------------------ watching thread

    def note_nobody(self, digest: str) -> None:
        """The service forms no group for this version."""
        with self._changed:
            self._nobody |= digest == self._digest
            self._changed.notify_all()

    def hand_over(self, reply: RoundReply, outbox: CollectiveOutbox, *, limit_s: float) -> str:
        """Let the training thread send to this group; the result."""
        with self._changed:
            if reply.digest == self._digest and self._reply is None:
                self._reply = reply
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._result, limit_s + GROUP_S)
                return self._result or "failed: the learner did not send it in time"
        try:
            outbox.decline(reply)
        except TransportError as error:
            return f"failed: {error.message}"
        return "failed: the learner's weights have moved on"


def digest_tensors(tensors: Tensors, plan: Plan) -> tuple[str, ...]:
    """The digests of the buckets, computed where the tensors are; the sums leave a device through pinned memory.

    Raises:
        ValueError: they are not the tensors of the plan, in its order.
    """
    from weightsync.transports.device_digest import DeviceSums

    buckets: list[Any] = []
    expected = iter(plan.tensors)
    for name, tensor in tensors:
        place = next(expected, None)
        if place is None or (place.name, place.nbytes) != (name, tensor.nbytes):
            raise ValueError(f"tensor {name} of {tensor.nbytes} bytes where the plan has {place}")
        if place.bucket == len(buckets):
            buckets.append(DeviceSums(tensor.device))
        buckets[-1].update(tensor)
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"tensors end before {missing.name}")
    return tuple(hexdigest(sums) for sums in _to_host([one.sums for one in buckets]))


class Summed(msgspec.Struct, frozen=True):
    """The sums of the bytes that one rank holds, int64 `[2]` per bucket."""

    nbytes: int
    sums: list[tuple[int, int]]


def sum_rows(chunks: Iterable[tuple[tuple[str, int], Tensor]], plan: Plan) -> Summed:
    """The sums of chunks of the plan's tensors: name, first byte in it, and the chunk on its device."""
    from weightsync.transports.device_digest import DeviceSums

    starts, ends = dict[str, tuple[int, int]](), [0] * len(plan.bucket_bytes)
    for one in plan.tensors:
        starts[one.name] = one.bucket, ends[one.bucket]
        ends[one.bucket] += padded(one.nbytes)
    found: dict[int, DeviceSums] = {}
    nbytes = 0
    for (name, at), chunk in chunks:
        bucket, start = starts[name]
        if bucket not in found:
            found[bucket] = DeviceSums(chunk.device)
        found[bucket].add(chunk, start + at)
        nbytes += chunk.nbytes
    sums = dict(zip(found, _to_host([one.sums for one in found.values()]), strict=True)) if found else {}
    return Summed(nbytes, [sums.get(bucket, (0, 0)) for bucket in range(len(plan.bucket_bytes))])


def join_sums(plan: Plan, parts: Sequence[Summed]) -> tuple[str, ...]:
    """The digests of the buckets from the sums of all ranks.

    Raises:
        ValueError: bytes are missing.
    """
    wanted, summed = sum(tensor.nbytes for tensor in plan.tensors), sum(part.nbytes for part in parts)
    if wanted != summed:
        raise ValueError(f"{summed} bytes were digested, {wanted} planned")
    buckets = zip(*(part.sums for part in parts), strict=True)
    return tuple(hexdigest((sum(one for one, _ in all_), sum(two for _, two in all_))) for all_ in buckets)


def _to_host(sums: list[Tensor]) -> list[tuple[int, int]]:
    import torch

    from asyncrl.runtime.device import Device

    where = sums[0].device
    device = Device(where.type, where.index or 0)
    together = torch.stack(sums)
    room = torch.empty(together.shape, dtype=torch.int64, pin_memory=device.pin_memory_ok)
    room.copy_(together, non_blocking=True)
    device.wait_for(device.mark())  # bounded: the watchdog ends a rank whose device hangs
    return [(first, second) for first, second in room.tolist()]
