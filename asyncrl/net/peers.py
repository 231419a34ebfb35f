"""The names of processes at a service, and the limits of each.

Guarantees:
1. a name belongs to the process that introduced itself with it, until it is silent for `silent_s`. A second process is
   refused and told where the first one is (`handshake.name`); the same process may come back on another connection, and
   a process whose connection is gone gives way to the next one with its key;
2. a name never passes from one key to another before that time;
3. one key has at most `MOST_NAMES` names at a time, and one name writes to the logs at most every `log_every_s`: what
   guests make up fills neither memory nor disk;
4. a process that sends what may not be trained, or returns leases without end, gets no work for a while: twice as long
   each time, `LONGEST_PAUSE_S` at most. So does a whole key, if `KEY_FAULTS` of these came with it and no good sample.
Without keys all processes share one key. Nothing here survives a restart of the service: names are claimed again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl import wire
from asyncrl.errors import HandshakeError
from asyncrl.net.responder import Call

MOST_NAMES = 1024  # of one key at a time
BEATS_PER_S = 200.0  # of all processes together: heartbeats of larger fleets come less often
LONGEST_PAUSE_S = 30.0
RETURNS, RETURNS_PER_S = 2048.0, 8.0  # leases that one key may return at once, and per second from then on
KEY_FAULTS = 4
NOBODY = ""  # the key of all processes of a run without keys


class Peer(msgspec.Struct):
    """The process that has a name."""

    key: str
    peer: bytes  # its connection
    seen: float
    process: tuple[int, str] | None = None  # pid and host, once it has said them
    logged: float = -1e9  # time of its last line in a log


class Conduct(msgspec.Struct):
    """What came from a process, or with a key."""

    faults: int = 0  # since the last good samples
    paused_until: float = 0.0
    last: float = 0.0  # time of the last fault

    def add_fault(self, now: float, forgiven: int = 0) -> None:
        self.faults, self.last = self.faults + 1, now
        if self.faults > forgiven:
            self.paused_until = now + min(LONGEST_PAUSE_S, 2.0 ** min(self.faults - forgiven - 1, 16))


def read_speaker(message: Any) -> tuple[str, str, tuple[int, str] | None]:
    """Role, name and process that a message claims; no name in messages that need none."""
    kind = type(message)
    if kind in (wire.Hello, wire.Heartbeat):
        return message.role, message.name, (message.pid, message.host)
    if kind in (wire.RewardRequest, wire.Scores, wire.TeacherLogprobs):
        return "reward", message.worker, None
    if kind is wire.MemberPoll:
        return "producer", message.member, (message.pid, message.host)
    name = getattr(message, "producer", "")
    return ("producer", name, None) if name else ("", "", None)


class Peers:
    """`silent_s`: time after which a silent process loses its name."""

    def __init__(self, *, silent_s: float, log_every_s: float = 0.5) -> None:
        self.silent_s = silent_s
        self._log_every_s = log_every_s
        self._peers: dict[tuple[str, str], Peer] = {}
        self._names: dict[str, int] = {}  # key -> number of its names
        self._returns: dict[str, tuple[float, float]] = {}  # key -> returns that are left, at a time
        self._conduct: dict[tuple[str, str, str], Conduct] = {}  # role, name and key; of a key: without role and name

    def admit(self, call: Call, now: float) -> None:
        """Check the name that a request claims, and record a sign of life. Raises `handshake.name`."""
        role, name, process = read_speaker(call.message)
        if not name or role == "learner":  # the lock and the epoch of the run protect the learner
            return
        key = call.holder.name if call.holder is not None else NOBODY
        peer = self._peers.get((role, name))
        if peer is None:
            self._add(role, name, Peer(key, call.peer, now, process), now)
            return
        if peer.key != key:
            if now - peer.seen <= self.silent_s:
                raise self._name_error(role, name, peer)
            self._remove(role, name)
            self._add(role, name, Peer(key, call.peer, now, process), now)
            return
        other = process is not None and peer.process not in (None, process) and call.peer != peer.peer
        if other and now - peer.seen <= self.silent_s and call.reaches(peer.peer):
            raise self._name_error(role, name, peer)
        peer.peer, peer.seen, peer.process = call.peer, now, process or peer.process

    def _add(self, role: str, name: str, peer: Peer, now: float) -> None:
        if self._names.get(peer.key, 0) >= MOST_NAMES:
            self.expire(now)
        if self._names.get(peer.key, 0) >= MOST_NAMES:
            who = f"key {peer.key}" if peer.key else "this run"
            raise HandshakeError("handshake.name", f"{who} has {MOST_NAMES} names already and asks for {name}")
        self._peers[role, name] = peer
        self._names[peer.key] = self._names.get(peer.key, 0) + 1

    def _remove(self, role: str, name: str) -> None:
        peer = self._peers.pop((role, name))
        self._names[peer.key] -= 1
        if not self._names[peer.key]:
            del self._names[peer.key]

    def expire(self, now: float) -> None:
        """Free the names of processes that are silent for too long."""
        for role, name in [place for place, peer in self._peers.items() if now - peer.seen > self.silent_s]:
            self._remove(role, name)
        for place, conduct in list(self._conduct.items()):
            if now - max(conduct.paused_until, conduct.last) > self.silent_s:
                del self._conduct[place]

    def _name_error(self, role: str, name: str, peer: Peer) -> HandshakeError:
        pid, host = peer.process or (0, "")
        place = f"pid {pid} on {host}" if host else "another process"
        key = f" with key {peer.key}" if peer.key else ""
        return HandshakeError("handshake.name", f"the {role} name {name} belongs to {place}{key}")

    # ------------------------------------------------------------ limits

    def interval_s(self, longest_s: float) -> float:
        """The interval of heartbeats at which all processes together send `BEATS_PER_S`; at most `longest_s`."""
        return min(len(self._peers) / BEATS_PER_S, longest_s)

    def may_log(self, role: str, name: str, now: float) -> bool:
        """Whether this name may write a line to a log now."""
        peer = self._peers.get((role, name))
        if peer is None or now - peer.logged < self._log_every_s:
            return False
        peer.logged = now
        return True

    def pause(self, role: str, name: str, now: float) -> None:
        """The process sent something that may not be used: no work for a while."""
        peer = self._peers.get((role, name))
        if peer is None:
            return
        self._conduct.setdefault((role, name, peer.key), Conduct()).add_fault(now)
        if peer.key != NOBODY:
            self._conduct.setdefault(("", "", peer.key), Conduct()).add_fault(now, forgiven=KEY_FAULTS - 1)

    def note_good(self, role: str, name: str) -> None:
        """Its samples were accepted."""
        peer = self._peers.get((role, name))
        if self._conduct and peer is not None:
            self._conduct.pop((role, name, peer.key), None)
            self._conduct.pop(("", "", peer.key), None)

    def note_returned(self, call: Call, count: int, now: float) -> None:
        """The process returned leases. If its key returned too many, it pauses."""
        role, name, _ = read_speaker(call.message)
        peer = self._peers.get((role, name))
        if peer is None:
            return
        left, since = self._returns.get(peer.key, (RETURNS, now))
        left = min(RETURNS, left + (now - since) * RETURNS_PER_S) - count
        self._returns[peer.key] = (max(left, -RETURNS), now)
        if left < 0:
            self.pause(role, name, now)

    def paused_s(self, role: str, name: str, now: float) -> float:
        """Seconds for which the process gets no work; 0: it may have some."""
        peer = self._peers.get((role, name))
        if not self._conduct or peer is None:
            return 0.0
        found = (self._conduct.get(place) for place in ((role, name, peer.key), ("", "", peer.key)))
        return max((0.0, *(one.paused_until - now for one in found if one is not None)))
