"""The history file: the lines of the store's row stand in it exactly once, whatever was cut, however old the row is."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffers.history import History

OLD, NEW = b'{"n":1}\n{"n":2}\n', b'{"n":3}\n{"n":4}\n'


@pytest.mark.parametrize(
    ("there", "row"),
    [(b"", NEW), (OLD, NEW), (OLD + NEW, NEW), (OLD + NEW[:11], NEW), (OLD + NEW[:8], NEW), (OLD + NEW[:3], NEW)],
)
def test_the_lines_of_the_row_are_there_once(tmp_path: Path, there: bytes, row: bytes) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(there)
    History(path, last=row).close()
    assert path.read_bytes() == (OLD if there.startswith(OLD) else b"") + NEW


def test_a_store_that_went_back_does_not_repeat_itself(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(OLD + NEW)
    History(path, last=OLD).close()
    assert path.read_bytes() == OLD + NEW
