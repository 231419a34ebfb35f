"""The history file: the lines of the store's row stand in it exactly once, whatever was cut, however old the row is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buffers.service.event_log import History

OLD, NEW = b'{"n":1}\n{"n":2}\n', b'{"n":3}\n{"n":4}\n'


@pytest.mark.parametrize(
    ("there", "row"),
    [(b"", NEW), (OLD, NEW), (OLD + NEW, NEW), (OLD + NEW[:11], NEW), (OLD + NEW[:8], NEW), (OLD + NEW[:3], NEW)],
)
def test_the_lines_of_the_row_are_there_once(tmp_path: Path, there: bytes, row: bytes) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(there)
    history = History(path, last=row)
    history.close()
    assert not history.went_back
    assert path.read_bytes() == (OLD if there.startswith(OLD) else b"") + NEW


def test_a_store_that_went_back_is_noticed_and_does_not_repeat_itself(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(OLD + NEW)
    history = History(path, last=OLD)
    history.close()
    assert history.went_back
    assert path.read_bytes() == OLD + NEW


def test_a_large_drain_that_a_kill_cut_is_completed_and_not_repeated(tmp_path: Path) -> None:
    """Longer than what is looked at of the file's end, and cut in the middle of a line."""
    row = b"".join(b'{"n":%d,"text":"%s"}\n' % (number, b"x" * 1000) for number in range(2500))
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"before\n" + row[: 2 * len(row) // 3])
    History(path, last=row).close()
    assert path.read_bytes() == b"before\n" + row
    History(path, last=row).close()
    assert path.read_bytes() == b"before\n" + row


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is nearly full, or a signal: the kernel takes a part, and says so by its count alone."""
    path, whole = tmp_path / "history.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda file, data: whole(file, bytes(data)[:5]))
    history = History(path, last=b"in the row\n")
    history.write(b"first line\nsecond line\n")
    history.close()
    assert path.read_bytes() == b"in the row\nfirst line\nsecond line\n"


def test_a_service_that_was_stopped_writes_nothing_new(tmp_path: Path) -> None:
    """Its lines are in the store; another service has written them, and its own after them."""
    path = tmp_path / "history.jsonl"
    stopped = History(path)
    stopped.write(OLD)
    other = History(path, last=NEW)
    other.write(b'{"n":5}\n')
    stopped.write(NEW)
    stopped.close()
    other.write(b'{"n":6}\n')
    other.close()
    assert path.read_bytes() == OLD + NEW + b'{"n":5}\n{"n":6}\n'
