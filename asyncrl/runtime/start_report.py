"""What the checks of a role's start say to `asyncrl check`: lines of their standard output, among those of user code.

A line is `MARK` and a JSON list: ["error", code, message, where, remedy], ["finding", name, value, arithmetic] or
["note", text].
"""

from __future__ import annotations

import json
import re
import sys
import tomllib

import msgspec

from asyncrl.config import Config, all_keys
from asyncrl.errors import AsyncRLError

MARK = "start_check "


def read_settings() -> Config:
    """The resolved configuration on standard input. Its contradictions are reported elsewhere."""
    return msgspec.convert(tomllib.loads(sys.stdin.read()), Config)


def say(*words: str) -> None:
    print(MARK + json.dumps(words), flush=True)


def say_error(error: AsyncRLError, setting: str) -> None:
    """Report an error; `setting`: its place in the configuration, if the error names a file instead."""
    known = is_setting(error.where)
    where = error.where if known else setting
    message = error.message if known or not error.where else f"{error.where}: {error.message}"
    say("error", error.code, message, where, error.remedy)


def is_setting(where: str) -> bool:
    """Whether the place of an error is a setting or a section of a section, and not a file.

    >>> is_setting("environment.agent"), is_setting("reward[0].function = 'a:b'"), is_setting("data.jsonl")
    (True, True, False)
    """
    name = re.sub(r"\[\d+\]", "", where.partition(" ")[0])
    return "." in name and any(key == name or key.startswith(f"{name}.") for key in all_keys())
