"""Segment files: what was flushed is read back, damage is found, space returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import AsyncRLError
from buffers.groups.records import Record
from buffers.payloads.record_format import HEAD, checksum_of
from buffers.payloads.segments import Segments


def make(folder: Path, **changes: Any) -> Segments:
    options: dict[str, Any] = {"segment_bytes": 4096, "cache_bytes": 0}
    return Segments(folder, **{**options, **changes})


def put(segments: Segments, number: int, size: int = 500) -> Record:
    header, payload = f"h{number}".encode(), bytes([number % 251]) * size
    return segments.append(header, payload, checksum_of(header, payload))


def got(segments: Segments, record: Record) -> tuple[bytes, bytes]:
    header, payload = segments.read(record)
    return bytes(header), bytes(payload)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.seg"))


@pytest.mark.parametrize("fsync", ["never", "everysec", "always"])
@pytest.mark.parametrize("cache_bytes", [0, 1200, 1 << 20])
def test_written_is_read_back(tmp_path: Path, fsync: str, cache_bytes: int) -> None:
    segments = make(tmp_path, fsync=fsync, cache_bytes=cache_bytes)
    records = [put(segments, number) for number in range(20)]
    assert got(segments, records[19]) == (b"h19", bytes([19]) * 500)  # before its flush
    segments.flush()
    for number, record in enumerate(records):
        assert got(segments, record) == (f"h{number}".encode(), bytes([number]) * 500)
    segments.close()
    again = make(tmp_path, live=records)
    assert not again.damaged and not again.report
    assert [got(again, record)[0] for record in records] == [f"h{n}".encode() for n in range(20)]
    again.close()


def test_rotation_and_release(tmp_path: Path) -> None:
    segments = make(tmp_path)
    records = [put(segments, number, 1500) for number in range(6)]
    segments.flush()
    assert files(tmp_path) == ["00000001.seg", "00000002.seg", "00000003.seg"]
    segments.release(records[:1])
    assert "00000001.seg" in files(tmp_path)
    segments.release(records[1:4])
    assert files(tmp_path) == ["00000003.seg"]
    more = [put(segments, number, 1500) for number in range(6, 10)]  # a free file is used again
    segments.flush()
    assert [got(segments, record)[0] for record in records[4:] + more] == [f"h{n}".encode() for n in range(4, 10)]
    segments.close()
    again = make(tmp_path, live=records[4:] + more)
    assert not again.damaged
    again.close()


def test_a_tail_that_was_never_indexed_is_cut_and_reported(tmp_path: Path) -> None:
    segments = make(tmp_path, segment_bytes=1 << 20)
    known = put(segments, 1)
    segments.flush()
    put(segments, 2)
    segments.flush()  # and now a kill: nothing is closed
    again = make(tmp_path, segment_bytes=1 << 20, live=[known])
    assert again.report == [f"records without an index entry were cut off 00000001.seg at {HEAD.size + 502}"]
    assert (tmp_path / "00000001.seg").stat().st_size == HEAD.size + 502
    assert got(again, known)[0] == b"h1" and not again.damaged
    put(again, 3)
    again.flush()
    again.close()


def test_space_allocated_ahead_is_no_torn_tail(tmp_path: Path) -> None:
    segments = make(tmp_path, segment_bytes=1 << 20)
    known = put(segments, 1)
    segments.flush()
    assert (tmp_path / "00000001.seg").stat().st_size > 10_000
    assert make(tmp_path, segment_bytes=1 << 20, live=[known]).report == []


def test_damage_is_found(tmp_path: Path) -> None:
    segments = make(tmp_path, segment_bytes=1 << 20)
    records = [put(segments, number) for number in range(3)]
    segments.flush()
    segments.close()
    path = tmp_path / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[records[1].offset + HEAD.size + 100] ^= 1
    path.write_bytes(data)
    os.truncate(path, len(data) - 1)  # the last record is torn
    again = make(tmp_path, live=records)
    assert set(again.damaged) == {records[1], records[2]}
    with pytest.raises(AsyncRLError, match="damaged"):
        again.read(records[1])
    assert got(again, records[0])[0] == b"h0"


def test_a_missing_file_is_damage_not_a_crash(tmp_path: Path) -> None:
    record = Record(7, 0, 1, 1, 1)
    assert make(tmp_path, live=[record]).damaged == [record]


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    segments = make(tmp_path, segment_bytes=1 << 20, cache_bytes=1100)
    records = [put(segments, number) for number in range(5)]
    segments.flush()
    assert segments._cached <= 1100 and len(segments._cache) == 2
    for record in records:
        segments.read(record)
        assert segments._cached <= 1100
    segments.release(records)
    assert segments._cached == 0
    segments.close()
    assert files(tmp_path) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = make(tmp_path)
    put(segments, 1)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(AsyncRLError) as error:
        segments.flush()
    assert error.value.code == "disk.full" and error.value.exit_code == 69


def test_damaged_records_that_are_released_cost_no_other_file(tmp_path: Path) -> None:
    """An older index names records of files that are gone: new files get other numbers, and keep their records."""
    segments = make(tmp_path)
    records = [put(segments, number, 1500) for number in range(6)]
    segments.flush()
    segments.close()
    for name in files(tmp_path)[1:]:
        (tmp_path / name).unlink()
    again = make(tmp_path, live=records)
    assert again.damaged == records[2:]
    fresh = [put(again, number, 1500) for number in range(10, 16)]
    again.flush()
    again.release(records[2:])
    assert [got(again, record)[0] for record in fresh] == [f"h{number}".encode() for number in range(10, 16)]
    again.close()
    last = make(tmp_path, live=[*records[:2], *fresh])
    assert not last.damaged
    last.close()


def test_a_fenced_service_reaches_no_record_of_its_successor(tmp_path: Path) -> None:
    """It was stopped, and writes and rotates once more from its memory, after a stand-by has begun in its folder."""
    fenced = make(tmp_path, apart=True)
    before = [put(fenced, number, 1500) for number in range(3)]
    fenced.flush()
    live = make(tmp_path, apart=True, live=before)
    assert not live.damaged
    records = [put(live, number, 1500) for number in range(10, 12)]
    live.flush()
    live.release(before)
    for number in range(20, 26):
        put(fenced, number, 1500)
    fenced.flush()
    records += [put(live, number, 1500) for number in range(12, 18)]
    live.flush()
    for number, record in enumerate(records, start=10):
        assert got(live, record) == (f"h{number}".encode(), bytes([number]) * 1500)
    live.close()
    again = make(tmp_path, apart=True, live=records)
    assert not again.damaged
    again.close()
