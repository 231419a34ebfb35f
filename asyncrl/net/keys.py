"""The keys of a run: which processes may join it or lead it, and the proof that weights come from the learner.

`server.key` is for the services and the learner, `join.key` for producers and reward workers. Guarantees:
1. a key file is readable only by its owner, whatever the umask, and is never overwritten;
2. `read_keys` refuses a file that others can read or own, a damaged one, and files of other kinds;
3. a join key can neither replace a service nor lead the run: it lacks the secrets of both. Workers read only this file
   (`worker_file`), and keep nothing else of a given key;
4. `repr` shows no secret, so logs and tracebacks hold none;
5. a signature covers its purpose and every part with its length: parts cannot be confused.

Example: `keys.sign("manifest", b"...")` is an HMAC-SHA256 by the run's own key, which both files hold.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError

SERVER_FILE, JOIN_FILE = "server.key", "join.key"
OWNER, JOINED = "owner", "join"  # roles of a peer, by its key
LARGEST_FILE = 16 << 10


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CURVE keys (Z85 text) and the signing key. A join file lacks the secrets of services and owner."""

    server_public: str
    join_public: str
    join_secret: str
    run_key: str  # hex
    server_secret: str = ""
    owner_public: str = ""
    owner_secret: str = ""

    @property
    def leads(self) -> bool:
        """Whether the holder may serve and lead the run."""
        return bool(self.server_secret and self.owner_secret)

    @property
    def client_public(self) -> str:
        """Public key of this holder."""
        return self.owner_public or self.join_public

    @property
    def client_secret(self) -> str:
        """Secret half of `client_public`."""
        return self.owner_secret or self.join_secret

    @property
    def known(self) -> dict[str, str]:
        """Public keys that a service admits, and the roles of their holders."""
        clients = {self.join_public: JOINED, self.owner_public: OWNER}
        return {public: name for public, name in clients.items() if public}

    def join_keys(self) -> Keys:
        """The keys without the secrets of services and the owner."""
        return msgspec.structs.replace(self, server_secret="", owner_public="", owner_secret="")

    def among_workers(self) -> Keys:
        """Keys for sockets between workers: all of them hold only the join key."""
        return msgspec.structs.replace(self.join_keys(), server_public=self.join_public, server_secret=self.join_secret)

    def sign(self, purpose: str, *parts: bytes) -> str:
        """Hex HMAC of the parts for a purpose."""
        digest = hmac.new(bytes.fromhex(self.run_key), digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def verify(self, signature: str, purpose: str, *parts: bytes) -> bool:
        """Whether the signature belongs to this run; compared in constant time."""
        return hmac.compare_digest(signature.encode(), self.sign(purpose, *parts).encode())

    def __repr__(self) -> str:
        return f"Keys({'server' if self.leads else 'join'})"

    __str__ = __repr__

    def __rich_repr__(self):  # type: ignore[no-untyped-def]
        yield "server" if self.leads else "join"


def make_keys() -> Keys:
    """New keys of a run."""
    import zmq

    texts = [half.decode() for _ in range(3) for half in zmq.curve_keypair()]
    server_public, server_secret, owner_public, owner_secret, join_public, join_secret = texts
    return Keys(
        server_public, join_public, join_secret, secrets.token_hex(32), server_secret, owner_public, owner_secret
    )


def join_path(path: Path) -> Path:
    """The join file of a server file: `server.key` has `join.key`, `run.key` has `run.join.key`."""
    return path.with_name(JOIN_FILE if path.name == SERVER_FILE else f"{path.stem}.join{path.suffix}")


def worker_file(path: Path) -> Path:
    """The key file of a producer or reward worker: the join file in the same folder, if it exists or will exist. Raises
    `config.network` if the two files do not belong together: otherwise the sockets would just stay silent.
    """
    join = join_path(path)
    if not path.exists():
        return join
    if not join.is_file():
        return path
    if read_keys(join) != read_keys(path).join_keys():
        remedy = f"remove both and make keys with: asyncrl keys {path.parent}"
        raise ConfigError(
            "config.network", f"{path.name} holds other keys than this one", where=str(join), remedy=remedy
        )
    return join


def write_keys(path: Path) -> Keys:
    """Create the keys of a run: a server file at `path` and its join file. Raises `config.network`."""
    keys = make_keys()
    _write(join_path(path), keys.join_keys())
    _write(path, keys)
    return keys


def _write(path: Path, keys: Keys) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            "config.network",
            "a key file is never overwritten: its holders would be locked out",
            where=str(path),
            remedy="remove it first, or choose another folder",
        ) from None
    except OSError as error:
        raise ConfigError("config.network", f"key file: {error.strerror}", where=str(path)) from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(msgspec.json.format(msgspec.json.encode(keys, order="deterministic"), indent=1) + b"\n")


def read_keys(path: Path) -> Keys:
    """The keys of a file. Raises `config.network` if it is missing, damaged, or owned or readable by others."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            _check_mode(path, about)
            keys = msgspec.json.decode(file.read(LARGEST_FILE), type=Keys)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(
            "config.network",
            f"key file: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            remedy="make keys with: asyncrl keys DIR",
        ) from None
    _check_keys(path, keys)
    return keys


def _check_mode(path: Path, about: os.stat_result) -> None:
    if stat.S_IMODE(about.st_mode) & 0o077:
        remedy = f"chmod 600 {path}"
        raise ConfigError("config.network", "key file is readable by others", where=str(path), remedy=remedy)
    if about.st_uid not in (os.getuid(), 0):  # a scheduler may mount it as root's
        raise ConfigError("config.network", f"key file belongs to user {about.st_uid}", where=str(path))


def _check_keys(path: Path, keys: Keys) -> None:
    """Every key must decode to 32 bytes: with a wrong one the socket would just stay silent."""
    from zmq.utils import z85

    try:
        given = [getattr(keys, name) for name in keys.__struct_fields__ if name != "run_key"]
        right = all(len(z85.decode(text)) == 32 for text in given if text) and len(bytes.fromhex(keys.run_key)) == 32
    except (ValueError, KeyError, ArithmeticError, LookupError, TypeError):
        right = False
    if not right or not all((keys.server_public, keys.join_public, keys.join_secret)):
        raise ConfigError(
            "config.network",
            "key file: its keys are damaged",
            where=str(path),
            remedy="copy it again from where it was made",
        )
