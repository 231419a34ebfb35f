"""The rows of training groups where the buffer chooses them (`data.sampler = "difficulty"`), as rows of the store.

Guarantees:
1. a group keeps its row through lost leases, further attempts and restarts of the service;
2. the history has a line for each choice (`choose`), each outcome (`outcome`) and each change of the table (`prompts`):
   replayed in order they give the same table and the same choices. A store that went back to an earlier state begins
   with an empty table, and the history says so;
3. without the setting nothing is stored or written.
Rows: `prompts` (number of rows), `prompts<chunk>` (numbers of `CHUNK` rows), `row<group>` (of groups that are not at
their end).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncrl.errors import HandshakeError
from asyncrl.prompt_choice import MOST_ROWS, PromptChoice
from buffers.groups.records import Change, Group
from buffers.groups.transaction import Transaction

CHUNK = 4096
_encode = msgspec.msgpack.Encoder().encode


class PromptTable:
    """Chooses rows and keeps them by group; `chooses`: whether the run asks for it."""

    def __init__(self, tx: Transaction, *, seed: int = 0, chooses: bool = False) -> None:
        self.tx = tx
        self.chooses = chooses
        self.choice = PromptChoice(seed=seed)
        self.by_group: dict[int, int] = {}
        self._confirmed = False  # a producer of this life of the service has said the number of rows

    # ------------------------------------------------------------ rows of the store

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows."""
        found = {key: value for key, value in rows if self.chooses and key.startswith(("prompts", "row"))}
        self.choice.resize(msgspec.msgpack.decode(found.pop("prompts", b"\x00"), type=int))
        for key, value in found.items():
            if key.startswith("row"):
                self.by_group[int(key[3:])] = msgspec.msgpack.decode(value, type=int)
                continue
            begin = int(key[7:]) * CHUNK
            mixed, same = msgspec.msgpack.decode(value, type=tuple[bytes, bytes])
            self.choice.mixed[begin : begin + len(mixed)], self.choice.same[begin : begin + len(same)] = mixed, same
        self.choice.count()

    def rows(self) -> list[Change]:
        """All rows, for a store that lost its own."""
        keys = ["prompts", *map(self._chunk_key, range(0, len(self.choice), CHUNK)), *map(self._key, self.by_group)]
        return [Change(key, self.row(key)) for key in keys] if self.chooses else []

    def row(self, key: str) -> bytes | None:
        if key == "prompts":
            return _encode(len(self.choice))
        if key.startswith("row"):
            found = self.by_group.get(int(key[3:]))
            return None if found is None else _encode(found)
        begin = int(key[7:]) * CHUNK
        if begin >= len(self.choice):
            return None
        return _encode([bytes(numbers[begin : begin + CHUNK]) for numbers in (self.choice.mixed, self.choice.same)])

    def _key(self, group: int) -> str:
        return f"row{group}"

    def _chunk_key(self, row: int) -> str:
        return f"prompts{row // CHUNK}"

    # ------------------------------------------------------------ decisions

    def greet(self, producer: str, rows: int) -> None:
        """A producer says how many rows its data has. Raises `handshake.mismatch` if it is not the run's number."""
        if not self.chooses or (self._confirmed and rows == len(self.choice)):
            return
        if not 0 < rows <= MOST_ROWS or self._confirmed:
            known = len(self.choice) if self._confirmed else f"1 to {MOST_ROWS}"
            what = f"{producer} reads {rows} rows of data, this run {known}: data.sampler = 'difficulty' chooses rows"
            raise HandshakeError("handshake.mismatch", what)
        self._confirmed = True
        if rows != len(self.choice):
            self._resize(rows, fresh=False)

    def _resize(self, rows: int, *, fresh: bool) -> None:
        chunks = range(0, max(rows, len(self.choice)), CHUNK)
        self.choice.resize(0 if fresh else rows)
        self.choice.resize(rows)
        for key in ("prompts", *map(self._chunk_key, chunks)):
            self.tx.put(key, self)
        self.tx.event("prompts", rows=rows, seed=self.choice.seed, fresh=fresh)

    def forget(self) -> None:
        """The store went back: its numbers are not those of the history."""
        if self.chooses:
            self._resize(len(self.choice), fresh=True)

    def assign(self, group: Group) -> int:
        """The row of a group that is leased; -1: the producer's own order has it, as before the run got the setting."""
        if not self.chooses or not len(self.choice):
            return -1
        if group.id not in self.by_group and not (group.samples or group.partial):
            row = self.by_group[group.id] = self.choice.choose(group.id)
            self.tx.put(self._key(group.id), self)
            self.tx.event("choose", g=group.id, row=row)
        return self.by_group.get(group.id, -1)

    def note_rewards(self, group: Group) -> None:
        """All rewards of a group are in."""
        if not self.chooses:
            return
        rewards = {sample.reward for sample in group.samples.values()}
        self.observe(group.id, mixed=len(rewards) > 1)

    def observe(self, group: int, *, mixed: bool) -> None:
        """The outcome of a group; one whose prompt cannot be used taught nothing."""
        row = self.by_group.get(group, -1)
        if not 0 <= row < len(self.choice):  # not chosen here, or the data became shorter
            return
        self.choice.observe(row, mixed=mixed)
        self.tx.put_quietly(self._chunk_key(row), self)
        self.tx.event("outcome", g=group, row=row, mixed=mixed)

    def release(self, group: int) -> None:
        """The group is at its end."""
        if self.by_group.pop(group, None) is not None:
            self.tx.put_quietly(self._key(group), self)
