"""docs/operations.md is a contract: every row of its fault table has its test, and says only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config import all_keys
from asyncrl.errors import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
ROWS = {int(number): text for number, text in re.findall(r"^\| F(\d+) \| (.*) \|$", PAGE, flags=re.MULTILINE)}
PROVED = [*range(1, 11), *range(13, 27), *range(29, 32)]  # by a test of its own; the others name theirs in the row


def proofs(number: int) -> list[Path]:
    """Files with a test that carries the number of the row in its name: test_f13_..., test_f03_f04_f06_..."""
    files = (ROOT / "tests" / "faults").glob("test_f*.py")
    named = {path: re.findall(r"def test_((?:f\d\d_)+)", path.read_text()) for path in files}
    return [path for path, names in named.items() if f"f{number:02d}_" in "".join(names)]


def test_the_table_has_every_row_in_order_and_in_full() -> None:
    assert list(ROWS) == list(range(1, 32))
    assert all(len(text.split(" | ")) == 3 and all(text.split(" | ")) for text in ROWS.values())


@pytest.mark.parametrize("number", PROVED)
def test_every_row_has_its_test(number: int) -> None:
    assert proofs(number), f"no test_f{number:02d}_... in tests/faults"


@pytest.mark.parametrize("number", sorted(set(ROWS) - set(PROVED)))
def test_the_other_rows_name_a_test_that_exists(number: int) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", ROWS[number])
    assert named and all((ROOT / name).exists() for name in named)


def test_settings_that_the_page_names_exist() -> None:
    keys = set(all_keys())
    tables = {key.split(".")[0] for key in keys}
    named = [word for word in re.findall(r"`([a-z_]+\.[a-z_.]+)`", PAGE) if word.split(".")[0] in tables]
    assert len(named) > 20
    assert [word for word in named if word not in keys and word not in CATALOGUE] == []  # or error codes
