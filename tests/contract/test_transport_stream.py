"""Transport `stream` beyond the contract: cuts, keys, flow control, relays, what is kept and for how long."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transport_rigs import CHUNK, Held, StreamRig, digests_from, run_round, wait_for

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.net.keys import write_keys
from asyncrl.net.requester import Requester
from asyncrl.wire import Fetch, Fetched, Ok
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.transports import stream
from weightsync.transports.base import TransportError
from weightsync.transports.stream import WINDOW, StreamInbox, StreamOutbox


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StreamRig]:
    rig = StreamRig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def asker(rig: StreamRig) -> Iterator[Requester]:
    asker = Requester(rig.address)
    yield asker
    asker.close()


def pieces(rig: Any) -> int:
    return sum(-(-size // CHUNK) for size in rig.sizes)


class Cutter:
    """A TCP hop that lets `after` bytes of answers through per connection, then cuts it; the last one is whole.
    `rate`: bytes per second of the answers."""

    def __init__(self, port: int, *, after: int = 0, cuts: int = 0, rate: float = 1e12) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(20)
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.port, self.after, self.cuts, self.rate = port, after, cuts, rate
        self.connections = 0
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                reader, _ = self.listener.accept()
            except OSError:
                return
            source = socket.create_connection(("127.0.0.1", self.port), timeout=60)
            self.connections += 1
            limit = self.after if self.connections <= self.cuts else 1 << 40
            threading.Thread(target=self.copy, args=(reader, source, 1 << 40), daemon=True).start()
            threading.Thread(target=self.copy, args=(source, reader, limit), daemon=True).start()

    def copy(self, a: socket.socket, b: socket.socket, limit: int) -> None:
        try:
            while limit > 0 and (data := a.recv(min(1000 if self.cuts else 16_000, limit))):
                b.sendall(data)
                time.sleep(len(data) / self.rate)
                limit -= len(data)
        except OSError:
            pass
        for one in (a, b):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()


def test_after_cuts_the_reader_goes_on_where_it_was(rig: StreamRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cuts in the middle of pieces: every byte arrives, and only what was under way is sent twice."""
    answered: list[tuple[int, int]] = []
    answer = StreamOutbox._answer

    def counted(self: StreamOutbox, call: Any) -> None:
        answered.append((call.message.blob, call.message.offset))
        answer(self, call)

    monkeypatch.setattr(StreamOutbox, "_answer", counted)
    cutter = Cutter(int(rig.address.rpartition(":")[2]), after=9000, cuts=3)
    told = msgspec.structs.replace(rig.instruction(), address=cutter.address, deadline_s=15.0)
    inbox = StreamInbox(told, chunk_bytes=CHUNK)
    assert digests_from(rig, inbox) == rig.expected()
    assert cutter.connections == 4
    assert pieces(rig) < len(answered) <= pieces(rig) + 3 * WINDOW
    assert len(set(answered)) == pieces(rig)
    cutter.close()


@pytest.mark.parametrize("rate", [1e12, 1e6], ids=["fast", "slow"])
def test_pieces_are_as_large_as_the_line_is_fast(rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line of 1 MB/s they stay small; on a fast one they grow to chunk_bytes. Nothing is sent twice."""
    sizes: list[int] = []
    answer = StreamOutbox._answer

    def counted(self: StreamOutbox, call: Any) -> None:
        sizes.append(call.message.nbytes)
        answer(self, call)

    monkeypatch.setattr(StreamOutbox, "_answer", counted)
    monkeypatch.setattr(stream, "FAST_S", 0.02 if rate < 1e9 else 5.0)  # 256 KiB take 0.26 s there
    monkeypatch.setattr(stream, "SLOW_S", 0.6 if rate < 1e9 else 10.0)
    plan = plan_buckets([TensorSpec(f"t{i}", "F32", (750_000,)) for i in range(1 if rate < 1e9 else 8)], bucket_bytes=1)
    rig = StreamRig(tmp_path, plan=plan, deadline_s=30.0)
    line = Cutter(int(rig.address.rpartition(":")[2]), rate=rate)
    told = msgspec.structs.replace(rig.instruction(), address=line.address)
    assert digests_from(rig, StreamInbox(told, chunk_bytes=2 << 20)) == rig.expected()
    assert sum(sizes) == sum(rig.sizes) and sizes[0] == 256 << 10
    assert max(sizes) == 2 << 20 if rate > 1e9 else max(sizes) <= 512 << 10
    line.close()
    rig.close()


def test_no_more_than_the_window_is_asked_for(rig: StreamRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that stands still asks for nothing; neither end holds more for it."""
    asked: list[int] = []
    answer = StreamOutbox._answer

    def counted(self: StreamOutbox, call: Any) -> None:
        asked.append(call.message.blob)
        answer(self, call)

    monkeypatch.setattr(StreamOutbox, "_answer", counted)
    inbox = rig.inbox()
    inbox.open()
    wait_for("the window", lambda: len(asked) == WINDOW)
    time.sleep(0.3)
    assert len(asked) == WINDOW
    inbox.read(0)
    first = -(-rig.sizes[0] // CHUNK)
    wait_for("the next ones", lambda: len(asked) == WINDOW + first)
    time.sleep(0.2)
    assert len(asked) == WINDOW + first
    inbox.close()


def test_keys_are_needed_beyond_loopback_and_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no keys"):
        StreamOutbox("0.0.0.0").open()

    class Keyed(StreamRig):
        def make_outbox(self) -> StreamOutbox:
            self.keys = write_keys(self.folder / "keys")
            return StreamOutbox(keys=self.keys)

    rig = Keyed(tmp_path, deadline_s=3.0)
    assert run_round(rig, 2, 1) == [rig.expected()] * 2
    others = write_keys(tmp_path / "others")
    another = msgspec.structs.replace(
        rig.keys, relay_public=others.relay_public
    )  # of the source: it is not who it says
    for keys in (None, others, another):
        started = time.monotonic()
        with pytest.raises(TransportError, match="silent"):
            digests_from(rig, StreamInbox(rig.instruction(), keys=keys))
        assert time.monotonic() - started < 30
    rig.close()


def test_what_is_not_there_is_refused_at_once(rig: StreamRig, asker: Requester) -> None:
    digest, size = rig.manifest.digest, rig.sizes[0]
    good = Fetch(digest, "", 0, 0, 10)
    packet = asker.request(good, timeout_s=60)
    assert packet.message == Fetched(0, 0, size) and packet.payloads[0].nbytes == 10
    assert asker.request(good, timeout_s=60).payloads[0] == packet.payloads[0]  # asked again
    last = asker.request(msgspec.structs.replace(good, offset=size - 4), timeout_s=60)
    assert last.payloads[0].nbytes == 4
    for changes in (
        {"digest": "e" * 32},
        {"base": "e" * 32},
        {"blob": -1},
        {"blob": 5},
        {"offset": -1},
        {"offset": size},
        {"nbytes": 0},
        {"nbytes": -5},
        {"nbytes": 1 << 40},
    ):
        with pytest.raises(AsyncRLError) as caught:
            asker.request(msgspec.structs.replace(good, **changes), timeout_s=60)
        assert caught.value.code == "sync.failed"
    with pytest.raises(AsyncRLError) as caught:
        asker.request(Ok("?"), timeout_s=60)
    assert caught.value.code == "wire.unexpected"


def test_a_version_that_is_gone_is_said_at_once(rig: StreamRig) -> None:
    old = rig.instruction()
    for _ in range(3):
        rig.publish()
    started = time.monotonic()
    with pytest.raises(TransportError, match="gone"):
        digests_from(rig, StreamInbox(old))
    assert time.monotonic() - started < rig.deadline_s


def test_a_version_is_kept_for_who_is_in_the_middle_and_no_longer(
    rig: StreamRig, asker: Requester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader stops after a piece: the slot is kept for a while, then the version may be overwritten."""
    monkeypatch.setattr(stream, "IDLE_S", 0.5)
    held, digest = rig.held, rig.manifest.digest
    asker.request(Fetch(digest, "", 0, 0, 10), timeout_s=60)
    assert held.opened - held.closed == 1
    for _ in range(3):
        rig.publish()
    asker.request(Fetch(digest, "", 1, 0, 10), timeout_s=60)  # it is in the middle
    newest = rig.held
    asker.request(Fetch(newest.manifest.digest, "", 0, 0, 10), timeout_s=60)  # another one is served meanwhile
    wait_for("its answer", lambda: newest.opened == newest.closed == 1)  # kept for no longer than that
    wait_for("the old version to be given up", lambda: held.opened == held.closed)
    with pytest.raises(AsyncRLError, match="gone"):
        asker.request(Fetch(digest, "", 1, 0, 10), timeout_s=60)
    asker.request(Fetch(newest.manifest.digest, "", 0, 0, 10), timeout_s=60)
    assert newest.opened - newest.closed == 1
    assert digests_from(rig, rig.inbox()) == rig.expected()
    wait_for("the newest to be given up", lambda: newest.opened == newest.closed)


def test_a_version_that_ends_is_not_served_any_more(rig: StreamRig, asker: Requester) -> None:
    """Its holder will write over the bytes: also who is in the middle of it is told."""
    fetch = Fetch(rig.manifest.digest, "", 0, 0, 10)
    asker.request(fetch, timeout_s=60)
    assert rig.held.opened - rig.held.closed == 1
    rig.held.ended = True
    with pytest.raises(AsyncRLError, match="gone"):
        asker.request(fetch, timeout_s=60)
    wait_for("the views to be given back", lambda: rig.held.opened == rig.held.closed)


def test_read_to_the_end_gives_the_version_up(rig: StreamRig) -> None:
    assert run_round(rig, 3, 1) == [rig.expected()] * 3
    wait_for("it to be given up", lambda: rig.held.opened == rig.held.closed, 1.5)


def test_a_member_relays_what_it_has(rig: StreamRig, tmp_path: Path) -> None:
    """The same outbox at a generator: whoever pulls from it gets the same bytes, also when the publisher is gone."""
    copy = StreamRig(tmp_path / "member")  # the same seed, so the same version in memory of its own
    assert copy.manifest == rig.manifest
    relay = StreamOutbox()
    address = relay.offer(copy.held)
    expected = rig.expected()
    rig.outbox.close()
    inbox = StreamInbox(msgspec.structs.replace(rig.instruction(), address=address, source="generator-0"))
    assert digests_from(rig, inbox) == expected
    relay.close()
    copy.close()


def test_other_sizes_than_announced_are_an_error(rig: StreamRig) -> None:
    told = rig.instruction()
    sizes = (told.manifest.bucket_bytes[0] - 4, *told.manifest.bucket_bytes[1:])
    manifest = msgspec.structs.replace(told.manifest, bucket_bytes=sizes)
    with pytest.raises(TransportError, match="bytes there"):
        digests_from(rig, StreamInbox(msgspec.structs.replace(told, manifest=manifest)))
    inbox = rig.inbox()
    inbox.open()
    with pytest.raises(TransportError, match="out of order"):
        inbox.read(1)
    inbox.close()


def test_large_blobs_by_small_and_large_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces above the size that is sent without a copy; a blob of one piece is not copied at all."""
    monkeypatch.setattr(stream, "FIRST_PIECE", 64 << 20)
    plan = plan_buckets([TensorSpec(f"t{i}", "F32", (500_000 + i,)) for i in range(4)], bucket_bytes=1 << 20)
    rig = StreamRig(tmp_path, plan=plan)
    for chunk in (300_000, 2_000_000, 4 << 20):
        inbox = StreamInbox(rig.instruction(), chunk_bytes=chunk)
        assert digests_from(rig, inbox) == rig.expected()
        assert (len(inbox._buffers[0]) == 0) == (chunk > 2_000_012)
    rig.close()


def test_open_is_once_and_close_is_for_good(rig: StreamRig) -> None:
    assert rig.outbox.open() == rig.address
    rig.outbox.close()
    rig.outbox.close()
    assert isinstance(rig.held, Held)
    assert rig.held.opened == rig.held.closed
