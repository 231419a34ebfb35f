"""Several ranks of the learner send a version by transport `direct`: bucket b by sender b modulo their number.

Every sender has a lane, which is a process group with all engine processes (`weightsync.transports.kept_groups`).
Rank 0 meets the engines and passes the group on (`Meeting`); the others join it. Guarantees:
1. a lane is kept only if every sender sent all of its buckets: one that fails ends the group in all of them;
2. a sender waits at most for the limit of the transfer, and goes through its tensors in any case: the other ranks take
   part in their gathering.

Example: senders 0 and 1, buckets 0 to 4: sender 0 sends 0, 2, 4 while sender 1 sends 1 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from weightsync.plan.buckets import Plan
from weightsync.transports.base import TransportError
from weightsync.transports.kept_groups import Choice, Group, Groups

if TYPE_CHECKING:
    from torch import Tensor

    from weightsync.transports.collective import Sending
    from weightsync.transports.packing import Packing


Tensors = Iterable[tuple[str, "Tensor"]]


class Meeting(msgspec.Struct, frozen=True):
    """What rank 0 tells the other senders of a group."""

    address: str
    generation: int
    deadline_s: float
    choice: Choice


class Peers(msgspec.Struct, frozen=True):
    """The other senders, at rank 0. `tell` passes a `Meeting` on, or nothing; `agree` takes the error of this sender
    and returns that of any, as on all of them: empty if every one sent its buckets."""

    senders: int
    tell: Callable[[bytes], object]
    agree: Callable[[str], str]


class Carrier:
    """Sends the buckets of one sender."""

    def __init__(self) -> None:
        self._packing: Packing | None = None  # while tensors are sent
        self._error = ""

    def run(
        self, sending: Sending, start: Callable[[], None], tensors: Tensors, plan: Plan, agree: Callable[[str], str]
    ) -> str:
        """Send them once `start` has built the lane; "" or why not all senders did."""
        whole, rest, self._error = False, iter(tensors), ""
        try:
            self._run(lambda: self._send(sending, start, rest, plan))
            self._packing = None
            for _ in rest:  # after an error
                pass
            error = agree(self._error)
            whole = not error
        finally:
            self._packing = None
            sending.end(whole=whole)
        return error

    def _send(self, sending: Sending, start: Callable[[], None], tensors: Tensors, plan: Plan) -> None:
        from weightsync.transports.packing import Packing

        start()
        lanes: dict[str, int] = {"sender": sending.lane, "senders": sending.choice.senders}
        self._packing = packing = Packing(plan, begin=sending.begin, wait=sending.settle, **lanes)
        for name, tensor in tensors:
            if self._error:
                return
            packing.add(name, tensor)
        if not self._error:
            packing.end()

    def settle(self) -> None:
        """As `weightsync.staging.Staging.settle`, for the tensors of `run`. It raises nothing: the iterator of tensors
        calls it, and has to go on.
        """
        if self._packing is not None and not self._error:
            self._run(self._packing.settle)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except TransportError as error:
            self._error = error.message
        except RuntimeError as error:  # DistError and errors of the backends
            self._error = str(error)


class CoSender:
    """A sender on another rank than 0. `device`: of a backend that needs one; else the backend chooses."""

    def __init__(self, lane: int, *, device: str = "") -> None:
        self._lane = lane
        self._device = device
        self._groups = Groups()
        self._carrier = Carrier()
        self.settle = self._carrier.settle

    def send(self, told: bytes, tensors: Tensors, plan: Plan, agree: Callable[[str], str]) -> str:
        """Send this rank's buckets to the group of the `Meeting`; "" or why not all senders did."""
        from weightsync.transports.collective import Sending
        from weightsync.transports.process_groups import Place, group_maker, reach

        meeting = msgspec.msgpack.decode(told, type=Meeting)
        backend, choice = meeting.address.partition("://")[0], meeting.choice
        group = Group(choice.name, senders=choice.senders)
        place = Place(backend, device=self._device if backend != "gloo" else "")
        sending = Sending(self._groups, place, group, meeting.deadline_s, lane=self._lane)

        def start() -> None:
            self._groups.keep_only(choice.held, address="")
            store = reach(meeting.address, meeting.generation, deadline_s=meeting.deadline_s)
            sending.join(store, choice, group_maker(backend))
            sending.build()

        return self._carrier.run(sending, start, tensors, plan, agree)
