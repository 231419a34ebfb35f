"""Names of settings, ours and those of other trainers, and the setting that was meant by an unknown name.

Guarantees:
1. `suggest_key` looks in the same section first, then in all; it finds a correct name that belongs to another section;
   names of other frameworks (`synonyms.toml`) come before guesses by similarity;
2. it returns only keys that exist: a test compares `synonyms.toml` with the configuration.

Example: `[learner] max_stalenes` -> `buffer.max_staleness`; `[sampling] rollout_n` -> `sampling.group_size`.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from asyncrl.config.sections.base import Section

#: Similarity (0 to 1) above which a name of the same section, or of another one, counts as a misspelling.
LIKE_HERE = 0.6
LIKE_ELSEWHERE = 0.75


@functools.cache
def synonyms(kind: Literal["settings", "sections", "nothing"]) -> dict[str, str]:
    """Names in verl, TRL, prime-rl, AReaL, OpenRLHF, slime and others -> our names; nothing: -> why there is none."""
    ours = tomllib.loads((Path(__file__).parent / "synonyms.toml").read_text(encoding="utf-8"))[kind]
    if kind == "nothing":
        return dict(ours)
    return {theirs: key for key, names in ours.items() for theirs in names}


class Meant(NamedTuple):
    """The dotted key that was probably meant, and whether it is in another section than the unknown name."""

    key: str
    elsewhere: bool


def section_type(hint: Any) -> type[Section] | None:
    """The section behind a type: itself, or the item type of a list of tables."""
    inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


@functools.cache
def list_keys(kind: type[Section], prefix: str = "") -> tuple[str, ...]:
    """Every dotted key of a section, in order."""
    keys: list[str] = []
    hints = typing.get_type_hints(kind)
    for item in msgspec.structs.fields(kind):
        inner = section_type(hints[item.name])
        keys += list_keys(inner, f"{prefix}{item.name}.") if inner else [f"{prefix}{item.name}"]
    return tuple(keys)


def value_at(value: Any, dotted: str) -> Any:
    """The value of a dotted key in a configuration or a section."""
    return functools.reduce(getattr, dotted.split("."), value)


@functools.cache
def list_sections(kind: type[Section], prefix: str = "") -> tuple[str, ...]:
    """Every dotted section, in order."""
    found: list[str] = []
    hints = typing.get_type_hints(kind)
    for item in msgspec.structs.fields(kind):
        if inner := section_type(hints[item.name]):
            found += [f"{prefix}{item.name}", *list_sections(inner, f"{prefix}{item.name}.")]
    return tuple(found)


def suggest_key(path: Sequence[str], kind: type[Section]) -> Meant | None:
    """The setting that was probably meant by the unknown dotted `path` of the configuration `kind`."""
    section = ".".join(part for part in path[:-1] if not part.startswith("["))
    name = _plain(path[-1])
    keys = list_keys(kind)
    here = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    subsections = {key.rpartition(".")[2]: key for key in list_sections(kind) if key.rpartition(".")[0] == section}
    if name in here or name in subsections:
        return Meant((here | subsections)[name], elsewhere=False)
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if theirs := synonyms("settings").get(".".join(path[-2:])) or our_name(
        name
    ):  # before our own names: TRL's beta is not process_reward.beta
        return Meant(theirs, elsewhere=theirs.rpartition(".")[0] != section)
    if same:
        return Meant(nearest(section, same), elsewhere=True)
    if known_as := synonyms("settings").get(name):
        return Meant(known_as, elsewhere=known_as.rpartition(".")[0] != section)
    if reason_without(path, kind):
        return None
    if near := _find_similar(name, here | subsections, LIKE_HERE):
        return Meant(near, elsewhere=False)
    known = {key.rpartition(".")[2]: nearest(section, (key,)) for key in keys}
    near = _find_similar(name, known, LIKE_ELSEWHERE)
    return Meant(near, elsewhere=True) if near else None


def suggest_section(path: Sequence[str], kind: type[Section]) -> Meant | None:
    """The section that was probably meant by the unknown table `path`."""
    known = {section.rpartition(".")[2]: section for section in reversed(list_sections(kind))}
    above, name = ".".join(path[:-1]), _plain(path[-1])
    here = {key: value for key, value in known.items() if value.rpartition(".")[0] == above}
    found = here.get(name) or known.get(name) or synonyms("sections").get(name)
    found = found or _find_similar(name, here, LIKE_HERE) or _find_similar(name, known, LIKE_ELSEWHERE)
    return Meant(found, elsewhere=found.rpartition(".")[0] != above) if found else None


def nearest(section: str, keys: Iterable[str]) -> str:
    """The key whose section shares the longest prefix with `section`; the first of several."""
    return max(keys, key=lambda key: _count_shared(section.split("."), key.split(".")))


def _count_shared(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _find_similar(name: str, known: Mapping[str, str], cutoff: float) -> str:
    """The value of the most similar name in `known`; empty below the cutoff."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return known[found[0]] if found else ""


@functools.cache
def translation_table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "translations.toml").read_text(encoding="utf-8"))


@functools.cache
def known_trainers() -> tuple[str, ...]:
    """Trainers with known settings."""
    return tuple(name for name in translation_table() if name not in ("launchers", "values"))


def our_name(key: str) -> str:
    """Our name of another trainer's full name, such as `trainer.optim.lr`; empty if it is unknown."""
    for name in known_trainers():
        table = translation_table()[name]
        if found := table["settings"].get(table.get("older", {}).get(key, key)):
            return str(found)
    return ""


def stands_for(key: str) -> str:
    """Our name of another trainer's full name, by its table or by its last parts; empty if it is unknown."""
    parts, names = key.split("."), synonyms("settings")
    return our_name(key) or names.get(".".join(parts[-2:]), "") or names.get(parts[-1], "")


def reason_left_out(key: str, trainer: str = "") -> str:
    """Why another trainer's setting has no counterpart here; empty if that is unknown. Names may be patterns."""
    for name in [*([trainer] if trainer else known_trainers()), "launchers"]:
        nothing, older = translation_table()[name]["nothing"], translation_table()[name].get("older", {})
        names = (older.get(key, key), key)
        for called in names:
            if reason := nothing.get(called):
                return str(reason)
        for pattern, reason in nothing.items():
            if "*" in pattern and any(fnmatch.fnmatchcase(called, pattern) for called in names):
                return str(reason)
    return ""


def reason_without(path: Sequence[str], kind: type[Section]) -> str:
    """Why a name of another trainer, full or its last part alone, has no counterpart in `kind`; empty if unknown."""
    ours = path[0] in {section.partition(".")[0] for section in list_sections(kind)}
    full = "" if ours or len(path) == 1 else reason_left_out(".".join(path))
    return full or _reasons().get(_plain(path[-1]), "")


@functools.cache
def _reasons() -> dict[str, str]:
    """Last parts of the names that have no counterpart -> the reason."""
    tables = [translation_table()[name]["nothing"] for name in known_trainers()]
    found = {key.rpartition(".")[2]: reason for table in tables for key, reason in table.items() if "*" not in key}
    return found | synonyms("nothing")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a tree and their values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
