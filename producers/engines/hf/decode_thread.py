"""The thread of the decode loop: it runs commands between two steps, and hands finished samples to the event loop.

Several decoders take turns, one step each.

Guarantee: any failure of the loop is passed to `on_failure` and ends every later call with `engine.broken`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from asyncrl.engine import GenDelta
from asyncrl.errors import AsyncRLError
from producers.engines.hf.decoder import Decoder

T = TypeVar("T")
IDLE_WAIT_S = 1.0  # for a command when there is nothing to decode


class DecodeThread:
    """Made on the event loop that uses it. `deliver` and `on_failure` are called on that loop."""

    def __init__(
        self,
        decoders: Sequence[Decoder],
        *,
        deliver: Callable[[list[GenDelta]], None],
        on_failure: Callable[[AsyncRLError], None],
    ) -> None:
        self.failure: AsyncRLError | None = None
        self._decoders = tuple(decoders)
        self._deliver = deliver
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the failure of the thread, if it failed."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: AsyncRLError) -> AsyncRLError:
        """Remember the first failure and report it."""
        self.failure = self.failure or error
        self._post(self._on_failure, self.failure)
        return self.failure

    def submit(self, command: Callable[[], None]) -> None:
        """Run the command between two steps."""
        self._commands.put(command)

    async def call(self, action: Callable[[], T]) -> T:
        """Run the action between two steps; its result. Its exception breaks the engine."""
        self.check()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command() -> None:
            result = action()
            self._post(settle, result)

        def settle(result: T) -> None:
            if not answer.done():
                answer.set_result(result)

        self.submit(command)
        while not answer.done():
            await asyncio.wait([answer], timeout=IDLE_WAIT_S)
            if not answer.done():
                self.check()
        return answer.result()

    async def close(self, *, grace_s: float) -> None:
        """Stop after the current step."""
        self.fail(AsyncRLError("engine.broken", "the engine was closed"))
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, grace_s)

    def _run(self) -> None:
        try:
            while self._take_commands():
                finished = [delta for decoder in self._decoders for delta in decoder.step()]
                if finished:
                    self._post(self._deliver, finished)
        except Exception as error:  # the outermost loop of this thread: any error must reach the waiting callers
            self.fail(AsyncRLError("engine.broken", f"{type(error).__name__}: {error}"))

    def _take_commands(self) -> bool:
        """Run the waiting commands; block only when there is nothing to decode. False to end."""
        while True:
            try:
                command = self._commands.get(block=self._is_idle(), timeout=IDLE_WAIT_S)
            except queue.Empty:
                if self._is_idle():
                    continue
                return True
            if command is None:
                return False
            command()

    def _is_idle(self) -> bool:
        return all(decoder.idle for decoder in self._decoders)

    def _post(self, action: Callable[..., Any], *args: Any) -> None:
        """Run on the event loop; nothing if it is closed (the process ends)."""
        try:
            self._loop.call_soon_threadsafe(action, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
