"""Client of the weight-sync service for tools: status and stop. Blocking; no torch.

Guarantee: every call ends within `timeout_s` (`net.unreachable`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.net.sockets import Keys, Requester
from asyncrl.wire import StatusRequest, Stop


class WeightSyncClient:
    """One connection to the service."""

    def __init__(self, address: str, *, keys: Keys | None = None, timeout_s: float = 10.0) -> None:
        self._requester = Requester(address, keys=keys, resend_s=min(1.0, timeout_s))
        self._timeout_s = timeout_s

    def status(self) -> dict[str, Any]:
        """Target, committed version, round and members: state, version, digest, why it does not serve, and its
        route."""
        reply = self._requester.request(StatusRequest(), timeout_s=self._timeout_s).message
        status: dict[str, Any] = msgspec.json.decode(reply.json)
        return status

    def stop(self, reason: str) -> None:
        """Ask the service to end; generators get the instruction to take no more weights."""
        self._requester.request(Stop(reason), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._requester.close()
