"""`data.sampler`: a user's own order of the rows. No torch.

The function gets all rows, the epoch (0, 1, ...) and `run.seed`, and returns the number of the row at each place in the
epoch: as many numbers as there are rows. A row may come several times or never. Every producer calls it, and all must
agree, so it may depend on its arguments alone.

Example: `sorted(range(len(rows)), key=lambda number: rows[number]["level"])` begins each epoch with easy rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError
from asyncrl.plugins import load_object

Row = dict[str, Any]


class AllRows(Sequence[Row]):
    """All rows of the data; each is read when it is looked at."""

    def __init__(self, read: Callable[[int], Row | None], length: int) -> None:
        self._read = read
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(self._length))]
        row = self._read(range(self._length)[number])  # negative numbers count from the end, others raise IndexError
        assert row is not None
        return row


class Sampler:
    """The order of each epoch.

    Raises:
        ConfigError: `config.data`: it cannot be loaded, raises, gives other numbers, or gives another order when it is
            asked again.
    """

    def __init__(self, name: str, rows: Sequence[Row], *, seed: int) -> None:
        self._where = f"data.sampler = {name!r}"
        self._function: Callable[..., Any] = load_object(name, code="config.data", where=self._where)
        self._rows = rows
        self._seed = seed
        if not np.array_equal(self.order(0), self.order(0)):
            what = "it gives another order when it is asked again: let it depend on its arguments alone"
            raise ConfigError("config.data", what, where=self._where)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Row numbers by place in the epoch, i8 `[rows]`."""
        length = len(self._rows)
        try:
            found = np.asarray(self._function(self._rows, epoch, self._seed))
        except Exception as error:  # the user's function may raise anything
            raise ConfigError("config.data", f"{type(error).__name__}: {error}", where=self._where) from error
        if found.shape != (length,) or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= length:
            what = f"epoch {epoch}: it must give {length} row numbers from 0 to {length - 1}, and gives {found!r:.80}"
            raise ConfigError("config.data", what, where=self._where)
        return found.astype(np.int64)
