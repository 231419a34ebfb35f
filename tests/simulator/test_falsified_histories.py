"""Forgeries of simulated histories (the real service, killed and cut off from its store): each is found.

`tests/faults/test_forged_histories.py` does the same with a run of real processes and its archive.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from falsifier import Book, falsify, limit_of, table
from forgeries import KINDS
from sim_run import schedule

from asyncrl.audit.chain import Anchor
from asyncrl.audit.findings import Audit
from asyncrl.audit.prove import audit_file
from asyncrl.audit.verdict import Expected
from asyncrl.audit.witnesses import Checkpoint, Witnesses
from asyncrl.runtime.run_dir import RunDir

HISTORIES = 4
FEWEST_LIVES = 2  # of the service


class Run:
    """A simulated run: its history, and what its learner kept."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.world = schedule(seed)
        with contextlib.redirect_stdout(io.StringIO()):
            self.world.run()
        self.path = folder / f"{seed}.jsonl"
        self.data = b"".join(self.world.history)
        self.path.write_bytes(self.data)
        self.kept = Witnesses(RunDir(folder / "nothing"))
        for checkpoint in self.world.checkpoints.values():
            head = msgspec.json.decode(checkpoint.ledger)["history"]
            self.kept.anchors.append(Anchor(head, f"checkpoint {checkpoint.step}"))
            self.kept.checkpoints.append(Checkpoint(checkpoint.step, checkpoint.ledger, checkpoint.digests))

    def judge(self, data: bytes, anchored: bool) -> Audit:
        self.path.write_bytes(data)
        expected = Expected(allow_over_bound=self.world.may_exceed, group_size=self.world.group_size)
        return audit_file(self.path, expected=expected, witnesses=self.kept if anchored else None)

    def book(self) -> Book | None:
        """The history, if it has all that is forged; None otherwise."""
        if not self.judge(self.data, True).ok or self.data.count(b'"e":"service"') < FEWEST_LIVES:
            return None
        heads = {anchor.head for anchor in self.kept.anchors if anchor.head}
        book = Book(self.data, limit=limit_of(self.path, heads))
        return book if self.world.max_reuse == 1 and book.fresh(0).story() is not None else None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Run, Book]]:
    folder, found = tmp_path_factory.mktemp("histories"), []
    for seed in range(1, 400):
        run = Run(seed, folder)
        if (book := run.book()) is not None:
            found.append((run, book))
        if len(found) == HISTORIES:
            return found
    raise AssertionError("no histories")


def test_every_kind_of_forgery_is_found(runs: list[tuple[Run, Book]], figure: Callable[[str], None]) -> None:
    assert len(KINDS) >= 60
    results = {name: falsify(one, runs, places=2) for name, one in KINDS.items()}
    figure(table(results))
    missed = [f"{name}, {where}" for name, result in results.items() for where in result.missed]
    assert not missed, "\n".join(missed)
    assert len([name for name, result in results.items() if result.places]) >= 90
