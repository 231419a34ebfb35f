"""File and line of every key of one or several TOML files.

Guarantees:
1. a key that several files set has the place of the last one, which holds its value;
2. a key that is in no file has the place of the nearest table above it, else the first file;
3. values of `--set` and of presets are labelled as such. It reads lines, not TOML: keys in inline tables have the line
   of the key that holds the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\-\"' ]+?)\s*\]")
_KEY = re.compile(r"\s*([\w.\-\"' ]+?)\s*=\s*(.*)")


class Places:
    """Places of dotted keys such as `reward[0].function`."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.overridden: set[str] = set()
        self.preset: Mapping[str, Any] = {}  # settings of the preset
        self._at: dict[str, str] = {}

    def add(self, file: str, text: str) -> None:
        """Add the keys of one more file, whose settings override earlier ones."""
        self.files.append(file)
        found: dict[str, str] = {}
        for dotted, number in keys_in(text):
            found.setdefault(dotted, f"{file}:{number}")
        # A list of tables replaces an earlier one.
        replaced = {dotted.partition("[")[0] for dotted in found if "[" in dotted}
        self._at = {key: at for key, at in self._at.items() if "[" not in key or key.partition("[")[0] not in replaced}
        # A table that two files open has the place of the first one; its keys have those of their files.
        self._at |= {key: at for key, at in found.items() if key not in self._at or not _is_table(key, found)}

    def prefer(self, prefix: str) -> None:
        """Keys have the place of the key with this prefix, if there is one."""
        self._at |= {key.removeprefix(prefix): at for key, at in self._at.items() if key.startswith(prefix)}

    def where(self, path: Sequence[str]) -> str:
        """The place of the key, or of the nearest table above it."""
        name = format_path(path)
        if name in self.overridden:
            return f"--set {name}"
        first = self.files[0] if self.files else "<config>"
        if name not in self._at and self._preset_holds(path):
            return f"{first}, from its preset"
        while name:
            if name in self._at or f"{name}[0]" in self._at:
                return self._at.get(name) or self._at[f"{name}[0]"]
            if name in self.overridden:
                return f"--set {name}"
            name = name[: max(name.rfind("."), name.rfind("["), 0)]
        return first

    def _preset_holds(self, path: Sequence[str]) -> bool:
        node: Any = self.preset
        for key in path:
            if not isinstance(node, Mapping) or key not in node:
                return False
            node = node[key]
        return bool(path)


def keys_in(text: str) -> Iterator[tuple[str, int]]:
    """Dotted keys and tables of a TOML text with their line numbers."""
    table, inside = "", ""
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if inside:  # a text or a list over several lines
            inside = "" if _closes(line, inside) else inside
            continue
        if header := _HEADER.match(line):
            table = _bare(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}[{counts[table]}]"
            else:
                outer, _, rest = table.partition(".")
                table = f"{outer}[{counts[outer]}].{rest}" if rest and outer in counts else table
            yield table, number
        elif key := _KEY.match(line):
            yield (f"{table}.{_bare(key[1])}" if table else _bare(key[1])), number
            inside = _opens(key[2])


def format_path(path: Sequence[str]) -> str:
    """`("reward", "[0]", "function")` -> `reward[0].function`."""
    return ".".join(path).replace(".[", "[")


def parse_dotted(name: str) -> tuple[str, ...]:
    """Inverse of `format_path`."""
    return tuple(name.replace("[", ".[").split("."))


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _is_table(key: str, keys: Mapping[str, str]) -> bool:
    return any(other.startswith((f"{key}.", f"{key}[")) for other in keys)


def _opens(value: str) -> str:
    """The end marker of a value that continues on later lines: three quotes, or the bracket of a list."""
    for quotes in ('"""', "'''"):
        if value.startswith(quotes):
            return "" if quotes in value[3:] else quotes
    plain = _strip_texts(value)
    return "]" if value.startswith("[") and plain.count("[") > plain.count("]") else ""


def _closes(line: str, end: str) -> bool:
    if end == "]":  # lists close on a line that begins or ends with the bracket
        plain = _strip_texts(line).strip().rstrip(",")
        return plain.endswith("]") and plain.count("]") > plain.count("[")
    return end in line


def _strip_texts(line: str) -> str:
    return re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'", "", line).partition("#")[0]
