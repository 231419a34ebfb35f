"""Publishing by transport `direct`: two passes over the weights on their device, and one to the host on request.

The first pass digests them, every rank its own rows (gathered on rank 0 if there are no such rows), and announces the
version; the second one sends them, if engines take them, by all ranks that can (`weightsync.publisher.senders`). An
engine that missed a version waits until the weights are staged, which happens while the learner waits for a batch, or
for the next version. All methods are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from asyncrl.config import Config
from learners.gang.gang import Gang
from learners.rank_zero import Services, Weights, exhaust
from learners.row_weights import RowWeights
from weightsync.plan.buckets import Plan
from weightsync.publisher.direct import Summed, digest_tensors, join_sums, sum_rows
from weightsync.publisher.senders import CoSender, Peers


class DirectWeights:
    def __init__(
        self, config: Config, *, gang: Gang, backend: Any, services: Services | None, rows: RowWeights
    ) -> None:
        self._bucket_bytes = config.weightsync.bucket_bytes
        self._gang = gang
        self._backend = backend
        self._services = services
        self._rows = rows
        self._senders = 0  # unknown
        self._sender: CoSender | None = None  # of another rank than 0

    def publish(self, version: int) -> None:
        """Announce the weights of a version and send them."""
        services, digests = self._services, self._digest()
        if services is not None:
            services.record_digest(version, services.publisher.announce(version, services.plan, digests))
        meets = b"1" if services is not None and services.publisher.wait_group() else b""
        if self._gang.share(meets if services is not None else None):
            self._send_all(version)

    def stage(self) -> None:
        """Copy the announced weights out."""
        if self._rows.stage():
            return
        services = self._services
        settle = None if services is None else services.settle
        weights = self._backend.iter_hf_weights(settle)
        send_weights(weights, None if services is None else lambda all_: self._stage(services, all_))

    def stage_if_wanted(self, version: int) -> None:
        """The same if an engine waits for it."""
        wanted = b"1" if self._services is not None and self._services.publisher.stage_wanted == version else b""
        if self._gang.share(wanted if self._services is not None else None):
            self.stage()

    def _digest(self) -> tuple[str, ...]:
        """Return the digests of the buckets at rank 0; nothing at the others."""
        rows, plan = self._backend.own_rows(), self._rows.plan()
        if rows is not None:
            parts = self._gang.gather(msgspec.msgpack.encode(sum_rows(rows.chunks(), plan)))
            if self._services is None:
                return ()
            return join_sums(plan, [msgspec.msgpack.decode(part, type=Summed) for part in parts])
        tensors = self._tensors(self._bucket_bytes // 2)  # half as large: the digests need room as well
        if self._services is None:
            exhaust_all(tensors)
            return ()
        with exhaust(tensors) as rest:
            return digest_tensors(rest, plan)

    def _send_all(self, version: int) -> None:
        """Send the version by all ranks that can."""
        self._find_senders()
        plan = self._rows.plan()
        tensors = self._tensors(self._bucket_bytes, plan if self._senders > 1 else None)  # they lie as in their buckets
        if self._services is not None:
            self._send(self._services, version, tensors)
        elif self._senders == 1 or not (told := self._gang.share(None)):  # nothing: no group, rank 0 says why
            exhaust_all(tensors)
        elif self._sender is None:
            exhaust_all(tensors)
            self._agree("")
        else:
            self._sender.send(told, tensors, plan, self._agree)

    def _find_senders(self) -> None:
        if self._senders:
            return
        turns = self._backend.weights_out.turns()
        self._senders = turns.senders
        if turns.senders > 1:
            number = turns.sender(self._gang.rank)
            if number:
                self._sender = CoSender(number, device=str(self._gang.device.torch_device))

    def _send(self, services: Services, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        alone = self._senders == 1
        peers = Peers(self._senders, _alone if alone else self._gang.share, str if alone else self._agree)
        with exhaust(tensors) as rest:
            result = services.publisher.send_direct(services.plan, rest, peers)
        if result != "sent":  # the service hears it from the members
            print(f"learner: warning: version {version} did not come to all engines: {result}", flush=True)

    def _agree(self, error: str) -> str:
        """Return the error of the first rank that has one."""
        return next((one.decode() for one in self._gang.gather(error.encode()) if one), "")

    @staticmethod
    def _stage(services: Services, weights: Weights) -> None:
        with exhaust(weights) as rest:
            services.publisher.stage_direct(services.plan, rest)

    def _tensors(self, part_bytes: int, plan: Plan | None = None) -> Any:
        """Return an iterator of the whole tensors at rank 0, with a `plan` of this rank's buckets."""
        sender = self._services if self._services is not None else self._sender
        settle = _nothing if sender is None else sender.settle
        buckets = None if plan is None else {one.name: one.bucket for one in plan.tensors}
        return self._backend.weights_out.iter_device(settle, part_bytes=part_bytes, buckets=buckets)


def send_weights(weights: Weights, send: Callable[[Any], object] | None) -> None:
    """Send the weights on rank 0. Collective: the other ranks exhaust the iterator."""
    if send is not None:
        send(weights)
    else:
        exhaust_all(weights)


def exhaust_all(weights: Iterable[Any]) -> None:
    """Take part in the gathering of weights that another rank reads."""
    for _ in weights:
        pass


def _alone(told: bytes) -> None:
    """There is no rank to tell."""


def _nothing() -> None: ...
