"""Plain values as YAML in block style: maps, lists, texts and numbers, in the order given. Pure.

A text stands bare where no reader can take it for something else, in a block where
it has several lines, and in quotes (those of JSON, which YAML reads) otherwise.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def document(value: Any) -> str:
    """One document.

    >>> print(document({"a": [1, {"b": "x: y"}], "c": {}}), end="")
    a:
      - 1
      - b: "x: y"
    c: {}
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        found: list[str] = []
        for key, item in value.items():
            found += _entry(f"{_scalar(str(key))}:", item)
        return found
    if isinstance(value, list) and value:
        found = []
        for item in value:
            first, *rest = _lines(item)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [_scalar(value)]


def _entry(head: str, item: Any) -> list[str]:
    if isinstance(item, str) and "\n" in item.strip("\n") and item.endswith("\n") and not item.startswith((" ", "\n")):
        return [f"{head} |", *(f"  {line}".rstrip() for line in item.splitlines())]
    if isinstance(item, (dict, list)) and item:
        return [head, *(f"  {line}" for line in _lines(item))]
    return [f"{head} {_scalar(item)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)
