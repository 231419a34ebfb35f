"""Prompts at their end, in little space: what is known of a chunk of ids whose prompts all have ended.

A chunk is one row of the store: for each kind of end a bitmap of its ids. A kind is `retired`, `dropped:<reason>` or
`dead:<reason>`. Guarantees:
1. the state of every id is kept, so that an older checkpoint can be returned to (`open`);
2. counts are kept by kind as chunks come and go, so that checks and ledgers do not look at history;
3. a ledger has only the numbers (`Archived`). If the store knows others, those of the ledger are adopted: then the
   states of single ids are not known.
Rows: `archive` (what was adopted), `archive<chunk>`.

>>> archive = Archive(chunk=4); archive.seal(1, {4: "retired", 5: "dropped:late", 6: "retired", 7: "retired"})
>>> archive.summary(), archive.kind(5), 8 in archive
(Archived(ranges=((4, 8),), counts={'dropped:late': 1, 'retired': 3}), 'dropped:late', False)
>>> archive.open(1), len(archive)
({4: 'retired', 5: 'dropped:late', 6: 'retired', 7: 'retired'}, 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from buffers.values.id_set import IdSet

CHUNK = 1024  # ids
RETIRED = "retired"
ROW = "archive"
_encode = msgspec.msgpack.Encoder().encode
_decode_chunk = msgspec.msgpack.Decoder(dict[str, bytes]).decode


class Archived(msgspec.Struct, frozen=True):
    """Prompts at their end: ranges `[first, end)` of ids, and how many of each kind. Numbers that contradict each other
    cannot be decoded."""

    ranges: tuple[tuple[int, int], ...] = ()
    counts: dict[str, int] = {}

    def __post_init__(self) -> None:
        kinds = all(kind == RETIRED or kind.startswith(("dropped:", "dead:")) for kind in self.counts)
        if not kinds or min([0, *self.counts.values()]) < 0 or sum(self.counts.values()) != len(IdSet(self.ranges)):
            raise ValueError(f"the counts {self.counts} are not those of the ranges")


_decode_adopted = msgspec.msgpack.Decoder(Archived).decode


class Archive:
    """Chunks by number, each in its encoded form."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self.chunks: dict[int, bytes] = {}
        self.adopted = Archived()
        self.counts: Counter[str] = Counter()
        self.ids = IdSet()

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __contains__(self, number: int) -> bool:
        return number in self.ids

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over persisted rows; those of other tables are ignored."""
        for key, value in rows:
            if key == ROW:
                self.adopted = _decode_adopted(value)
                self.counts.update(self.adopted.counts)
            elif key.startswith(ROW):
                self.chunks[int(key[len(ROW) :])] = value
                self.counts.update(_count(value))
        self.ids = IdSet([*self.adopted.ranges, *map(self._range, self.chunks)])

    def row(self, key: str) -> bytes | None:
        if key == ROW:
            return _encode(self.adopted) if self.adopted.ranges else None
        return self.chunks.get(int(key[len(ROW) :]))

    def keys(self) -> list[str]:
        """The keys of all rows."""
        return [*([ROW] if self.adopted.ranges else []), *map(self.key, self.chunks)]

    def key(self, chunk: int) -> str:
        return f"{ROW}{chunk}"

    def _range(self, chunk: int) -> tuple[int, int]:
        return (chunk * self.chunk, (chunk + 1) * self.chunk)

    def seal(self, chunk: int, ends: Mapping[int, str]) -> None:
        """Take the ends of all ids of a chunk."""
        bits: dict[str, int] = {}
        for number, kind in ends.items():
            bits[kind] = bits.get(kind, 0) | 1 << number % self.chunk
        size = (self.chunk + 7) // 8
        self.chunks[chunk] = _encode({kind: bits[kind].to_bytes(size, "little") for kind in sorted(bits)})
        self.counts.update(_count(self.chunks[chunk]))
        self.ids = IdSet([*self.ids.ranges(), self._range(chunk)])

    def open(self, chunk: int) -> dict[int, str]:
        """Give the ends of a chunk's ids back."""
        value = self.chunks.pop(chunk)
        self.counts = self.counts - Counter(_count(value))
        first, end = self._range(chunk)
        self.ids.cut(first, end)
        kinds = {kind: int.from_bytes(bits, "little") for kind, bits in _decode_chunk(value).items()}
        return {n: kind for n in range(first, end) for kind, bits in kinds.items() if bits >> n - first & 1}

    def kind(self, number: int) -> str:
        """How the prompt ended; empty if it is not here, or was adopted."""
        place = number % self.chunk
        kinds = _decode_chunk(self.chunks.get(number // self.chunk, _encode({})))
        return next((kind for kind, bits in kinds.items() if bits[place // 8] >> place % 8 & 1), "")

    # ------------------------------------------------------------ ledgers

    def summary(self) -> Archived:
        """The numbers, for a ledger."""
        return Archived(self.ids.ranges(), dict(sorted(self.counts.items())))

    def outside(self, ids: IdSet) -> list[int]:
        """The chunks with ids that are not in `ids`."""
        return [chunk for chunk in self.chunks if not ids.covers(*self._range(chunk))]

    def agrees(self, archived: Archived) -> bool:
        """Whether the archive has the same numbers for exactly these ids."""
        ids = IdSet(archived.ranges)
        outside = set(self.outside(ids))
        counts = Counter(self.adopted.counts)
        for chunk in self.chunks.keys() - outside:
            counts.update(_count(self.chunks[chunk]))
        whole = IdSet([*ids.ranges(), *self.adopted.ranges])
        return len(whole) == len(ids) and +counts == +Counter(archived.counts)

    def adopt(self, archived: Archived) -> list[str]:
        """Hold these numbers and nothing else; the keys of the rows that changed."""
        changed = [ROW, *map(self.key, self.chunks)]
        self.chunks, self.adopted = {}, archived
        self.counts, self.ids = Counter(archived.counts), IdSet(archived.ranges)
        return changed


def _count(chunk: bytes) -> dict[str, int]:
    return {kind: int.from_bytes(bits, "little").bit_count() for kind, bits in _decode_chunk(chunk).items()}
