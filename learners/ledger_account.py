"""The learner's own copy of the buffer's ledger, and the file by which learners of one run fence each other.

Guarantees:
1. `Account.text` describes everything in the current weights: the newest durable checkpoint plus later training and
   quarantine. It needs no answer from the buffer;
2. a learner epoch is never used twice, even if the buffer loses it: the run folder and every ledger hold the highest
   one;
3. a learner with an old epoch stops before its checkpoint becomes visible, without asking the buffer.
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
    """The ledger of the current weights. `base` is the ledger of a checkpoint, opaque to the learner."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._trained: dict[int, tuple[int, ...]] = {}  # step -> groups, since the base
        self._dead: dict[int, tuple[int, str]] = {}  # group -> (step, reason), since the base

    def train(self, step: int, groups: Sequence[int]) -> None:
        self._trained[step] = tuple(groups)

    def quarantine(self, step: int, group: int, reason: str) -> None:
        self._dead[group] = (step, reason)

    def renew(self, step: int, base: str) -> None:
        """Continue from a durable checkpoint of `step` with this ledger."""
        self._base = base
        self._trained = {number: groups for number, groups in self._trained.items() if number > step}
        self._dead = {group: dead for group, dead in self._dead.items() if dead[0] > step}

    def text(self, *, step: int, epoch: int) -> str:
        """Return the ledger; exactly the base if nothing has changed."""
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
        """Read the file; epoch 0 if it is missing or unreadable."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Mark)
        except (OSError, *UNREADABLE):
            return _Mark(0, 0, "")

    def take(self, epoch: int) -> None:
        """Record this process under `epoch`.

        Raises:
            Fenced: a higher epoch is registered.
            StateLost: another learner used this epoch; the next registration gets a higher one.
        """
        self.epoch = epoch
        found = self.highest()
        if found.epoch > epoch:
            self.check()
        if found.epoch == epoch and (found.pid, found.host) != (os.getpid(), socket.gethostname()):
            # The store lost data between two registrations, so it gave out the same epoch twice.
            raise StateLost("buffer.lost_state", f"learner epoch {epoch} was given to pid {found.pid} before")
        write_atomic(self._path, msgspec.json.encode(_Mark(epoch, os.getpid(), socket.gethostname())))

    def check(self) -> None:
        """Raise `Fenced` if another learner has registered later."""
        found = self.highest()
        if found.epoch > self.epoch:
            owner = f"pid {found.pid} on {found.host}"
            raise Fenced("fenced", f"learner epoch {self.epoch} is over: {owner} registered as {found.epoch}")
