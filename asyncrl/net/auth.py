"""CURVE authentication of a service: which keys are admitted, which key a message came from, and what it may send.

Guarantee: the holder of a join key cannot take over the learner, train or drop groups, change settings, end the run, or
announce weights.
"""

from __future__ import annotations

import hmac
from typing import Any

import zmq

from asyncrl import wire
from asyncrl.net.frames import _NOBLOCK
from asyncrl.net.keys import Keys


def receive_authenticated(socket: zmq.Socket[bytes]) -> list[wire.Buffer]:
    """Like `receive_frames`, with the public key that ZAP admitted the sender by in front."""
    frames: list[wire.Buffer] = [b""]
    while True:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.buffer)
        if not frame.more:
            frames[0] = str(frame.get("User-Id")).encode()
            return frames


class _Admission:
    """Answers ZAP from memory, because a folder of keys would outlive a killed process."""

    def __init__(self, keys: Keys) -> None:
        self._known = [public.encode() for public in keys.known]

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the peer holds one of the run's keys."""
        return any(hmac.compare_digest(key, public) for public in self._known)


def start_authenticator(context: zmq.Context[Any], keys: Keys) -> Any:
    """A ZAP handler in a thread that admits only the run's keys, under a domain of its own ("*" would admit no key)."""
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("asyncrl", _Admission(keys))
    return authenticator


#: Messages of the learner, and of commands that change or end a run.
OWNER_ALONE: frozenset[type] = frozenset(
    {
        wire.Stop,
        wire.Tune,
        wire.Register,
        wire.Claim,
        wire.Commit,
        wire.Quarantine,
        wire.LedgerRequest,
        wire.Checkpointed,
        wire.Goodbye,
        wire.EvaluationsRequest,
        wire.Publish,
        wire.RoundRequest,
    }
)


def needs_owner(message: wire.Message) -> bool:
    """Whether only the owner may send this message. A `Hello` of the learner needs the owner's key too.

    >>> [needs_owner(wire.Hello(role, "x", 1, "h", "", "")) for role in ("learner", "producer")]
    [True, False]
    """
    if isinstance(message, (wire.Hello, wire.Heartbeat)):
        return message.role == "learner"
    return type(message) in OWNER_ALONE
