"""Access to an HTTP page of a run: this host alone, or every host that sends a key, over TLS if there is a certificate.

Guarantee: an address beyond loopback needs a key of at least 16 characters in a file that only its owner can read.
"""

from __future__ import annotations

import hmac
import re
import ssl
from pathlib import Path
from typing import NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.net.addresses import LOOPBACK

_KEY = re.compile(r"[!-~]{16,}")
MAKE_KEY = "(umask 077; openssl rand -hex 32 > FILE)"


class Access(NamedTuple):
    """Where a page listens, and what it requires of a client."""

    host: str = "127.0.0.1"
    key: str = ""  # of `Authorization: Bearer KEY`; empty: none is required
    tls: ssl.SSLContext | None = None

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK

    def admits(self, authorization: str) -> bool:
        """Whether this value of the header `Authorization` has the key. Takes the same time for every wrong key."""
        scheme, _, key = authorization.partition(" ")
        return not self.key or (
            scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.key.encode())
        )

    def join_port(self, port: int) -> str:
        """`host:port`, as in a URL."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


LOCAL = Access()


def read_access(host: str, *, key_file: str = "", cert_file: str = "", where: str = "") -> Access:
    """The access that these settings give. `where`: the beginning of their names, for errors.

    Raises `config.network` for a host beyond loopback without a key, `config.file` and `config.type` for a file that
    cannot be used.
    """
    key, tls = "", None
    if key_file:
        place = f"{where}key_file"
        key = read_secret(key_file, where=place)
        if not _KEY.fullmatch(key):
            what = f"{key_file} is not one word of at least 16 ASCII characters"
            raise ConfigError("config.type", what, where=place, remedy=MAKE_KEY.replace("FILE", key_file))
    elif host not in LOOPBACK:
        what = f"other hosts can reach it, and {where}key_file is empty"
        remedy = f"{MAKE_KEY}, then set {where}key_file"
        raise ConfigError("config.network", what, where=f"{where}host = {host!r}", remedy=remedy)
    if cert_file:
        read_secret(cert_file, where=f"{where}cert_file")
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            tls.load_cert_chain(Path(cert_file).expanduser(), password=lambda: "")  # never asks a terminal
        except OSError as error:
            what = f"{cert_file} is not a PEM file of a certificate and its private key without a password: {error}"
            raise ConfigError("config.type", what, where=f"{where}cert_file") from None
    return Access(host, key, tls)


def read_secret(text: str, *, where: str) -> str:
    """The content of a file that only its owner can read. Raises `config.file` or `config.type`."""
    path = Path(text).expanduser()
    try:
        secret, mode = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        what = f"{text}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("config.file", what, where=where, remedy="write it, or correct the path") from None
    if not secret:
        raise ConfigError("config.type", f"{text} is empty", where=where)
    if mode & 0o077:
        what = f"{text} holds a secret and others may read it"
        raise ConfigError("config.type", what, where=where, remedy=f"chmod 600 {text}")
    return secret
