"""Heartbeats of the learner from a thread of their own, and a limit on waiting for a service that does not answer."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

from asyncrl.errors import AsyncRLError, Unavailable
from asyncrl.runtime.role import Stop

SILENT_S = 5.0  # after this time without an answer a warning is printed
LEAVE_S = 3.0  # longest wait for an answer once the process should end


class Patience:
    """Called repeatedly while an answer is overdue: warns once, and gives up when the process should end. `limit_s` is
    the time limit of the request itself.
    """

    def __init__(self, service: str, *, limit_s: float, stop: Stop) -> None:
        self._service = service
        self._limit_s = limit_s
        self._stop = stop
        self._reported = False

    def __call__(self, overdue_s: float) -> bool:
        """Whether to give up the request."""
        if overdue_s < SILENT_S:
            self._reported = False
        elif not self._reported:
            self._reported = True
            print(
                f"learner: warning: the {self._service} has not answered for {SILENT_S:g} s; the request gives up "
                f"after {self._limit_s:g} s",
                flush=True,
            )
        return self._stop.is_set() and overdue_s >= LEAVE_S


class Heart:
    """A thread that sends heartbeats over its own connection with `beat(stats, waiting_for)`. `stop` sets `ended`,
    which also cancels a beat in progress.
    """

    def __init__(self, beat: Any, *, every_s: float, close: Any = None, ended: threading.Event | None = None) -> None:
        self.stats: dict[str, float] = {}
        self.waiting_for = "its model to load"
        self._beat = beat
        self._close = close
        self._every_s = every_s
        self._ended = ended or threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heart-{os.getpid()}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            stats = {name: value for name, value in self.stats.items() if math.isfinite(value)}
            try:
                self._beat(stats, waiting_for=self.waiting_for)
            except Unavailable:
                continue  # the request of the main thread reports it
            except AsyncRLError as error:
                print(f"learner: heartbeat refused: {error.message}", flush=True)
                break
        if self._close is not None:
            self._close()

    def stop(self) -> None:
        """Stop the thread after the beat in progress."""
        self._ended.set()
        self._thread.join(timeout=5.0)
