"""Turns on devices that the learner and engines share (`cluster.devices = "turns"`): locks on two files of the run.

Guarantees:
1. while the learner has its turn no engine has one; engines have theirs together;
2. a process that waits is the next one: while it holds the second file (the queue), others of the run cannot pass it;
3. the kernel frees the locks of a process that dies, however it dies;
4. every wait has a limit, after which `take` raises `hang`.
All processes of the run must be on one host.

Example: the learner trains (turn: learner) while an engine waits (queue: engine). The learner ends its step and wants
to begin the next one: it waits for the queue, so the engine goes first.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from asyncrl.errors import AsyncRLError
from asyncrl.file_locks import try_lock, unlock

LOOK_S = 0.01
FILES = ("device.turn", "device.queue")  # in the folder of the run


class DeviceTurn:
    """One process's end. `waiting_for`: a text for status displays, empty while it does not wait."""

    def __init__(self, folder: Path, *, together: bool, limit_s: float) -> None:
        """`together`: this process shares its turns with others that do too (engines)."""
        self.held = False
        self.waiting_for = ""
        self.limit_s = limit_s
        self._together = together
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._turn, self._queue = (os.open(folder / name, flags, 0o600) for name in FILES)

    def take(self) -> None:
        """Wait for the turn; at once if this process has it.

        Raises:
            AsyncRLError: `hang` after the limit.
        """
        with closing(self._tries()) as tries:
            for _ in tries:
                time.sleep(LOOK_S)

    async def take_async(self) -> None:
        """`take` on an event loop. One call at a time."""
        with closing(self._tries()) as tries:
            for _ in tries:
                await asyncio.sleep(LOOK_S)

    def give(self) -> None:
        """End the turn."""
        self.held = False
        unlock(self._turn)

    def _tries(self) -> Generator[None]:
        """Yield between two attempts until this process has its turn."""
        until = time.monotonic() + self.limit_s
        try:
            for file, shared in ((self._queue, False), (self._turn, self._together)):
                # bounded: by the limit
                while not self.held and not try_lock(file, shared=shared):
                    self.waiting_for = "its turn on the device (cluster.devices)"
                    if time.monotonic() > until:
                        raise AsyncRLError(
                            "hang",
                            f"no turn on the device within {self.limit_s:g} s (run.hang_timeout_s)",
                            remedy="see asyncrl status: a process of the other side does not end its turn",
                        )
                    yield
            self.held = True
        finally:
            self.waiting_for = ""
            unlock(self._queue)
