"""What outlives a process in the simulator: the store's medium, the segment files, the history; with crash semantics.

`Medium` is the database server (or file), `SimStore` one service's connection to it: the
interface of `buffers.stores.base.Store`. `Files` are the segment files, `SimSegments` one service's view of them: the
interface of `buffers.payloads.segments.Segments`. Guarantees:
1. a change set is applied as a whole or not at all; a bomb (`Files.bomb`, `Medium.bomb`) kills before or after it;
2. `Medium.back` puts an earlier prefix of all change sets back, `Medium.flushall` forgets everything;
3. two flavours: "redis" notices at the next write that the state is another one (`StoreLost`), "sqlite" does not and
   can go back only while no service runs;
4. what segments wrote survives a kill; a loss of power takes the part that was not synced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.errors import AsyncRLError, Fenced, Unavailable, WireError
from asyncrl.metrics import MetricsLog
from asyncrl.runtime.history_chain import Chain, find_seal
from asyncrl.wire import Place
from buffers.groups.records import Change, Record
from buffers.payloads.record_format import GUEST
from buffers.stores.base import Opened, StoreLost


class Killed(BaseException):
    """The process ends here, as by SIGKILL."""


class Medium:
    """Rows, epoch and sequence number, and every change set that was ever applied to them."""

    def __init__(self, flavour: str) -> None:
        self.flavour = flavour
        self.rows: dict[str, bytes] = {}
        self.epoch = 0
        self.sequence = 0
        self.log: list[tuple[int, int, bool, Sequence[Change]]] = []  # (epoch, sequence, from nothing, changes)
        self.synced = 0  # that many of them survive a loss of power
        self.newest = 0  # epoch of the newest service, whatever the rows say
        self.tainted = False  # it went back or was emptied, and nobody has written everything again since
        self.bomb = ""  # "before" or "after" the next write kills its writer; "outage": it fails

    def flushall(self) -> bool:
        """Everything is gone; False where there was nothing."""
        had = bool(self.rows)
        self.tainted = self.tainted or had
        self.rows, self.epoch, self.sequence, self.log, self.synced = {}, 0, 0, [], 0
        return had

    def back(self, to: int) -> bool:
        """Only the first `to` change sets ever happened; False where that changes nothing."""
        if to >= len(self.log):
            return False
        kept = self.log[:to]
        self.rows, self.epoch, self.sequence, self.log = {}, 0, 0, []
        for epoch, sequence, anew, changes in kept:
            self.write(epoch, sequence, changes, anew=anew)
        self.tainted = True
        self.synced = min(self.synced, to)
        return True

    def write(self, epoch: int, sequence: int, changes: Sequence[Change], *, anew: bool = False) -> None:
        """Apply a change set."""
        self.log.append((epoch, sequence, anew, changes))
        self.epoch, self.sequence = epoch, sequence
        if anew:
            self.rows = {}
            self.tainted = self.tainted and epoch < self.newest  # an older service writes what it remembers
        rows = self.rows
        for change in changes:
            if change.value is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.value


class SimStore:
    """One service's connection to the medium."""

    def __init__(self, medium: Medium) -> None:
        self.kind = medium.flavour
        self._medium = medium
        self._epoch = 0
        self._sequence = 0

    def open(self, *, floor: int) -> Opened:
        """Take the epoch and read the rows."""
        medium = self._medium
        self._epoch = max(floor, medium.epoch + 1)
        self._sequence = medium.sequence
        medium.newest = max(medium.newest, self._epoch)
        medium.write(self._epoch, self._sequence, [])
        return Opened(self._epoch, list(medium.rows.items()))

    def apply(self, changes: Sequence[Change]) -> None:
        """Write the changes as one step."""
        self._check()
        if self._medium.flavour == "redis" and (
            self._medium.epoch < self._epoch or self._medium.sequence != self._sequence
        ):
            raise StoreLost("simulated")
        self._write(changes, anew=False)

    def reseed(self, rows: Sequence[Change]) -> None:
        """Replace whatever the store holds by these rows."""
        self._check()
        self._write(rows, anew=True)

    def _check(self) -> None:
        medium = self._medium
        if medium.epoch > self._epoch or (medium.flavour == "sqlite" and medium.epoch != self._epoch):
            raise Fenced("fenced", f"service epoch {self._epoch} is over, {self._medium.epoch} writes now")

    def _write(self, changes: Sequence[Change], *, anew: bool) -> None:
        bomb, self._medium.bomb = self._medium.bomb, ""
        if bomb == "before":
            raise Killed
        if bomb == "outage":
            raise Unavailable("store.unreachable", "simulated outage")
        self._sequence += 1
        self._medium.write(self._epoch, self._sequence, changes, anew=anew)
        if bomb == "after":
            raise Killed

    def sync(self) -> None:
        """What was applied survives a loss of power."""
        self._medium.synced = len(self._medium.log)

    def close(self) -> None:
        """Nothing to close."""


class Files:
    """The segment files: (segment, offset) -> header, payload, checksum; and what is not synced."""

    def __init__(self) -> None:
        self.written: dict[tuple[int, int], tuple[Any, Any, int]] = {}
        self.unsynced: list[tuple[int, int]] = []
        self.guest_offset = 0
        self.last = 0  # highest number of a file
        self.bomb = False

    def power_loss(self, keep: int) -> bool:
        """Only the first `keep` of the unsynced records reached the disk."""
        gone, self.unsynced = self.unsynced[keep:], []
        for key in gone:
            self.written.pop(key, None)
        return bool(gone)

    def write_guest(self, writer: int, header: bytes, payload: bytes, checksum: int) -> Place:
        """A producer writes a record into a file of its own."""
        self.guest_offset += 1000
        key = (writer * GUEST + 1, self.guest_offset)
        self.written[key] = (header, payload, checksum)
        self.unsynced.append(key)
        return Place(*key, len(header), len(payload), checksum)

    def rot(self, key: tuple[int, int]) -> None:
        """A byte of this record turned over on the disk."""
        header, payload, checksum = self.written[key]
        self.written[key] = (header, payload, checksum ^ 1)


class SimGuests:
    """What producers of the host wrote themselves: the interface of `buffers.payloads.producer_files.Guests`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.adopted = False

    def read(self, producer: str, place: Place, *, max_bytes: int) -> tuple[Any, Any]:
        """Header and payload at the place; `wire.place` where they are not."""
        found = self._files.written.get((place.segment, place.offset))
        if found is None or found[2] != place.checksum or place.segment < GUEST:
            raise WireError("wire.place", f"file {place.segment} holds something else at {place.offset}")
        return found[0], found[1]

    def keep_only(self, producers: Any) -> None:
        """Files of the silent go; here they are found when they are looked for."""


class SimSegments:
    """One service's segments; its own file is a new one, as in the real ones."""

    def __init__(self, files: Files, *, live: Iterable[Record], share: bool) -> None:
        records = list(live)
        self._files = files
        self._share = share
        self._cache: dict[Record, tuple[Any, Any]] = {}
        self._queue: dict[Record, tuple[Any, Any, bool]] = {}
        self._offset = 0
        self.report: list[str] = []
        self.guests = SimGuests(files)
        self.guest_bytes = 1 << 20
        known = {(record.segment, record.offset) for record in records}
        for key in [key for key in files.written if key not in known]:
            del files.written[key]
        newest = max((record.segment for record in records if record.segment < GUEST), default=0)
        self.damaged = [
            record
            for record in records
            if (record.segment, record.offset) not in files.written
            or ((record.segment == newest or record.segment >= GUEST) and not self._intact(record))
        ]
        files.last += 1
        self._number = files.last

    def _intact(self, record: Record) -> bool:
        found = self._files.written.get((record.segment, record.offset))
        return found is not None and found[2] == record.checksum

    def location(self) -> tuple[str, str]:
        """A learner on the same host sees the files."""
        return ("files", "nonce") if self._share else ("", "")

    def append(self, header: Any, payload: Any, checksum: int, *, again: bool = True) -> Record:
        """Queue a record for the next `flush`."""
        record = Record(self._number, self._offset, len(header), len(payload), checksum)
        self._offset += 28 + len(header) + len(payload)
        self._queue[record] = (header, payload, again)
        return record

    def adopt(self, place: Place, header: Any, payload: Any, *, again: bool = True) -> Record:
        """What a producer wrote belongs to the index."""
        record = Record(place.segment, place.offset, place.header_bytes, place.payload_bytes, place.checksum)
        if again:
            self._cache[record] = (header, payload)
        return record

    def flush(self) -> None:
        """Write what was appended."""
        if not self._queue:
            return
        if self._files.bomb:
            self._files.bomb = False
            raise Killed
        for record, (header, payload, again) in self._queue.items():
            key = (record.segment, record.offset)
            self._files.written[key] = (header, payload, record.checksum)
            self._files.unsynced.append(key)
            if again:
                self._cache[record] = (header, payload)
        self._queue = {}

    def read(self, record: Record) -> tuple[Any, Any]:
        """Header and payload; `store.corrupt` where they are not what was written."""
        found: Any = self._cache.get(record) or self._queue.get(record)
        if found is None:
            if not self._intact(record):
                raise AsyncRLError("store.corrupt", f"record at {record.offset} is damaged")
            found = self._files.written[record.segment, record.offset]
        return found[0], found[1]

    def release(self, records: Iterable[Record]) -> None:
        """These records are free."""
        for record in records:
            self._cache.pop(record, None)
            self._files.written.pop((record.segment, record.offset), None)

    def sync(self) -> None:
        """What was written survives a loss of power."""
        self._files.unsynced.clear()

    def close(self) -> None:
        """Nothing to close."""


class SimHistory:
    """history.jsonl in memory: one list for the run, completed on open from the store's row like the real one."""

    def __init__(self, lines: list[bytes], *, last: bytes = b"") -> None:
        self._lines = lines
        self.found = bool(lines)
        self.went_back = last in lines[:-1] and lines[-1] != last
        if last and not self.went_back and lines[-1:] != [last]:
            lines.append(last)
        self._chain = Chain()
        if lines:
            seal = find_seal(lines[-1])
            assert seal is not None
            self._chain.restart(seal)

    @property
    def head(self) -> str:
        return self._chain.head

    def seal(self, lines: bytes) -> bytes:
        return self._chain.seal(lines)

    def write(self, lines: bytes) -> None:
        """Append."""
        if lines:
            self._lines.append(lines)

    def close(self) -> None:
        """Nothing to close."""


class NullDead:
    """Dead letters that nobody reads."""

    def __init__(self, folder: Any) -> None:
        del folder

    def put(self, **letter: Any) -> None:
        """Nothing."""


class NullLog(MetricsLog):
    """A log without a file. Its other methods are the real ones, so that a new one needs nothing here."""

    def __init__(self, path: Any, *, most_bytes: int = 0) -> None:
        del path, most_bytes

    def write(self, values: Any, **labels: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
