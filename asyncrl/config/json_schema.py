"""JSON schema of the configuration for editors, with the comments at the fields as descriptions.

Guarantees:
1. every setting has a description: the comment on its line in the source, or that of the base class;
2. the schema refuses what `asyncrl check` refuses in a single field (types, ranges, unknown keys).
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.sections.base import Section, names_in
from asyncrl.config.suggestions import section_type

POLICIES = "several policies, each a run of its own: for each name the settings that differ from the rest of the file"


@functools.cache
def field_meanings(kind: type) -> dict[str, str]:
    """Field -> comment on its line."""
    base = kind.__base__
    inherited = field_meanings(base) if base is not None and issubclass(base, Section) else {}
    own = re.findall(r"^    (\w+):.*?  # (.*)$", inspect.getsource(kind), flags=re.MULTILINE)
    return inherited | dict(own)


def meanings(kind: type[Section], prefix: str = "") -> dict[str, str]:
    """Dotted key -> description, for all settings."""
    found: dict[str, str] = {}
    hints = typing.get_type_hints(kind)
    for item in msgspec.structs.fields(kind):
        inner, name = section_type(hints[item.name]), f"{prefix}{item.name}"
        found |= meanings(inner, f"{name}.") if inner else {name: field_meanings(kind).get(item.name, "")}
    return found


class Setting(NamedTuple):
    """Type, default and description of a setting, for readers."""

    kind: str  # type, with its range or its choices
    default: str  # as in TOML; empty: required
    meaning: str


def describe(kind: type[Section], key: str) -> Setting:
    """The setting of a dotted key."""
    *tables, leaf = key.split(".")
    for table in tables:
        inner = section_type(typing.get_type_hints(kind)[table])
        if inner is None:
            raise KeyError(key)
        kind = inner
    [field] = [item for item in msgspec.structs.fields(kind) if item.name == leaf]
    hint = typing.get_type_hints(kind, include_extras=True)[leaf]
    default = "" if field.required else msgspec.json.encode(field_default(field)).decode()
    return Setting(type_name(hint), default, field_meanings(kind).get(leaf, ""))


def type_name(hint: Any) -> str:
    """`int >= 1`, `float or "max" / "auto"`, `list of str`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if names := names_in(hint):
        return " / ".join(f'"{name}"' for name in (*names, "module:name"))
    if origin is typing.Literal:
        return " / ".join(f'"{option}"' for option in args)
    if origin is typing.Annotated:
        return type_name(args[0]) + "".join(f" {_range(meta)}" for meta in args[1:] if isinstance(meta, msgspec.Meta))
    if origin is dict:
        return "table"
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    return " or ".join(type_name(arg) for arg in args) if args else getattr(hint, "__name__", str(hint))


def _range(meta: msgspec.Meta) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{sign} {value:g}" for name, sign in signs.items() if (value := getattr(meta, name)) is not None]
    return " and ".join(bounds)


def field_default(field: msgspec.structs.FieldInfo) -> Any:
    """The default of a field that has one."""
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[operator]


def build_schema(kind: type[Section]) -> dict[str, Any]:
    """The schema of a configuration, draft 2020-12."""
    made = msgspec.json.schema(kind)
    for section in {kind, *_sections(kind)}:
        properties = made["$defs"][section.__name__]["properties"]
        for name, meaning in field_meanings(section).items():
            if name in properties:
                properties[name]["description"] = meaning
        made["$defs"][section.__name__]["title"] = (section.__doc__ or section.__name__).strip().splitlines()[0]
    tables = {"type": "object", "additionalProperties": {"type": "object"}, "description": POLICIES}
    made["$defs"][kind.__name__]["properties"]["policies"] = tables
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _sections(kind: type[Section]) -> list[type[Section]]:
    inner = [section_type(hint) for hint in typing.get_type_hints(kind).values()]
    return [found for section in inner if section for found in (section, *_sections(section))]
