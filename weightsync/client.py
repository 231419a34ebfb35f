"""The door to the weight-sync service for tools: status and stop. Blocking; no torch.

Guarantees: every call ends within `timeout_s` (`net.unreachable`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.net.keys import Keys
from asyncrl.net.requester import Requester
from asyncrl.wire import StatusRequest, Stop


class WeightSyncClient:
    """One connection to the service."""

    def __init__(self, address: str, *, keys: Keys | None = None, timeout_s: float = 10.0) -> None:
        self._requester = Requester(address, keys=keys, resend_s=min(1.0, timeout_s))
        self._timeout_s = timeout_s

    def status(self) -> dict[str, Any]:
        """Target, committed version, round and members: state, version, digest and why it does not serve; transport,
        encoding, source and why these."""
        reply = self._requester.request(StatusRequest(), timeout_s=self._timeout_s).message
        status: dict[str, Any] = msgspec.json.decode(reply.json)
        return status

    def stop(self, reason: str) -> None:
        """Ask the service to end; generators are told to take no more weights."""
        self._requester.request(Stop(reason), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._requester.close()
