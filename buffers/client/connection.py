"""The connection of an asynchronous client to the buffer: handshake and heartbeat.

Guarantees of every client of the buffer:
1. every call ends: with its answer, with the service's refusal as an error of the catalogue, or with `net.unreachable`
   after `timeout_s` (plus the time that the service was asked to wait);
2. a call may be sent twice (the service is idempotent), and is answered once.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence

from asyncrl import wire
from asyncrl.errors import HandshakeError
from asyncrl.net.async_requester import AsyncRequester
from asyncrl.net.keys import Keys
from asyncrl.wire import Buffer

MAX_BYTES = 1 << 30
RENAMES = 4


class AsyncClient:
    """Base of the clients on an event loop.

    With `may_rename` the process takes a suffix if its name is in use; `name` is the name that it got.
    """

    role = ""
    may_rename = False

    def __init__(
        self, address: str, *, name: str, keys: Keys | None = None, max_bytes: int = MAX_BYTES, timeout_s: float = 60.0
    ) -> None:
        self.name = name
        self.every_s = 0.0  # least `interval`, as the service says
        self._timeout_s = timeout_s
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._requester = AsyncRequester(address, keys=keys, max_bytes=max_bytes)

    async def _ask(self, message: wire.Message, payloads: Sequence[Buffer] = (), *, wait_s: float = 0.0) -> wire.Packet:
        return await self._requester.request(message, payloads, timeout_s=self._timeout_s + wait_s, wait_s=wait_s)

    async def hello(
        self, fingerprint: str = "", role: str = "", run_id: str = "", *, evaluation_rows: int = 0
    ) -> wire.Welcome:
        """Introduce this process; must come first. Leases of an earlier process of this name are lost."""
        given = self.name
        for _ in range(RENAMES):
            hello = wire.Hello(
                role or self.role,
                self.name,
                self._pid,
                self._host,
                run_id,
                fingerprint,
                evaluation_rows=evaluation_rows,
            )
            try:
                welcome: wire.Welcome = (await self._ask(hello)).message
                return welcome
            except HandshakeError as error:
                if error.code != "handshake.name" or not self.may_rename:
                    raise
                self.name = f"{given}-{secrets.token_hex(2)}"
                print(f"{error.message}: this process works as {self.name}", flush=True)
        raise HandshakeError("handshake.name", f"{given} and {RENAMES} names like it are in use")

    async def heartbeat(
        self,
        stats: Mapping[str, float],
        *,
        waiting_for: str = "",
        holds: Sequence[wire.Lease | wire.RewardItem] | None = None,
    ) -> tuple[tuple[int, int], ...]:
        """Renew the leases of this process. `holds`: those it works on; others are lost after a while.

        Returns leases (group, token) that this process should stop working on.
        """
        named = None if holds is None else tuple((held.group, held.token) for held in holds)
        beat = wire.Heartbeat(self.role, self.name, self._pid, self._host, waiting_for, dict(stats), named)
        answer: wire.Ok = (await self._ask(beat)).message
        self.every_s = answer.every_s
        return answer.cancelled

    def interval(self, seconds: float) -> float:
        """Time between two heartbeats, or two requests without work: longer in a large fleet."""
        return max(seconds, self.every_s)

    def close(self) -> None:
        self._requester.close()
