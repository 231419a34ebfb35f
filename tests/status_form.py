"""Which fields of a status are not in its published form: for tests that hold answers of real services against it."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec


def strangers(value: Any, kind: Any, path: str = "") -> list[str]:
    """The dotted names of fields that the struct `kind`, and the structs in it, do not have."""
    kind = _plain(kind)
    if kind is Any:
        return []
    if isinstance(value, list):
        inner = typing.get_args(kind)[0]
        return sorted({name for one in value for name in strangers(one, inner, f"{path}[]")})
    if not isinstance(value, dict):
        return []
    if typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        return sorted({name for one in value.values() for name in strangers(one, inner, f"{path}{{}}")})
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return []
    hints = typing.get_type_hints(kind)
    found = []
    for name, one in value.items():
        at = f"{path}.{name}" if path else name
        found += strangers(one, hints[name], at) if name in hints else [at]
    return sorted(found)


def _plain(kind: Any) -> Any:
    """Without `| None`."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(one for one in typing.get_args(kind) if one is not type(None))
    return kind
