"""`asyncrl tune`: change settings of a running system, undo a change, list changes.

Guarantees:
1. values are read as TOML, a bare word is a string; a setting that cannot be tuned, an invalid value, and one that the
   buffer refuses (with its arithmetic) are one error each, and nothing changes;
2. the history records the change with its author (user@host) and number, for `asyncrl audit`;
3. `--list` needs no running system: it reads the history.
"""

from __future__ import annotations

import getpass
import os
import socket
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit.findings import moment_text
from asyncrl.audit.prove import Log
from asyncrl.config import load
from asyncrl.errors import AsyncRLError, ConfigError, Unavailable
from asyncrl.monitor.control import ServiceClient
from asyncrl.net.keys import Keys, read_keys
from asyncrl.runtime.host_facts import reachable
from asyncrl.runtime.run_dir import RunDir, buffer_address, run_keys

ASK_TIMEOUT_S = 10.0


def tune_command(
    folder: Path | None, settings: Sequence[str], *, undo: int | None, listed: bool, connect: str, key: str
) -> int:
    """Change, undo or list; returns 0 when the change is in force."""
    if (folder is None) == (not connect):
        raise ConfigError("usage", "give a run folder or --connect URL")
    if listed:
        if folder is None or settings or undo is not None:
            raise ConfigError("usage", "--list takes a run folder and nothing else")
        print(changes_text(RunDir(folder).require()))
        return 0
    if bool(settings) == (undo is not None):
        raise ConfigError("usage", "give key=value ..., or --undo N, or --list")
    if undo is not None and undo < 0:
        raise ConfigError("usage", f"--undo {undo}: changes are counted from 1; 0 is the configuration file")
    address, keys = _place(folder, connect, key)
    print(render(_ask(address, keys, parse_settings(settings), undo)))
    return 0


def change_settings(folder: Path, changes: Mapping[str, Any]) -> Any:
    """Change settings of a running run; the buffer's answer (`asyncrl.wire.Tuned`). `render` gives its text.

    Raises:
        AsyncRLError: `run.missing`, `net.unreachable`, `tune.refused`.
    """
    return _ask(*_place(folder, "", ""), dict(changes), None)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as an object. Raises `usage` for other words, and for a repeated key.

    >>> parse_settings(["max_staleness=4", "on_late=drop", "learner.algorithm.tis_cap=1.5"])
    {'max_staleness': 4, 'on_late': 'drop', 'learner.algorithm.tis_cap': 1.5}
    """
    changes: dict[str, Any] = {}
    for word in settings:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key or not text.strip():
            raise ConfigError("usage", f"{word!r} is not key=value")
        if key in changes:
            raise ConfigError("usage", f"{key} is given twice")
        try:
            changes[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key] = text.strip()  # a bare word is a string: on_late=drop
    return changes


def author() -> str:
    """`user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # not in the password file
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _place(folder: Path | None, connect: str, key: str) -> tuple[str, Keys | None]:
    keys = read_keys(Path(key)) if key else None
    if folder is None:
        return connect, keys
    config = load(RunDir(folder).require().config)
    return buffer_address(config), keys or run_keys(config)


def _ask(address: str, keys: Keys | None, changes: dict[str, Any], undo: int | None) -> Any:
    """The buffer's answer (`asyncrl.wire.Tuned`)."""
    if not reachable(address, timeout_s=ASK_TIMEOUT_S):  # immediate, while a request would wait for its deadline
        remedy = "start it; a run that has ended cannot be tuned: change its configuration and start it again"
        raise Unavailable("net.unreachable", f"the run is not running: nothing listens at {address}", remedy=remedy)
    with closing(ServiceClient(address, keys=keys, timeout_s=ASK_TIMEOUT_S)) as client:
        return client.tune(changes, author=author(), undo_to=-1 if undo is None else undo)


def render(answer: Any) -> str:
    """`change 3` and a line per setting, `old -> new`."""
    changed: dict[str, list[Any]] = msgspec.json.decode(answer.changed)
    lines = [f"change {answer.number} is in force" if changed else "nothing changed: it is so already"]
    lines += [f"  {key}: {format_value(old)} -> {format_value(new)}" for key, (old, new) in changed.items()]
    lines += [f"  note: {answer.note}"] if answer.note else []
    lines += [f"  undo: asyncrl tune RUN --undo {max(0, answer.number - 1)}"] if changed else []
    return "\n".join(lines)


def format_value(value: Any) -> str:
    """A value as in TOML; `unset` for a missing one."""
    return "unset" if value is None else msgspec.json.encode(value).decode()


def changes_text(run: RunDir) -> str:
    """All changes of a run in order, from its history."""
    lines = []
    for event in Log(run.history):
        if event.get("e") != "tune":
            continue
        try:
            when = moment_text(float(event["t"]))
            undo = " (undo)" if event.get("undo") else ""
            lines.append(
                f"{event['n']:>4}  {when}  {event['author']}  {event['key']}: {format_value(event['old'])} -> "
                f"{format_value(event['new'])}{undo}"
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"a tune event cannot be read: {error!r}"
            raise AsyncRLError("store.corrupt", what, where=str(run.history)) from None
    return "\n".join(lines) or "nothing was tuned: the settings are those of config.toml"
