"""Names at a service: whose they are, what a second process gets, and the limits of a key."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl import wire
from asyncrl.errors import HandshakeError
from asyncrl.net import peers as names
from asyncrl.net.keys import Holder
from asyncrl.net.peers import Peers


class Call:
    """A request of a process: its connection, its key, and who is still connected."""

    connected: set[bytes] = set()

    def __init__(self, message: Any, *, peer: bytes = b"1", key: str = "") -> None:
        self.message = message
        self.peer = peer
        self.holder = Holder(key, "producer") if key else None
        self.connected.add(peer)

    def reaches(self, peer: bytes) -> bool:
        return peer in self.connected


@pytest.fixture(autouse=True)
def nobody_connected() -> None:
    Call.connected = set()


def hello(name: str, pid: int = 1, **more: Any) -> Any:
    return Call(wire.Hello("producer", name, pid, "host"), **more)


def lease(name: str, **more: Any) -> Any:
    return Call(wire.LeaseRequest(name, 0, 1, 0.0), **more)


def test_a_second_process_is_told_where_the_first_one_is() -> None:
    peers = Peers(silent_s=10)
    peers.admit(hello("p", pid=7, peer=b"a"), 0.0)
    with pytest.raises(HandshakeError, match="the producer name p belongs to pid 7 on host"):
        peers.admit(hello("p", pid=8, peer=b"b"), 1.0)
    peers.admit(hello("p", pid=7, peer=b"c"), 2.0)  # the same process on another connection
    peers.admit(Call(wire.Hello("reward", "p", 9, "host"), peer=b"d"), 3.0)  # roles have names of their own
    peers.admit(hello("p", pid=8, peer=b"b"), 12.1)  # it was silent


def test_a_process_that_is_gone_gives_way_at_once() -> None:
    peers = Peers(silent_s=10)
    peers.admit(hello("p", pid=7, peer=b"a"), 0.0)
    Call.connected.discard(b"a")
    peers.admit(hello("p", pid=8, peer=b"b"), 0.1)
    with pytest.raises(HandshakeError, match="pid 8"):
        peers.admit(hello("p", pid=7, peer=b"c"), 0.2)


def test_a_name_passes_to_another_key_only_after_silence() -> None:
    peers = Peers(silent_s=10)
    peers.admit(hello("p", pid=7, peer=b"a", key="lab-a"), 0.0)
    Call.connected.discard(b"a")
    for thief in (hello("p", pid=7, peer=b"b", key="lab-b"), lease("p", peer=b"b", key="lab-b")):
        with pytest.raises(HandshakeError, match="with key lab-a"):
            peers.admit(thief, 9.0)
    peers.admit(lease("p", peer=b"c", key="lab-a"), 9.5)  # it was reconnecting
    with pytest.raises(HandshakeError):
        peers.admit(hello("p", peer=b"b", key="lab-b"), 19.0)
    peers.admit(hello("p", peer=b"b", key="lab-b"), 19.6)


def test_one_key_has_a_limited_number_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MOST_NAMES", 5)
    peers = Peers(silent_s=10)
    for number in range(5):
        peers.admit(hello(f"p{number}", key="lab-a"), 0.0)
    with pytest.raises(HandshakeError, match="key lab-a has 5 names already"):
        peers.admit(hello("p5", key="lab-a"), 1.0)
    peers.admit(hello("q", key="lab-b"), 1.0)
    peers.admit(hello("p5", key="lab-a"), 10.1)  # those are silent by now
    peers.expire(30.0)
    assert not peers._peers and not peers._names


def test_a_name_writes_to_the_logs_at_a_limited_rate() -> None:
    peers = Peers(silent_s=10, log_every_s=0.5)
    peers.admit(hello("p"), 0.0)
    assert [peers.may_log("producer", "p", at) for at in (0.0, 0.1, 0.4, 0.6, 1.2)] == [True, False, False, True, True]
    assert not peers.may_log("producer", "unknown", 2.0)


def test_whoever_sends_what_cannot_be_trained_pauses_for_longer_each_time() -> None:
    peers = Peers(silent_s=10)
    peers.admit(hello("p", key="lab-a"), 0.0)
    pauses = []
    for _ in range(3):
        peers.pause("producer", "p", 0.0)
        pauses.append(peers.paused_s("producer", "p", 0.0))
    assert pauses == [1.0, 2.0, 4.0] and peers.paused_s("producer", "p", 4.1) == 0.0
    for _ in range(20):
        peers.pause("producer", "p", 0.0)
    assert peers.paused_s("producer", "p", 0.0) == names.LONGEST_PAUSE_S
    peers.note_good("producer", "p")
    assert peers.paused_s("producer", "p", 0.0) == 0.0


def test_other_names_of_the_key_pause_too_unless_one_of_them_is_good() -> None:
    peers = Peers(silent_s=10)
    for number in range(names.KEY_FAULTS + 1):
        peers.admit(hello(f"p{number}", key="lab-a"), 0.0)
    peers.admit(hello("q", key="lab-b"), 0.0)
    for number in range(names.KEY_FAULTS):
        assert not peers.paused_s("producer", f"p{names.KEY_FAULTS}", 0.0)
        peers.pause("producer", f"p{number}", 0.0)
    assert peers.paused_s("producer", f"p{names.KEY_FAULTS}", 0.0) > 0 == peers.paused_s("producer", "q", 0.0)
    peers.note_good("producer", f"p{names.KEY_FAULTS}")
    assert not peers.paused_s("producer", f"p{names.KEY_FAULTS}", 0.0)


def test_a_key_that_takes_a_new_name_for_each_fault_is_paused() -> None:
    """Once a second, with the removal of what is old as often, on a host that is up for long."""
    peers, start = Peers(silent_s=10), 1e6
    for number in range(names.KEY_FAULTS):
        peers.admit(hello(f"p{number}", key="lab-a"), start + number)
        peers.pause("producer", f"p{number}", start + number)
        peers.expire(start + number)
    peers.admit(hello("new", key="lab-a"), start + number)
    assert peers.paused_s("producer", "new", start + number) > 0
    peers.expire(start + 100)
    assert not peers.paused_s("producer", "new", start + 100)


def test_returning_leases_without_end_makes_a_pause() -> None:
    peers = Peers(silent_s=10)
    peers.admit(hello("p", key="lab-a"), 0.0)
    returned = Call(wire.LeaseReturn("p", ((1, 1),), "stop"), key="lab-a")
    peers.note_returned(returned, int(names.RETURNS), 0.0)
    assert not peers.paused_s("producer", "p", 0.0)
    peers.note_returned(returned, 1, 0.0)
    assert peers.paused_s("producer", "p", 0.0)
    peers.note_returned(returned, 1, 10.0)
    assert not peers.paused_s("producer", "p", 10.0)


def test_a_large_fleet_sends_heartbeats_less_often() -> None:
    peers = Peers(silent_s=30.0)
    for number in range(100):
        peers.admit(hello(f"p{number}", pid=number, peer=b"%d" % number), 0.0)
    assert peers.interval_s(5.0) == pytest.approx(100 / names.BEATS_PER_S)
    for number in range(100, 1000):
        peers.admit(hello(f"p{number}", pid=number, peer=b"%d" % number), 0.0)
    assert peers.interval_s(5.0) == pytest.approx(5.0), "never longer than a living process may be silent"
    peers.expire(31.0)
    assert peers.interval_s(5.0) == 0.0
