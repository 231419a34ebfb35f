"""TOML files to one checked tree: every unknown key, wrong type and missing setting at once, with its place.

Guarantees:
1. files compose from left to right: tables merge, other values are replaced; `--set` overrides all files;
2. a mistake has a code, the file and line of the value, and the setting that was probably meant;
3. checking continues after mistakes: a removed value counts as its default. `Read.doubtful` names it, so later rules do
   not complain about values that were never given.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from asyncrl.config import presets
from asyncrl.config import suggestions as config_names
from asyncrl.config.locations import Places, format_path
from asyncrl.config.policies import choose_policy
from asyncrl.config.sections.base import Section, names_in
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors

#: Common other spellings of values.
VALUES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "sync": "full", "shm": "local"}

SHOWN = 4  # settings of a foreign table that its error names


class Source(NamedTuple):
    """One TOML file."""

    file: str
    text: str


class Read(NamedTuple):
    """The tree without its mistakes, and the places of all keys."""

    tree: dict[str, Any]
    places: Places
    errors: list[AsyncRLError]
    doubtful: frozenset[str]  # settings with an unknown value, because of a mistake
    notes: tuple[str, ...] = ()


def read(kind: type[Section], sources: Sequence[Source], overrides: Sequence[str] = ()) -> Read:
    """Merge the files from left to right, then the chosen policy, the preset and the overrides.

    Raises:
        ConfigErrors: a file is not TOML, or the preset does not exist.
    """
    places, errors = Places(), list[AsyncRLError]()
    tree: dict[str, Any] = {}
    for source in sources:
        try:
            tree = presets.merge_trees(tree, tomllib.loads(source.text))
        except tomllib.TOMLDecodeError as error:
            errors.append(_syntax(source.file, str(error)))
        places.add(source.file, source.text)
    if errors:
        raise ConfigErrors(errors)
    tree, overrides = choose_policy(tree, places, overrides)
    try:
        named = dict(map(_split, overrides))
        tree, places.preset = presets.apply_preset(tree, named)
    except ConfigError as error:
        raise ConfigErrors([_preset_error(error, places)]) from None
    notes = presets.drop_options(tree, named)
    for override in overrides:
        _override(tree, override, places, errors)
    look = _Look(kind, places, errors)
    look.walk(kind, tree, ())
    return Read(tree, places, errors, frozenset(look.doubtful), tuple(notes))


def _syntax(file: str, said: str) -> ConfigError:
    at = re.search(r"\(at line (\d+), column (\d+)\)", said)
    return ConfigError("config.file", said, where=f"{file}:{at[1]}" if at else file)


def _preset_error(error: ConfigError, places: Places) -> ConfigError:
    where = error.where or places.where(tuple(presets.KEY.split(".")))
    return ConfigError(error.code, error.message, where=where, remedy=error.remedy, suggestion=error.suggestion)


def _split(override: str) -> tuple[str, Any]:
    """Split `key=value`."""
    key, _, text = override.partition("=")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()  # a bare word is a string: buffer.store=redis


def _override(tree: dict[str, Any], override: str, places: Places, errors: list[AsyncRLError]) -> None:
    key, value = _split(override)
    if "=" not in override or not key:
        errors.append(ConfigError("usage", f"{override!r} is not key=value", where="--set"))
        return
    *tables, leaf = key.split(".")
    node: Any = tree
    for table in tables:
        node = node.setdefault(table, {})
        if not isinstance(node, dict):
            errors.append(ConfigError("config.unknown_key", f"{key}: {table} is not a table", where="--set"))
            return
    node[leaf] = value
    places.overridden.add(key)


class _Look:
    """One walk over a tree that reports and removes mistakes."""

    def __init__(self, root: type[Section], places: Places, errors: list[AsyncRLError]) -> None:
        self.root = root
        self.places = places
        self.errors = errors
        self.doubtful: set[str] = set()

    def walk(self, kind: type[Section], tree: dict[str, Any], path: tuple[str, ...]) -> None:
        """Check one table against its section."""
        hints = typing.get_type_hints(kind, include_extras=True)
        known = {item.name: item for item in msgspec.structs.fields(kind)}
        for key, value in list(tree.items()):
            here = (*path, key)
            if key not in known:
                self._unknown(here, value)
                del tree[key]
            elif isinstance(value, str) and hints[key] == tuple[str, ...]:
                tree[key] = [value]  # a single value stands for a list of one: --set producers.url=http://host:port
            elif not self._value(hints[key], value, here):
                del tree[key]
                self.doubtful.add(format_path(here))
        for name, item in known.items():
            if (item.required or name in kind.also_required(tree)) and name not in tree:
                self._report_missing((*path, name), hints[name], tree)

    def _report_missing(self, here: tuple[str, ...], hint: Any, tree: dict[str, Any]) -> None:
        name = format_path(here)
        section = config_names.section_type(hint)
        if section is not None:  # its required settings say more than its own name
            self.walk(section, tree.setdefault(here[-1], {}), here)
            return
        if name not in self.doubtful:  # else the mistake was reported before
            self.errors.append(ConfigError("config.missing", f"{name} is required", where=self.places.where(here)))
        self.doubtful.add(name)
        tree[here[-1]] = ""

    def _value(self, hint: Any, value: Any, here: tuple[str, ...]) -> bool:
        """Whether the value is valid."""
        section = config_names.section_type(hint)
        if section is not None and get_origin(hint) is not tuple and isinstance(value, dict):
            self.walk(section, value, here)
            return True
        if section is not None and get_origin(hint) is tuple and isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, dict):
                    self.walk(section, entry, (*here, f"[{index}]"))
            return all(isinstance(entry, dict) for entry in value) or self._wrong(hint, value, here)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            told = isinstance(value, str) and names_in(hint)
            return self._wrong(hint, value, here, f"Invalid value {value!r}" if told else str(error))
        return True

    def _wrong(self, hint: Any, value: Any, here: tuple[str, ...], said: str = "") -> Literal[False]:
        section, name = config_names.section_type(hint), format_path(here)
        if section is not None:
            header = f"[[{name}]]" if get_origin(hint) is tuple else f"[{name}]"
            said = f"it is a section: write {header} and its settings below"
        near = _suggest_choice(hint, value)
        self.errors.append(
            ConfigError(
                "config.type",
                f"{name} = {value!r}: {said}{_choices(hint, value, near)}",
                where=self.places.where(here),
                suggestion=near,
            )
        )
        return False

    def _unknown(self, here: tuple[str, ...], value: Any) -> None:
        table = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
        first, second = config_names.suggest_key, config_names.suggest_section
        found = (second(here, self.root) or first(here, self.root)) if table else first(here, self.root)
        hint, name = "", format_path(here)
        if found is not None:
            section = found.key if table else found.key.rpartition(".")[0]
            stands = f" it stands in [{section}]" if found.elsewhere and section and not table else ""
            hint = f"; did you mean {f'[{found.key}]' if table else found.key}?{stands}"
            self._doubt(found.key if found.elsewhere else format_path((*here[:-1], found.key.rpartition(".")[2])))
        self.doubtful.add(name)
        what = "section" if table else "setting"
        hint += _translations(name, value, self.root) if table else ""
        if found is None and (why := config_names.reason_without(here, self.root)):
            hint += f": {why}"
        self.errors.append(
            ConfigError(
                "config.unknown_key",
                f"{name} is not a {what}{hint}",
                where=self.places.where(here),
                suggestion=found.key if found else "",
            )
        )

    def _doubt(self, key: str) -> None:
        """The values of the setting that was probably meant, or of all settings in a section, are unknown."""
        within = [name for name in config_names.list_keys(self.root) if name.startswith(f"{key}.")]
        self.doubtful |= {key, *within}


def _translations(name: str, value: Any, root: type[Section]) -> str:
    """Our names of the settings in another trainer's table, or why there are none."""
    theirs = dict(config_names.flatten(value, f"{name}.")) if isinstance(value, dict) else {}
    known = [f"{key} is {found}" for key in theirs if (found := config_names.stands_for(key))]
    known += [
        f"{key} is not needed: {why}"
        for key in theirs
        if not config_names.stands_for(key) and (why := config_names.reason_without(key.split("."), root))
    ]
    if not known:
        return ""
    more = f", and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return f"; {', '.join(known[:SHOWN])}{more}; `asyncrl init --from FILE` translates a whole file"


def _suggest_choice(hint: Any, value: Any) -> str:
    options = [option for option in _literals(hint) if isinstance(option, str)]
    if not isinstance(value, str):
        return ""
    other = VALUES.get(value.lower(), "")
    return other if other in options else (difflib.get_close_matches(value.lower(), options, n=1) or [""])[0]


def _choices(hint: Any, value: Any, near: str) -> str:
    options = [option for option in _literals(hint) if isinstance(option, str) and option]
    if names_in(hint) and not options:
        return "; give 'module:name' or 'file.py:name'"
    if not options or not isinstance(value, str):
        return ""
    own = ", or your own as 'module:name' or 'file.py:name'" if names_in(hint) else ""
    return f"; one of {', '.join(options)}{own}" + (f"; did you mean {near!r}?" if near else "")


def _literals(hint: Any) -> Iterable[Any]:
    if names := names_in(hint):
        yield from names
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        for option in get_args(hint):
            yield from _literals(option)


def independent_errors(errors: Iterable[AsyncRLError], doubtful: Iterable[str]) -> list[AsyncRLError]:
    """The errors that mention no setting with an unknown value."""
    names = [re.escape(name) for name in {*doubtful, *(re.sub(r"\[\d+\]", "", name) for name in doubtful)}]
    if not names:
        return list(errors)
    said = re.compile(rf"(?<![\w.])(?:{'|'.join(names)})(?![\w])")
    return [error for error in errors if not said.search(f"{error.where} {error.message}")]
