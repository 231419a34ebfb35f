"""A call of the state machine is applied as a whole or not at all.

Every call that the search makes is also made on a twin whose transaction raises at its n-th edit, for every n. The
twin is lost, as a service with an internal error is; a machine that is loaded from the rows of before makes the same
call with the same result. A call that is refused edits nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import model_world
import msgspec
import pytest
from model_search import search
from model_world import Case

from asyncrl.errors import AsyncRLError
from buffers.groups.machine import GroupMachine, Parts
from buffers.groups.transaction import Edit, Rows, Table, Transaction

CALLS = [
    "lease",
    "samples",
    "pieces",
    "scores",
    "reward_lease",
    "give_back",
    "tick",
    "hello",
    "register",
    "claim",
    "commit",
    "tune",
]
CASES = (
    Case(batch=1, size=2, eta=1, depth=1, producers=2, returns=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=1, restarts=True, unsaved=2),
    Case(batch=1, size=1, eta=1, depth=1, producers=1, scored=True, judges=2),
    Case(batch=1, size=1, eta=2, depth=2, producers=1, checkpoints=True),
    Case(batch=1, size=1, eta=1, depth=1, producers=2, tunes=((0, 0), (2, 1))),
    Case(batch=1, size=2, eta=1, depth=1, producers=1, scored=True, filtered=True, late=True),
)


class Interrupted(Exception):
    """The transaction of a twin raised."""


class RaisingTransaction(Transaction):
    """Raises at the `limit`-th edit; 0: at none."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.edits = self.limit = 0

    def _count(self) -> None:
        self.edits += 1
        if self.edits == self.limit:
            raise Interrupted

    def edit(self, table: Table, item: Any) -> Edit:
        self._count()
        return super().edit(table, item)

    def put(self, key: str, rows: Rows) -> None:
        self._count()
        super().put(key, rows)

    def put_quietly(self, key: str, rows: Rows) -> None:
        self._count()
        super().put_quietly(key, rows)


class Watched(GroupMachine):
    """Makes every call on twins, too, until one has edited something."""

    seen: Counter[str] = Counter()

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        self.loaded = list(rows)
        self.before: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []  # calls since then that edited nothing
        super().load(self.loaded)

    def twin(self) -> GroupMachine:
        """A machine with the same rows that has had the same calls."""
        parts = Parts(transaction=RaisingTransaction)
        twin = GroupMachine(self.live.base, epoch=self.service_epoch, filters=self.budget.filters, parts=parts)
        twin.load(self.loaded)
        for key, worker in self.workers.known.items():
            twin.workers.known[key] = msgspec.structs.replace(worker)
        for name, args, named in self.before:
            getattr(GroupMachine, name)(twin, *args, **named)
        return twin

    def watch(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call = getattr(GroupMachine, name)
        if not hasattr(self, "loaded") or self.tx._rows:
            return call(self, *args, **named)
        edits, again = self.interrupt(name, args, named), self.twin()
        try:
            result = call(self, *args, **named)
        except AsyncRLError:
            assert not self.tx._rows, f"{name} was refused after it had edited {sorted(self.tx._rows)}"
            raise
        call(again, *args, **named)
        assert encoded(again.tx) == encoded(self.tx), name
        self.before.append((name, args, named))
        self.seen[name] += edits
        return result

    def interrupt(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> int:
        """How many edits the call makes: it was interrupted at each of them."""
        for limit in range(1, 99):
            twin = self.twin()
            twin.tx.limit = twin.tx.edits + limit  # type: ignore[attr-defined]
            try:
                getattr(GroupMachine, name)(twin, *args, **named)
            except Interrupted:
                continue
            except AsyncRLError:
                pass
            return limit - 1
        raise AssertionError(f"{name} makes more than 98 edits")


def encoded(tx: Transaction) -> dict[str, bytes | None]:
    return {key: rows.row(key) for key, rows in tx._rows.items()}


def _watched(name: str) -> Any:
    return lambda self, *args, **named: self.watch(name, args, named)


for _name in CALLS:
    setattr(Watched, _name, _watched(_name))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_are_atomic(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_world, "GroupMachine", Watched)
    monkeypatch.setattr(Watched, "seen", Counter())
    found = search(case, limit=600)
    assert not found.violation, found.violation
    assert (
        sum(Watched.seen.values()) > 1000 and min(Watched.seen[name] for name in ("lease", "samples", "claim")) > 0
    ), Watched.seen


def test_a_part_that_edits_before_it_validates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a claim that edits and is then refused."""

    def claim(self: Any, *, epoch: int, step: int, version: int, now: float) -> Any:
        self.table.put("meta")
        raise AsyncRLError("wire.unexpected", "refused after an edit")

    monkeypatch.setattr(GroupMachine, "claim", claim)
    monkeypatch.setattr(model_world, "GroupMachine", Watched)
    with pytest.raises(AssertionError, match="was refused after it had edited"):
        search(CASES[0], limit=50)
