"""The tables of docs/learning.md are those of benchmarks/results/learning.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import learning

    page = tmp_path / "learning.md"
    page.write_text(learning.PAGE.read_text())
    monkeypatch.setattr(learning, "PAGE", page)
    learning.table(argparse.Namespace())
    assert page.read_text() == (ROOT / "docs" / "learning.md").read_text()
