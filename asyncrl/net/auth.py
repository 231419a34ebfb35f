"""CURVE authentication of a service: which keys are admitted, which key a message came from, and what it may send.

`ALLOWED` is the whole table: docs/security.md shows it. Guarantees:
1. a message that the role of the sender's key may not send is refused before it is read (`config.forbidden`);
2. a key that is added to the server file or revoked there is admitted or refused within `LOOK_S`, also on connections
   that are established.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from asyncrl import wire
from asyncrl.errors import AsyncRLError
from asyncrl.net.frames import _NOBLOCK
from asyncrl.net.keys import GUESTS, OWNER, Holder, Keys, Role, read_keys

LOOK_S = 1.0  # between two looks at the server file
_SRCFD = int(zmq.SRCFD)

_EVERYBODY = frozenset({OWNER, *GUESTS})
_PRODUCERS: frozenset[Role] = frozenset({OWNER, "producer"})
_REWARDS: frozenset[Role] = frozenset({OWNER, "reward"})
_OWNER: frozenset[Role] = frozenset({OWNER})

#: Request -> the roles of keys that may send it. `Hello` and `Heartbeat` must name the role of the key.
ALLOWED: Mapping[type, frozenset[Role]] = {
    wire.Hello: _EVERYBODY,
    wire.Heartbeat: _EVERYBODY,
    wire.StatusRequest: _EVERYBODY,
    wire.LeaseRequest: _PRODUCERS,
    wire.Samples: _PRODUCERS,
    wire.SamplesAt: _PRODUCERS,
    wire.Pieces: _PRODUCERS,
    wire.LeaseReturn: _PRODUCERS,
    wire.StoreImages: _PRODUCERS,
    wire.MemberPoll: _PRODUCERS,
    wire.Fetch: _PRODUCERS,
    wire.RewardRequest: _REWARDS,
    wire.Scores: _REWARDS,
    wire.TeacherLogprobs: _REWARDS,
    wire.FetchImages: _REWARDS,
    wire.Stop: _OWNER,
    wire.Tune: _OWNER,
    wire.Register: _OWNER,
    wire.Claim: _OWNER,
    wire.Commit: _OWNER,
    wire.Quarantine: _OWNER,
    wire.LedgerRequest: _OWNER,
    wire.Checkpointed: _OWNER,
    wire.Goodbye: _OWNER,
    wire.EvaluationsRequest: _OWNER,
    wire.Publish: _OWNER,
    wire.RoundRequest: _OWNER,
}


def is_allowed(message: wire.Message, role: Role) -> bool:
    """Whether a key of this role may send the message. The owner may send any: a service answers what it does not take.

    >>> [is_allowed(wire.Hello(role, "x", 1, "h"), "producer") for role in ("producer", "reward", "learner")]
    [True, False, False]
    """
    if role == OWNER:
        return True
    if isinstance(message, (wire.Hello, wire.Heartbeat)):
        return message.role == role
    return role in ALLOWED.get(type(message), ())


class Source(NamedTuple):
    """Where a message came from: the descriptor of its connection, and the public key that ZAP admitted."""

    descriptor: int
    key: bytes


def receive_from(socket: zmq.Socket[bytes], *, keys: bool) -> list[Any]:
    """Like `receive_frames`, with the `Source` in front. `keys`: the socket admits by keys."""
    frames: list[Any] = [None]
    while True:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.buffer)
        if not frame.more:
            frames[0] = Source(int(frame.get(_SRCFD)), str(frame.get("User-Id")).encode() if keys else b"")
            return frames


class Admission:
    """The keys that a service admits. With `path`, the server file, later changes of its list count.

    It answers ZAP from memory, because a folder of keys would outlive a killed process.
    """

    def __init__(self, keys: Keys, path: Path | None = None) -> None:
        self._path = path
        self._server_public = keys.server_public
        self._state: tuple[int, int] = self._stat()
        self._looked = time.monotonic()
        self._known = {public.encode(): holder for public, holder in keys.known.items()}

    def find(self, key: bytes) -> Holder | None:
        """The holder of a public key; None if it is not admitted."""
        now = time.monotonic()
        if self._path is not None and now - self._looked > LOOK_S:
            self._looked = now
            self._look(self._path)
        return self._known.get(key)

    def _stat(self) -> tuple[int, int]:
        try:
            found = os.stat(self._path) if self._path is not None else None
        except OSError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_ino) if found else (0, 0)

    def _look(self, path: Path) -> None:
        state = self._stat()
        if state == self._state:
            return
        try:
            keys = read_keys(path)
        except AsyncRLError as error:  # a file that is gone revokes no key
            print(f"warning: the list of keys was not read again: {error.message}", flush=True)
            self._state = state
            return
        if keys.server_public == self._server_public:
            self._known = {public.encode(): holder for public, holder in keys.known.items()}
        self._state = state

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether ZAP admits the peer."""
        return self.find(key) is not None


def start_authenticator(context: zmq.Context[Any], admission: Admission) -> Any:
    """A ZAP handler in a thread that admits only the run's keys, under a domain of its own ("*" would admit no key)."""
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("asyncrl", admission)
    return authenticator
