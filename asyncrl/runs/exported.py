"""The step of the weights in `RUN/export`, in a file next to that folder.

A run that is continued keeps the weights of its earlier end there until it has trained its new steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from asyncrl.runtime.run_dir import RunDir, read_object, write_atomic

FILE = "export.json"


@contextmanager
def record_step(run: RunDir, step: int, *, lead: bool) -> Iterator[None]:
    """Inside the block the weights of this step are written: the file is absent until they are whole. Of several
    processes one (`lead`) writes it.
    """
    if lead:
        (run.root / FILE).unlink(missing_ok=True)
    yield
    if lead:
        write_atomic(run.root / FILE, msgspec.json.encode({"steps": step}))


def exported_step(run: RunDir) -> int | None:
    """The step of the weights in `RUN/export`; None if there are none, or if an export of theirs was cut."""
    result = read_object(run.result)
    ended = result if "ledger" in result else {}  # what a learner wrote after its export: earlier versions had no file
    found = read_object(run.root / FILE) or ended
    return int(found["steps"]) if "steps" in found and (run.export / "config.json").exists() else None
