"""An extension of griffe for the API reference: the comment on the line of a field is its description."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """The fields of NamedTuple and msgspec structs are described by comments, as in the source."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:
        """griffe calls it for every attribute."""
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        line = attr.filepath.read_text(encoding="utf-8").splitlines()[attr.lineno - 1]
        _, mark, comment = line.partition("  # ")
        if mark and not comment.startswith(("noqa", "type:")):
            attr.docstring = griffe.Docstring(comment, parent=attr, lineno=attr.lineno)
