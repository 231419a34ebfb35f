"""What rank 0 knows of the buffer's ledger by itself, and the mark by which the learners of a run fence each other.

Guarantees:
1. `text` is the ledger of everything in the current weights: that of the newest durable checkpoint plus what was
   trained or quarantined since; it needs no answer of the buffer;
2. a learner epoch is never used twice, also where the buffer forgot it: the highest one stands in the run folder and
   is carried into every ledger;
3. a learner of an older epoch finds out by the mark alone, without the buffer, before it makes a checkpoint visible.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE, Fenced, StateLost
from asyncrl.runtime.run_dir import write_atomic
from buffers.client.offline_ledger import epoch_of, grown_ledger


class Account:
    """The ledger of the current weights. `base` is the text of a checkpoint, opaque to the learner."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._trained: dict[int, tuple[int, ...]] = {}  # step -> groups, since the base
        self._dead: dict[int, tuple[int, str]] = {}  # group -> (step, reason), since the base

    def train(self, step: int, groups: Sequence[int]) -> None:
        """The weights hold this step now."""
        self._trained[step] = tuple(groups)

    def quarantine(self, step: int, group: int, reason: str) -> None:
        """A group of the step was quarantined."""
        self._dead[group] = (step, reason)

    def renew(self, step: int, base: str) -> None:
        """A checkpoint of `step` with this ledger is durable."""
        self._base = base
        self._trained = {number: groups for number, groups in self._trained.items() if number > step}
        self._dead = {group: dead for group, dead in self._dead.items() if dead[0] > step}

    def text(self, *, step: int, epoch: int) -> str:
        """The ledger; the base as it is where nothing has happened since."""
        if not self._trained and not self._dead and epoch <= epoch_of(self._base):
            return self._base
        dead = {group: reason for group, (_, reason) in self._dead.items()}
        return grown_ledger(self._base, epoch=epoch, step=step, trained=self._trained, dead=dead)


class _Mark(msgspec.Struct, frozen=True):
    epoch: int
    pid: int
    host: str


class EpochMark:
    """The highest learner epoch of the run, in a small file of the run folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.epoch = 0  # of this process, once it is registered

    def highest(self) -> _Mark:
        """What the file says; epoch 0 where there is none, or none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Mark)
        except (OSError, *UNREADABLE):
            return _Mark(0, 0, "")

    def take(self, epoch: int) -> None:
        """This process was registered under `epoch`. Raises `fenced` where a higher one is there, `StateLost` where
        the same one was another learner's: the next registration gets a higher one.
        """
        self.epoch = epoch
        found = self.highest()
        if found.epoch > epoch:
            self.check()
        if found.epoch == epoch and (found.pid, found.host) != (os.getpid(), socket.gethostname()):
            # Its store went back between two registrations: this epoch was another learner's.
            raise StateLost("buffer.lost_state", f"learner epoch {epoch} was given to pid {found.pid} before")
        write_atomic(self._path, msgspec.json.encode(_Mark(epoch, os.getpid(), socket.gethostname())))

    def check(self) -> None:
        """Raise `fenced` where another learner has registered after this one."""
        found = self.highest()
        if found.epoch > self.epoch:
            who = f"pid {found.pid} on {found.host}"
            raise Fenced("fenced", f"learner epoch {self.epoch} is over: {who} registered as {found.epoch}")
