"""How the two mains wait: for a service that is away, and for a bell of their own.

Guarantees:
1. only `Unavailable` is tried again (no answer, or a refusal because its store is down); after `limit_s` it comes out.
   Every request of the buffer's clients is idempotent;
2. a service that has not answered anything for 5 s is named on the log once, and once more when it is back;
3. time for which this process itself stood still (SIGSTOP, a suspended machine) is not the service's silence;
4. once the process was asked to end, a request that stays without an answer for `LEAVE_S` is given up.
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
STOOD_S = 1.0  # a look that comes this late was held up here


def _print(text: str) -> None:
    print(text, flush=True)


class Patience:
    """Asks one service, from any number of tasks of one event loop. `service` is its name and address."""

    def __init__(
        self, service: str, *, limit_s: float, stop: Stop | None = None, say: Callable[[str], None] = _print
    ) -> None:
        self._service = service
        self._limit_s = limit_s
        self._stop = stop
        self._say = say
        self._heard = time.monotonic()
        self._said = False
        self._stood_s = 0.0  # in all, that this process itself stood still (SIGSTOP, a suspended machine)
        self.gave_up = False  # since the process was asked to end

    async def ask(self, call: Callable[[], Awaitable[T]], *, on_wait: Callable[[str], None] | None = None) -> T:
        """The result of `call`, tried again with growing pauses. `on_wait` hears the code of what is missing."""
        started, stood_s = time.monotonic(), self._stood_s
        pause = 0.1
        while True:
            try:
                answer = await self._watched(call, started)
            except Unavailable as error:
                stood = self._stood_s - stood_s
                if self.gave_up or time.monotonic() + pause > started + stood + self._limit_s:
                    raise
                if on_wait is not None:
                    on_wait(error.code)
                self._look(started, why=f" ({error.message})")
            else:
                self._answered()
                return answer
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    @property
    def waits_for(self) -> str:
        """The service, while it has been silent for so long that it was named; else empty."""
        return f"the {self._service}, which does not answer" if self._said else ""

    async def _watched(self, call: Callable[[], Awaitable[T]], started: float) -> T:
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
            asking.cancel()  # nothing where it is done
        return asking.result()

    def _note_standstill(self, late_s: float) -> None:
        """A wait that ends this late: it is we who did not run, and the service has not been silent meanwhile."""
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

    def _answered(self) -> None:
        now = time.monotonic()
        if self._said:
            self._say(f"the {self._service} answers again after {now - self._heard:.0f} s")
        self._heard, self._said = now, False


class Bell:
    """An event for one waiter, who never waits without a limit. A ring before the wait is not lost."""

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the waiter; on its event loop."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, *, timeout_s: float) -> bool:
        """Wait for a ring; False where there was none in time."""
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=timeout_s)
            self._waiter = None
        rung, self._rung = self._rung, False
        return rung
