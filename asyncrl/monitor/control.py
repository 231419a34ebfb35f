"""A blocking client of the buffer or the weight-sync service, for tools: status, tuning, stop.

Guarantee: every call ends within `timeout_s` (`net.unreachable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.errors import AsyncRLError
from asyncrl.net.keys import Keys
from asyncrl.net.requester import Requester
from asyncrl.runtime.host_facts import reachable

ASK_TIMEOUT_S = 3.0


class ServiceClient:
    """One connection to a service."""

    def __init__(self, address: str, *, keys: Keys | None = None, timeout_s: float = 10.0) -> None:
        self._requester = Requester(address, keys=keys, resend_s=min(3.0, timeout_s))
        self._timeout_s = timeout_s

    def status(self) -> dict[str, Any]:
        """The state of the service."""
        reply: wire.StatusReply = self._requester.request(wire.StatusRequest(), timeout_s=self._timeout_s).message
        status: dict[str, Any] = msgspec.json.decode(reply.json)
        return status

    def tune(self, changes: Mapping[str, Any], *, author: str, undo_to: int = -1) -> wire.Tuned:
        """Change settings of the running system; `undo_to` >= 0 restores the settings of that change (0: the TOML)."""
        message = wire.Tune(msgspec.json.encode(dict(changes)).decode(), author, undo_to)
        tuned: wire.Tuned = self._requester.request(message, timeout_s=self._timeout_s).message
        return tuned

    def stop(self, reason: str) -> None:
        """Ask the service to end after it has written everything."""
        self._requester.request(wire.Stop(reason), timeout_s=self._timeout_s)

    def close(self) -> None:
        self._requester.close()


def service_status(address: str, keys: Keys | None) -> dict[str, Any]:
    """The state of the service at an address, or `{"error": ..., "code": ...}`."""
    if not reachable(address, timeout_s=ASK_TIMEOUT_S):  # immediate, while a request would wait for its deadline
        return {"error": f"nothing listens at {address}", "code": "net.unreachable"}
    try:
        with closing(ServiceClient(address, keys=keys, timeout_s=ASK_TIMEOUT_S)) as client:
            return client.status()
    except AsyncRLError as error:
        return {"error": error.message, "code": error.code}
