"""The lease of a run with a stand-by: a key in Redis that the serving buffer renews and that lapses without it.

The lease decides which process serves; the epoch of the store decides which one may write. Guarantees:
1. one process holds the lease: taking it and renewing it are atomic scripts, and Redis's clock alone ends it;
2. a holder that could not renew it for `LEASE_S` by its own clock knows that before it answers (`Term`, `confirm`);
3. a holder whose lease another process took is `fenced`, whatever it still has in memory;
4. a buffer that stops gives the lease back, so a stand-by takes over at once; at the end of the run it says so, and the
   stand-by ends too.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import redis

from asyncrl.errors import Fenced
from buffers.stores.keys import head_key, lease_key
from buffers.stores.redis_client import TRANSIENT, RedisClient

LEASE_S = 5.0
RENEW_S = 1.0  # between two renewals, without the call itself
ENDED_S = 60.0  # how long the end of a run is announced


class Holder(msgspec.Struct, frozen=True):
    """The process that has the lease, in its own words."""

    token: str
    pid: int
    host: str
    address: str = ""
    nonce: str = ""  # of its folder of payloads, once it serves
    ended: str = ""  # why no buffer is needed any more

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, at {self.address}"


class Term:
    """How long the lease lasts by the clock of its holder: from the moment at which its renewal was requested, because
    Redis counts from a later one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = float("-inf")

    def renewed(self, asked_at: float) -> None:
        self._until = max(self._until, asked_at + LEASE_S)

    def is_over(self) -> bool:
        return self._clock() >= self._until


class Lease:
    """One process's side of the lease. `keep` renews it in a thread; the other methods are for the main thread."""

    def __init__(
        self, client: RedisClient, *, run: str, address: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.me = Holder(secrets.token_hex(8), os.getpid(), socket.gethostname(), address)
        self.epoch = 0
        self._client = client
        self._keys = [lease_key(run), head_key(run)]
        self._take, self._renew = client.script("take_lease"), client.script("renew_lease")
        self._clock = clock
        self._term = Term(clock)
        self._lost: Fenced | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def run_exists(self) -> bool:
        """Whether a buffer has served this run: its store has an epoch."""
        return bool(self._client.patiently(lambda: self._client.redis.exists(self._keys[1])))

    def holder(self) -> Holder | None:
        """The process that has the lease, if any has."""
        fields = self._client.patiently(lambda: self._client.redis.hgetall(self._keys[0]))
        return _read(fields) if fields else None

    def take(self, *, replaces: str = "") -> Holder | None:
        """Take the lease if it is free, or held under the token `replaces`; else its holder."""
        asked_at = self._clock()
        words = [self.me.token, int(LEASE_S * 1000), replaces, *_fields(self.me)]
        answer = self._client.patiently(lambda: self._take(self._keys[:1], words))
        if answer:
            return _read(dict(zip(answer[::2], answer[1::2], strict=True)))
        self._term.renewed(asked_at)
        return None

    def keep(self) -> None:
        """Renew the lease in a thread until `leave`."""
        self._thread.start()

    def announce(self, *, epoch: int, nonce: str) -> None:
        """Say which epoch and folder of payloads this process serves with."""
        self.epoch, self.me = epoch, msgspec.structs.replace(self.me, nonce=nonce)

    def confirm(self) -> None:
        """Raise `fenced` if this process may not serve any more. Asks Redis only if the last renewal is too old."""
        if self._lost is not None:
            raise self._lost
        if self._term.is_over():
            self._client.patiently(self._renew_once)

    def leave(self, *, ended: str = "") -> None:
        """Give the lease back, once. `ended`: the run needs no buffer any more, for this reason."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(2 * LEASE_S)
        self.me = msgspec.structs.replace(self.me, ended=ended)
        if self._lost is None:
            with suppress(redis.exceptions.RedisError, *TRANSIENT):  # it lapses by itself
                self._ask(ENDED_S if ended else 0.0)
        self._client.redis.close()

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._renew_once()
            except TRANSIENT:
                continue  # `confirm` notices a lease that lapsed
            except Fenced:
                return

    def _renew_once(self) -> None:
        asked_at = self._clock()
        if self._ask(LEASE_S) == b"fenced":
            what = f"another buffer has the lease of this run ({self._client.where})"
            self._lost = Fenced("fenced", what, where=self.me.address)
            raise self._lost
        self._term.renewed(asked_at)

    def _ask(self, seconds: float) -> Any:
        words = [self.me.token, int(seconds * 1000), self.epoch, *_fields(self.me)]
        return self._renew(self._keys, words)


def _fields(holder: Holder) -> list[Any]:
    return [word for name in Holder.__struct_fields__ if name != "token" for word in (name, str(getattr(holder, name)))]


def _read(fields: dict[bytes, bytes]) -> Holder:
    return msgspec.convert({key.decode(): value.decode() for key, value in fields.items()}, Holder, strict=False)
