"""What a store of the buffer's index does.

A store keeps rows (key -> bytes) and the epoch of the service that may write them. Guarantees of
every implementation (one contract suite runs on all of them):
1. `open` makes this process the only writer: it takes an epoch above every earlier one, and at least `floor`;
2. `apply` writes all of its changes or none, and only while no newer epoch was taken: else `fenced`;
3. `apply` is idempotent, so it may be repeated when its answer was lost;
4. what `apply` returned from survives a kill of this process; what a loss of power may cost is the fsync setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from buffers.groups.records import Change


class Opened(msgspec.Struct, frozen=True):
    """The epoch taken and the rows found."""

    epoch: int
    rows: list[tuple[str, bytes]]


class StoreLost(Exception):
    """The store answers, but holds another state than the one last written (emptied, or rolled back):
    write it again.
    """


class Store(Protocol):
    kind: str

    def open(self, *, floor: int) -> Opened:
        """Take the epoch and read the rows."""

    def apply(self, changes: Sequence[Change]) -> None:
        """Write the changes as one step."""

    def reseed(self, rows: Sequence[Change]) -> None:
        """Replace whatever the store holds by these rows."""

    def sync(self) -> None:
        """Make what was applied safe against loss of power (everysec calls it once per second; any thread)."""

    def close(self) -> None:
        """Close it; what was applied stays."""
