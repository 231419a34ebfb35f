"""Base class of all sections of the configuration, and ranges of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of all sections."""

    @classmethod
    def also_required(cls, tree: Mapping[str, Any]) -> tuple[str, ...]:
        """Fields without a default are required; these are required as well because of other settings."""
        return ()
