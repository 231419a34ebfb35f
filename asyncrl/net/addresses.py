"""Addresses of sockets: `ipc://` files that belong to the owner alone, and the rule about open ports.

Guarantees: an `ipc://` socket has mode 0600 in a folder of mode 0700; an address beyond loopback needs CURVE keys.
"""

from __future__ import annotations

import hashlib
import os
import socket as socketlib
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlparse

from asyncrl.errors import ConfigError
from asyncrl.net.keys import Keys

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
MAX_IPC_PATH = 100  # sun_path holds 108 bytes
UNUSED_S = 60.0  # in a younger temporary folder a service may be about to listen
LOOK_S = 0.25  # interval of checks during a wait


def ipc_address(folder: Path, name: str) -> str:
    """An `ipc://` address in the folder, or in a private temporary folder if the path is too long. Creates nothing."""
    path = folder.resolve() / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        short = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=6).hexdigest()
        path = Path(tempfile.gettempdir()) / f"{short_folder_prefix()}{short}" / f"{name}.sock"
    return f"ipc://{path}"


def short_folder_prefix() -> str:
    return f"asyncrl-{os.getuid()}-"


def prepare_folder(address: str) -> None:
    """Create the private folder of an `ipc://` socket; remove temporary ones that killed services left."""
    path = Path(address.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.parent != Path(tempfile.gettempdir()) or not path.parent.name.startswith(short_folder_prefix()):
        return
    if path.parent.stat().st_uid != os.getuid():  # its name is predictable, and the parent folder is shared
        raise ConfigError("config.network", f"{path.parent} belongs to another user", where="network")
    for other in path.parent.parent.glob(f"{short_folder_prefix()}*"):
        with suppress(OSError):  # its owner may remove it first
            if other != path.parent and time.time() - other.stat().st_mtime > UNUSED_S:
                remove_unused(other)


def remove_unused(folder: Path) -> None:
    """Remove a folder that holds only sockets without a listener. Never raises."""
    with suppress(OSError):
        for path in folder.iterdir():
            if not path.is_socket() or _listens(path):
                return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _listens(path: Path) -> bool:
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.settimeout(LOOK_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # a full backlog or a stopped owner: it may be in use
            return True
    return True


def check_bind(address: str, *, keys: Keys | None, insecure: bool = False) -> None:
    """Refuse to listen beyond this host without keys (`config.network`)."""
    if urlparse(address).scheme not in ("ipc", "tcp", "inproc"):
        raise ConfigError("config.network", f"{address!r} is not ipc:// or tcp://", where="network")
    if is_exposed(address) and keys is None and not insecure:
        raise ConfigError("config.network", f"{address} is reachable from other hosts and has no keys", where="network")
    if keys is not None and not keys.server_secret:
        raise ConfigError(
            "config.network",
            f"{address}: the key of a {keys.role} cannot serve",
            where="network",
            remedy="give services and the learner the server.key of the run",
        )


def is_exposed(address: str) -> bool:
    """Whether other hosts can reach the address."""
    parsed = urlparse(address)
    return parsed.scheme == "tcp" and parsed.hostname not in LOOPBACK
