"""The report of a run: one HTML file that needs nothing else.

Called by `asyncrl report` and at the end of `asyncrl launch`. Guarantees: see `asyncrl.report.html`.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.rundir import RunDir, write_atomic


def write_report(run: RunDir, *, out: Path | None = None) -> Path:
    """Write the report of a run; its path."""
    from asyncrl.report.data import load_run
    from asyncrl.report.html import page

    target = out or run.report
    write_atomic(target, page(load_run(run)).encode())
    return target
