"""Slots stay mapped from round to round, and are let go with their files."""

from pathlib import Path

import pytest

from weightsync.staging import MOST_SLOTS
from weightsync.transports.base import TransportUnusable
from weightsync.transports.shared_memory import Maps


def mapped(folder: Path) -> int:
    """Maps of files below the folder that this process has."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_slot_is_mapped_once_and_shows_what_is_written_to_it(tmp_path: Path) -> None:
    maps, slot = Maps(), tmp_path / "asyncrl-1"
    slot.write_bytes(b"a" * 9000)
    first = maps.view(slot, 9000)
    with slot.open("r+b") as file:
        file.write(b"b" * 10)
    assert maps.view(slot, 9000) is first and bytes(first[:11]) == b"b" * 10 + b"a"
    assert mapped(tmp_path) == 1
    assert maps.view(slot, 5000).nbytes == 5000, "another layout of the same file"
    with pytest.raises(TransportUnusable, match="smaller"):
        maps.view(slot, 9001)


def test_removed_and_replaced_slots_are_unmapped(tmp_path: Path) -> None:
    maps, old, new = Maps(), tmp_path / "asyncrl-1", tmp_path / "asyncrl-2"
    old.write_bytes(b"a" * 5000)
    new.write_bytes(b"n" * 5000)
    view = maps.view(old, 5000)
    old.unlink()
    maps.view(new, 5000)
    assert mapped(tmp_path) == 2 and bytes(view[:1]) == b"a", "who still reads it keeps it"
    del view
    assert mapped(tmp_path) == 1
    new.unlink()
    new.write_bytes(b"x" * 5000)
    assert bytes(maps.view(new, 5000)[:1]) == b"x", "another file under the same name"
    assert mapped(tmp_path) == 1
    for number in range(MOST_SLOTS + 3):
        path = tmp_path / f"asyncrl-more-{number}"
        path.write_bytes(b"m" * 5000)
        maps.view(path, 5000)
    assert mapped(tmp_path) == MOST_SLOTS
