"""CURVE authentication of a service: which keys are admitted, and which key a message came from."""

from __future__ import annotations

import hmac
from typing import Any

import zmq

from asyncrl.net.frames import _NOBLOCK
from asyncrl.net.keys import Keys
from asyncrl.wire import Buffer


def receive_authenticated(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """Like `receive_frames`, with the public key that ZAP admitted the sender by in front."""
    frames: list[Buffer] = [b""]
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
