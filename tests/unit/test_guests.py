"""Files of producers as the service keeps them: who may write them over, and when they go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asyncrl.errors import WireError
from asyncrl.wire import Place
from buffers.client.place_writer import FAILURES, PlaceWriter
from buffers.groups.records import Record
from buffers.payloads.producer_files import STRANGE_S, Guests
from buffers.payloads.record_format import GUEST, HEAD, SPARE_BYTES, segment_path
from buffers.payloads.segments import Segments

LIMIT = 1 << 20
FILE_BYTES = 3000


def guests(
    folder: Path, live: tuple[Record, ...] = (), file_bytes: int = FILE_BYTES, fsync: str = "everysec"
) -> Guests:
    return Guests(folder, file_bytes=file_bytes, fsync=fsync, live=live)


def put(writer: PlaceWriter, number: int, size: int = 1000) -> Place:
    place = writer.write(f"h{number}".encode(), bytes([number % 251]) * size)
    assert place is not None
    return place


def take(held: Guests, name: str, place: Place) -> Record:
    held.read(name, place, max_bytes=LIMIT)
    return held.adopt(place)


def names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_what_was_written_is_read_and_only_that(tmp_path: Path) -> None:
    held, writer = guests(tmp_path), PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
    for number in range(5):
        place = put(writer, number)
        header, payload = held.read("p", place, max_bytes=LIMIT)
        assert (bytes(header), bytes(payload)) == (f"h{number}".encode(), bytes([number]) * 1000)
    for wrong in (place.offset + 1, place.offset + FILE_BYTES):
        with pytest.raises(WireError, match="something else") as error:
            held.read("p", Place(place.segment, wrong, 2, 1000, place.checksum), max_bytes=LIMIT)
        assert error.value.code == "wire.place"
    with pytest.raises(WireError, match="payload") as error:
        held.read("p", place, max_bytes=999)
    assert error.value.code == "wire.size"
    held.close()


def test_a_large_record_has_a_file_of_its_own(tmp_path: Path) -> None:
    held, writer = guests(tmp_path), PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
    small, large, after = put(writer, 1), put(writer, 2, 5 << 20), put(writer, 3)
    assert small.segment < large.segment < after.segment and large.offset == 0
    _, payload = held.read("p", large, max_bytes=1 << 30)
    assert payload.nbytes == 5 << 20 and payload[-1] == 2
    os.truncate(segment_path(tmp_path, large.segment), 1000)
    with pytest.raises(WireError, match="ends before"):
        held.read("p", large, max_bytes=1 << 30)
    held.close()


def test_a_free_file_goes_back_to_its_writer_alone(tmp_path: Path) -> None:
    held, one, two = guests(tmp_path), PlaceWriter(tmp_path, file_bytes=1500), PlaceWriter(tmp_path, file_bytes=1500)
    first, other = take(held, "one", put(one, 1)), take(held, "two", put(two, 1))
    inode = segment_path(tmp_path, first.segment).stat().st_ino
    held.release(first)
    assert names(tmp_path) == [".seg", ".seg"]  # one may still append to it
    second = take(held, "one", put(one, 2))  # a file each: now the first is full and free
    assert names(tmp_path) == [".free", ".seg", ".seg"]
    more = take(held, "two", put(two, 2))
    assert names(tmp_path).count(".free") == 1  # it is not two's
    third = take(held, "one", put(one, 3))
    assert names(tmp_path).count(".free") == 0
    assert segment_path(tmp_path, third.segment).stat().st_ino == inode
    header, _ = held.read("one", Place(third.segment, 0, 2, 1000, third.checksum), max_bytes=LIMIT)
    assert bytes(header) == b"h3"
    with pytest.raises(WireError):
        held.read("one", Place(third.segment, 0, 2, 1000, first.checksum), max_bytes=LIMIT)
    for record in (second, third, other, more):
        held.release(record)
    held.close()
    assert names(tmp_path) == []


def test_free_files_are_bounded(tmp_path: Path) -> None:
    held, writer = guests(tmp_path, file_bytes=SPARE_BYTES // 3), PlaceWriter(tmp_path, file_bytes=100)
    records = [take(held, "p", put(writer, number)) for number in range(9)]
    for record in records:
        held.release(record)
    assert names(tmp_path) == [".free"] * 3 + [".seg"]
    held.close()


def test_a_new_life_of_a_producer_ends_the_one_before(tmp_path: Path) -> None:
    held, old, new = guests(tmp_path), PlaceWriter(tmp_path, file_bytes=1500), PlaceWriter(tmp_path, file_bytes=1500)
    gone, lives = take(held, "p", put(old, 1)), take(held, "p", put(old, 2))
    held.release(gone)
    put(old, 3)  # written, and never said
    take(held, "p", put(new, 1))
    assert segment_path(tmp_path, lives.segment).exists() and names(tmp_path) == [".seg", ".seg"]
    held.release(lives)
    assert not segment_path(tmp_path, lives.segment).exists()  # nobody is there to write it over
    with pytest.raises(WireError):
        held.read("p", Place(lives.segment, 0, 2, 1000, lives.checksum), max_bytes=LIMIT)
    held.close()


def test_files_of_the_silent_go(tmp_path: Path) -> None:
    held, writer = guests(tmp_path), PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
    held.release(take(held, "p", put(writer, 1)))
    held.keep_only({"p", "q"})
    assert names(tmp_path) == [".seg"]
    held.keep_only({"q"})
    assert names(tmp_path) == []
    writer._file = os.open(tmp_path / "elsewhere", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(WireError):
        held.read("p", put(writer, 2), max_bytes=LIMIT)  # it comes back, and its file has gone
    held.close()


def test_files_of_strangers_go_when_they_are_old(tmp_path: Path) -> None:
    held, dead = guests(tmp_path), PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
    young, old = PlaceWriter(tmp_path, file_bytes=FILE_BYTES), put(dead, 1)
    os.utime(segment_path(tmp_path, old.segment), times=(0, time.time() - STRANGE_S - 5))
    fresh = put(young, 1)
    take(held, "somebody", put(PlaceWriter(tmp_path, file_bytes=FILE_BYTES), 1))
    assert not segment_path(tmp_path, old.segment).exists() and segment_path(tmp_path, fresh.segment).exists()
    held.close()


def test_a_start_keeps_what_lives_and_finds_what_is_torn(tmp_path: Path) -> None:
    options = {"segment_bytes": 3000, "cache_bytes": 0}
    segments = Segments(tmp_path, **options)  # type: ignore[arg-type]
    writer = PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
    places = [put(writer, number) for number in range(6)]
    records = [take(segments.guests, "p", place) for place in places]
    orphan = put(PlaceWriter(tmp_path, file_bytes=FILE_BYTES), 7)
    with segment_path(tmp_path, records[5].segment).open("r+b") as file:
        file.seek(records[5].offset + HEAD.size + 100)
        file.write(b"!")
    os.truncate(segment_path(tmp_path, records[1].segment), records[1].offset + 10)
    again = Segments(tmp_path, live=records, **options)  # type: ignore[arg-type]
    assert set(again.damaged) == {records[1], records[5]}
    assert not segment_path(tmp_path, orphan.segment).exists()
    for number in (0, 2, 3, 4):
        assert bytes(again.read(records[number])[0]) == f"h{number}".encode()
    again.release([records[1]])  # damaged, and released like any other
    assert bytes(again.read(records[0])[0]) == b"h0"
    again.release(records[:1] + records[2:])
    again.close()
    segments.guests._files.clear()
    assert names(tmp_path) == [""]  # the nonce


def test_a_writer_gives_up_and_starts_anew(tmp_path: Path) -> None:
    writer = PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
    places = [put(writer, number, 100) for number in range(3)]
    for place in places:
        writer.reject(place)  # all of one file: one failure
    assert put(writer, 4).segment == places[0].segment + 1
    for _ in range(FAILURES - 1):
        last = put(writer, 5)
        writer.reject(last)
    assert writer.write(b"h", b"x") is None
    writer.confirm()
    assert writer.write(b"h", b"x") is not None
    assert last.segment // GUEST == places[0].segment // GUEST
    writer.close()


def test_always_is_synced_before_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for fsync, by_flush, by_sync in (("always", 1, 0), ("everysec", 0, 1), ("never", 0, 0)):
        held, writer = guests(tmp_path, fsync=fsync), PlaceWriter(tmp_path, file_bytes=FILE_BYTES)
        record = take(held, "p", put(writer, 1))
        take(held, "p", put(writer, 2))
        synced.clear()
        held.flush()
        assert len(synced) == by_flush
        held.sync()
        assert len(synced) == by_flush + by_sync
        held.sync()
        assert len(synced) == by_flush + by_sync
        held.release(record)
        held.close()


def test_a_file_that_is_freed_while_it_is_to_be_synced(tmp_path: Path) -> None:
    """`sync` runs on another thread: between its look at what is dirty and its taking, the service frees the file."""

    class FreedMeanwhile(dict[int, None]):
        def popitem(self) -> tuple[int, None]:
            self.clear()
            return super().popitem()

    held = guests(tmp_path, fsync="everysec")
    held._dirty = FreedMeanwhile({GUEST + 1: None})
    held.sync()
    assert not held._dirty
