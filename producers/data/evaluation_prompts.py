"""Held-out prompts for producers: rows by the id of a leased group, and their sampling settings.

Guarantees:
1. row `r` of an evaluation is row `r` of the files or source of `[evaluation]`, in their own order, the same in every
   evaluation; `max_prompts` takes the first ones;
2. a source without a length is read to its end, or to `max_prompts`, when the process starts; one with more than
   `MAX_ROWS` rows is `config.data`;
3. it samples by `[evaluation]`, not by `[sampling]`; training is not affected.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config import Config
from asyncrl.config.mode import evaluation_data, evaluation_sampling
from asyncrl.errors import ConfigError
from asyncrl.evaluation.ids import MAX_ROWS, split_group
from asyncrl.images.rows import takes_images
from producers.data.prompts import BadPrompt, Prompts, Row


class HeldOutPrompts:
    """Rows and sampling of evaluations; `rows` is 0 if they are off."""

    def __init__(self, config: Config) -> None:
        self.rows = 0
        self.sampling = evaluation_sampling(config)
        if not config.evaluation.enabled:
            return
        sees = takes_images(config.model.path)
        self._prompts = Prompts(evaluation_data(config), seed=config.run.seed, sees=sees)
        self.rows = self._prompts.count(config.evaluation.max_prompts or MAX_ROWS + 1)
        if self.rows > MAX_ROWS:
            where = config.evaluation.source or config.evaluation.path
            raise ConfigError("config.data", f"more than {MAX_ROWS} rows: set evaluation.max_prompts", where=where)

    def row_for(self, group: int, chosen: int = -1) -> Row:
        """The row of a held-out group; nothing is `chosen` for it."""
        _, row = split_group(group)
        return self._prompts.row_for(row)

    def sample(self, most: int) -> Iterator[Row | BadPrompt]:
        """As of `Prompts`."""
        return self._prompts.sample(min(most, self.rows)) if self.rows else iter(())

    def images_of(self, row: Row) -> tuple[bytes, ...]:
        """As of `Prompts`."""
        return self._prompts.images_of(row)
