"""How the worker processes wait: for an unavailable service, and for a wake-up.

Guarantees:
1. only `Unavailable` is retried (no answer, or a refusal because its store is down); after `limit_s` it is raised.
   Every request of the buffer's clients is idempotent;
2. a service that has not answered for 5 s is logged once, and once more when it is back;
3. time in which this process itself stood still (SIGSTOP, a suspended machine) does not count as the service's silence;
4. once the process was asked to end, a request without an answer for `LEAVE_S` is abandoned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.errors import Unavailable
from asyncrl.runtime.role import Stop

T = TypeVar("T")
SAY_S = 5.0
LEAVE_S = 1.5  # longer than any long poll of the mains
LOOK_S = 0.25
STOOD_S = 1.0  # a check that is this late was delayed here


def _print(text: str) -> None:
    print(text, flush=True)


class Patience:
    """Retries requests to one service, from any number of tasks of one event loop. `service` is its name and
    address."""

    def __init__(
        self, service: str, *, limit_s: float, stop: Stop | None = None, say: Callable[[str], None] = _print
    ) -> None:
        self._service = service
        self._limit_s = limit_s
        self._stop = stop
        self._say = say
        self._heard = time.monotonic()
        self._said = False
        self._stood_s = 0.0  # total time in which this process stood still
        self.gave_up = False  # since the process was asked to end

    async def ask(self, call: Callable[[], Awaitable[T]], *, on_wait: Callable[[str], None] | None = None) -> T:
        """The result of `call`, retried with growing pauses. `on_wait` gets the error code."""
        started, stood_s = time.monotonic(), self._stood_s
        pause = 0.1
        while True:
            try:
                answer = await self._wait(call, started)
            except Unavailable as error:
                stood = self._stood_s - stood_s
                if self.gave_up or time.monotonic() + pause > started + stood + self._limit_s:
                    raise
                if on_wait is not None:
                    on_wait(error.code)
                self._look(started, why=f" ({error.message})")
            else:
                self._note_answer()
                return answer
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    @property
    def waits_for(self) -> str:
        """The service, after it was logged as silent; else empty."""
        return f"the {self._service}, which does not answer" if self._said else ""

    async def _wait(self, call: Callable[[], Awaitable[T]], started: float) -> T:
        asking = asyncio.ensure_future(call())
        try:
            while True:
                looked = time.monotonic()
                done, _ = await asyncio.wait([asking], timeout=LOOK_S)
                self._note_standstill(time.monotonic() - looked - LOOK_S)
                if done:
                    break
                self._look(started)
        finally:
            asking.cancel()  # no effect if it is done
        return asking.result()

    def _note_standstill(self, late_s: float) -> None:
        """A wait that ends late means that this process did not run: the service was not silent."""
        if late_s >= STOOD_S:
            self._heard = time.monotonic()
            self._stood_s += late_s

    def _look(self, started: float, *, why: str = "") -> None:
        now = time.monotonic()
        if now - max(started, self._heard) >= SAY_S and not self._said:
            self._said = True
            self._say(
                f"warning: the {self._service} does not answer since {SAY_S:g} s{why}; giving up after "
                f"{self._limit_s:g} s"
            )
        if self._stop is not None and self._stop.is_set() and now - started >= LEAVE_S:
            self.gave_up = True
            raise Unavailable(
                "net.unreachable",
                f"no answer for {now - started:.1f} s, and this process was asked to end",
                where=self._service,
            )

    def _note_answer(self) -> None:
        now = time.monotonic()
        if self._said:
            self._say(f"the {self._service} answers again after {now - self._heard:.0f} s")
        self._heard, self._said = now, False


class Bell:
    """An event for one waiter, always with a limit. A ring before the wait is not lost."""

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the waiter; on its event loop."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, *, timeout_s: float) -> bool:
        """Wait for a ring; False if there was none in time."""
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=timeout_s)
            self._waiter = None
        rung, self._rung = self._rung, False
        return rung
