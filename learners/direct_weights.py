"""Publishing by transport `direct`: two passes over the weights on their device, and one to the host on request.

The first pass digests them and announces the version; the second one sends them, if engines take them. An engine that
missed a version waits until the weights are staged, which happens while the learner waits for a batch, or for the next
version. All methods are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.config import Config
from learners.gang.gang import Gang
from learners.rank_zero import Services, Weights, exhaust
from learners.row_weights import RowWeights


class DirectWeights:
    def __init__(
        self, config: Config, *, gang: Gang, backend: Any, services: Services | None, rows: RowWeights
    ) -> None:
        self._bucket_bytes = config.weightsync.bucket_bytes
        self._gang = gang
        self._backend = backend
        self._services = services
        self._rows = rows

    def publish(self, version: int) -> None:
        """Announce the weights of a version and send them."""
        services = self._services
        tensors = self._tensors(self._bucket_bytes // 2)  # half as large: the digests need room as well
        send_weights(tensors, None if services is None else lambda all_: self._announce(services, version, all_))
        meets = b"1" if services is not None and services.publisher.wait_group() else b""
        if self._gang.share(meets if services is not None else None):
            tensors = self._tensors(self._bucket_bytes)  # they lie as in their buckets
            send_weights(tensors, None if services is None else lambda all_: self._send(services, version, all_))

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

    @staticmethod
    def _announce(services: Services, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        with exhaust(tensors) as rest:
            services.record_digest(version, services.publisher.announce(version, services.plan, rest))

    @staticmethod
    def _send(services: Services, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        with exhaust(tensors) as rest:
            result = services.publisher.send_direct(services.plan, rest)
        if result != "sent":  # the service hears it from the members
            print(f"learner: warning: version {version} did not come to all engines: {result}", flush=True)

    @staticmethod
    def _stage(services: Services, weights: Weights) -> None:
        with exhaust(weights) as rest:
            services.publisher.stage_direct(services.plan, rest)

    def _tensors(self, part_bytes: int) -> Any:
        settle = _nothing if self._services is None else self._services.settle
        return self._backend.iter_device_weights(settle, part_bytes=part_bytes)


def send_weights(weights: Weights, send: Callable[[Any], object] | None) -> None:
    """Send the weights on rank 0. Collective: the other ranks exhaust the iterator."""
    if send is not None:
        send(weights)
    else:
        for _ in weights:
            pass


def _nothing() -> None: ...
