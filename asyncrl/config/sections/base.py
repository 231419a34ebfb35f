"""Base class of all sections of the configuration, and ranges of their fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.plugins import PLACE

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


def one_of_or_place(*names: str) -> Meta:
    """The values of a text: one of the names, or the place of a user's own function."""
    known = "|".join(map(re.escape, names))
    choices = [{"enum": list(names)}, {"pattern": f"^{PLACE.pattern}$"}]
    return Meta(pattern=f"^(?:{known}|{PLACE.pattern})$", extra={"names": names}, extra_json_schema={"anyOf": choices})


def names_in(hint: Any) -> tuple[str, ...]:
    """The names that a type of `one_of_or_place` accepts; none for other types."""
    metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]
    return next((meta.extra["names"] for meta in metas if meta.extra), ())


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all sections."""

    @classmethod
    def also_required(cls, tree: Mapping[str, Any]) -> tuple[str, ...]:
        """Fields without a default are required; these are required as well because of other settings."""
        return ()
