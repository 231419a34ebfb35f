"""Rate limits, retry waits and hedged requests for a judge's server.

Time and randomness are injected. Guarantees:
1. between any two permits of `Pace` lies at least `1 / per_s`, and none is given while the server asked for a pause;
2. `backoff` grows from 0.5 s by doubling up to 30 s, half of it random, so that workers do not return together;
3. `Slow.threshold_s` is the 95th percentile of the calls so far, and None until there are enough of them.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable

FIRST_S, LONGEST_S = 0.5, 30.0
ENOUGH = 20  # calls for a percentile
KEPT = 256  # latest calls of the percentile
SLOW = 0.95
LOOK_S = 0.05  # how often a slow call checks for room for a second one


class Pace:
    """Permits at a rate."""

    def __init__(
        self,
        per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._gap = 1 / per_s if per_s else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = 0.0  # when the next permit may be given

    async def permit(self) -> None:
        """Wait for a turn."""
        now = self._clock()
        turn = max(now, self._next)
        self._next = turn + self._gap
        while (left := max(turn, self._until) - self._clock()) > 0:
            await self._sleep(left)

    _until = 0.0  # end of a pause that the server asked for

    def pause_for(self, seconds: float) -> None:
        """Send no request for this time."""
        self._until = max(self._until, self._clock() + seconds)


def backoff(attempt: int, rng: random.Random) -> float:
    """Seconds before attempt 1, 2, ...

    >>> [round(backoff(n, random.Random(0)), 2) for n in (1, 2, 3, 20)]
    [0.46, 0.92, 1.84, 27.67]
    """
    longest = min(LONGEST_S, FIRST_S * 2.0 ** min(attempt - 1, 16))
    return longest * (0.5 + 0.5 * rng.random())


def retry_after(text: str | None, *, now: float) -> float:
    """Seconds that a `Retry-After` header asks for: a number, or a date (`now`: wall time). 0 for anything else.

    >>> retry_after("3", now=0), retry_after("soon", now=0), retry_after("Thu, 01 Jan 1970 00:01:00 GMT", now=50.0)
    (3.0, 0.0, 10.0)
    """
    if not text:
        return 0.0
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except ValueError:
        return 0.0


class Slow:
    """Durations of calls, to find slow ones."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=KEPT)

    def record(self, seconds: float) -> None:
        self._took.append(seconds)

    def threshold_s(self) -> float | None:
        """Seconds after which a call is slower than 95 % of the others; None before enough calls."""
        if len(self._took) < ENOUGH:
            return None
        return sorted(self._took)[int(SLOW * len(self._took))]


async def hedge(
    call: Callable[[], Awaitable[object]],
    *,
    after_s: float | None,
    may: Callable[[], bool],
    counted: Callable[[], None],
) -> object:
    """The first good answer of one call, or of a second one that begins `after_s` later, once `may` allows it.

    If both fail, the error of the first. The other call is cancelled. `counted` is called for a second one.
    """
    first = asyncio.ensure_future(call())
    tasks, late = [first], False
    try:
        while after_s is not None and not first.done() and len(tasks) == 1:
            await asyncio.wait(tasks, timeout=max(after_s, LOOK_S) if late else after_s)
            late = True
            if not first.done() and may():
                counted()
                tasks.append(asyncio.ensure_future(call()))
        waiting = set(tasks)
        while waiting:
            # bounded: every call has the timeout of its attempt
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if task.exception() is None:
                    return task.result()
        return first.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # bounded: they were cancelled, or are done
