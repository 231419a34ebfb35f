"""The password of `buffer.redis_url`: kept out of every file and line that shows a configuration.

Guarantees:
1. the result of `hide_password` holds no password, in no part of the URL;
2. the password is in one file of the run, readable only by its owner, or in the environment of the buffer.

>>> hide_password("redis://user:secret@host:6379/0")
'redis://user:***@host:6379/0'
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from asyncrl.errors import ConfigError

HIDDEN = "***"
VARIABLE = "ASYNCRL_REDIS_PASSWORD"
FILE = "redis.password"  # in the folder of the run's store


def url_password(url: str) -> str:
    """The password in a URL; empty if it has none, or a hidden one."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query)).get("password", "")
    found = unquote(parts.password) if parts.password else query
    return "" if found == HIDDEN else found


def url_user(url: str) -> str:
    """The user in a URL; empty if it names none."""
    return unquote(urlsplit(url).username or "")


def hide_password(url: str) -> str:
    """The URL for logs and files."""
    return _set_password(url, HIDDEN) if url_password(url) else url


def restore_password(url: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """The URL for connecting: a hidden password is replaced from the environment, else from the file in the store's
    folder.

    Raises `config.missing` if neither has it.
    """
    env = os.environ if environment is None else environment
    given = env.get(VARIABLE, "")
    if HIDDEN not in url and (not given or url_password(url)):
        return url
    if not given:
        try:
            given = (folder / FILE).read_text()
        except OSError:
            raise ConfigError(
                "config.missing",
                f"its password is not known here: {VARIABLE} is not set",
                where="buffer.redis_url",
                remedy=f"set {VARIABLE} for the buffer, or launch it once with the password in the URL",
            ) from None
    return _set_password(url, quote(given, safe=""))


def keep(url: str, folder: Path) -> None:
    """Store the password of a URL for later starts, if it has one."""
    if not (password := url_password(url)):
        return
    path = folder / FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(password)


def _set_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    if "password=" in parts.query:
        pairs = [(name, HIDDEN if name == "password" else value) for name, value in parse_qsl(parts.query)]
        query = urlencode(pairs, safe="*").replace(f"password={HIDDEN}", f"password={password}")
        return parts._replace(query=query).geturl()
    user, _, host = parts.netloc.rpartition("@")
    name = re.split(":", user, maxsplit=1)[0]
    return parts._replace(netloc=f"{name}:{password}@{host}").geturl()
