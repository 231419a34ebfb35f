"""Rules of what parts can do (`asyncrl.config.capabilities`), as far as the settings alone tell it.

`asyncrl check` looks at the model's config.json and at this machine's device as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.capabilities import find_refusals
from asyncrl.config.locations import parse_dotted
from asyncrl.config.rules import Conflict
from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    for found in find_refusals(config):
        yield Conflict(found.code, found.message, parse_dotted(found.key), found.remedy)
