"""The report of a run: one self-contained HTML file. For several runs: one page that compares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.runtime.run_dir import RunDir, write_atomic

COMPARISON = "comparison.html"


def write_report(run: RunDir, *, out: Path | None = None) -> Path:
    """Write the report of a run; its path."""
    from asyncrl.report.data import load_run
    from asyncrl.report.page import page

    target = out or run.report
    write_atomic(target, page(load_run(run)).encode())
    return target


def write_comparison(runs: Sequence[RunDir], *, out: Path | None = None) -> Path:
    """Write the page that compares these runs; its path."""
    from asyncrl.report.compare import comparison
    from asyncrl.report.data import load_run

    target = out or Path(COMPARISON)
    write_atomic(target, comparison([load_run(run) for run in runs]).encode())
    return target
