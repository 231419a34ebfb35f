"""The keys of a run: which processes may join it or lead it, and the proof that weights come from the learner.

`server.key` is for the services and the learner. Every other key has one role: a producer, a reward worker or an
observer. Guarantees:
1. a key file is readable only by its owner, whatever the umask, and is never overwritten; only the list of admitted
   keys in `server.key` changes;
2. `read_keys` refuses a file that others can read or own, a damaged one, and files of other kinds;
3. a guest's key can neither replace a service nor lead the run: it lacks the secrets of both. What its role may send is
   in `asyncrl.net.auth`;
4. `repr` shows no secret, so logs and tracebacks hold none;
5. a signature covers its purpose and every part with its length: parts cannot be confused.

Example: `keys.sign("manifest", b"...")` is an HMAC-SHA256 by the run's own key, which learner and producers hold.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError

Role = Literal["owner", "producer", "reward", "observer"]
OWNER: Role = "owner"
GUESTS: tuple[Role, ...] = ("producer", "reward", "observer")  # roles of the other keys
SERVER_FILE = "server.key"
LARGEST_FILE = 1 << 20
MOST_KEYS = 4096  # of a run
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that services admit: its name, for logs and errors, and the role of its holder."""

    name: str
    role: Role


def is_guest(holder: Holder | None) -> bool:
    """Whether a message came with the key of a guest; without keys there are none."""
    return holder is not None and holder.role != OWNER


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file. CURVE keys are Z85 text."""

    name: str
    role: Role
    server_public: str  # of the services
    public: str  # of this holder
    secret: str
    run_key: str = ""  # hex; owner and producers: signs the weights
    relay_public: str = ""  # owner and producers: of the sockets that producers pull weights from
    relay_secret: str = ""
    server_secret: str = ""  # owner
    admitted: dict[str, Holder] = {}  # owner: public key of a guest -> its holder

    @property
    def leads(self) -> bool:
        """Whether the holder may serve and lead the run."""
        return bool(self.server_secret)

    @property
    def known(self) -> dict[str, Holder]:
        """Public keys that a service admits, and their holders."""
        return {self.public: Holder(self.name, self.role), **self.admitted}

    def among_workers(self) -> Keys:
        """Keys for the sockets from which producers pull weights: one pair, which all producers and the owner hold."""
        public, secret = self.relay_public, self.relay_secret
        return Keys("relay", "producer", public, public, secret, server_secret=secret)

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
        return f"Keys({self.role} {self.name})"

    __str__ = __repr__

    def __rich_repr__(self):  # type: ignore[no-untyped-def]
        yield f"{self.role} {self.name}"


def _make_pair() -> tuple[str, str]:
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _make_guest(owner: Keys, role: Role, name: str) -> Keys:
    """A new key of a guest. Reward workers and observers have nothing to do with weights."""
    public, secret = _make_pair()
    shared = {name: getattr(owner, name) for name in ("run_key", "relay_public", "relay_secret")}
    return Keys(name, role, owner.server_public, public, secret, **(shared if role == "producer" else {}))


def key_path(path: Path, name: str) -> Path:
    """The file of a guest's key: `server.key` has `NAME.key` in its folder, `run.key` has `run.NAME.key`."""
    return path.with_name(f"{name}.key" if path.name == SERVER_FILE else f"{path.stem}.{name}{path.suffix}")


def worker_file(path: Path, role: Role) -> Path:
    """The key file of a producer or reward worker: the file of the role in the folder of a server file, or the file
    itself if it is one of this role. Raises `config.network` if there is none, or if the run does not admit it:
    otherwise the sockets would just stay silent.
    """
    own = key_path(path, role)
    if not path.exists():
        return own  # the first launch of a buffer makes both
    keys = read_keys(path)
    if keys.role == role:
        return path
    if not keys.leads:
        raise ConfigError("config.network", f"it is the key of a {keys.role}, not of a {role}", where=str(path))
    if not own.is_file() or read_keys(own).public not in keys.admitted:
        state = "is not a key of this run" if own.is_file() else "is missing"
        remedy = f"make a key of this role with: asyncrl keys {path.parent} --add {role} --name NAME; give it by --key"
        raise ConfigError("config.network", f"the key of a {role} {state}", where=str(own), remedy=remedy)
    return own


# ------------------------------------------------------------ files


def write_keys(path: Path) -> Keys:
    """Create the keys of a run: a server file at `path` and one file for each role. Raises `config.network`."""
    (server_public, server_secret), (public, secret), (relay_public, relay_secret) = (_make_pair() for _ in range(3))
    run_key = secrets.token_hex(32)
    owner = Keys(OWNER, OWNER, server_public, public, secret, run_key, relay_public, relay_secret, server_secret)
    guests = [_make_guest(owner, role, role) for role in GUESTS]
    owner = msgspec.structs.replace(owner, admitted={one.public: Holder(one.name, one.role) for one in guests})
    for one in guests:
        _write(key_path(path, one.name), one)
    _write(path, owner)
    return owner


def add_key(path: Path, role: Role, name: str) -> Path:
    """Make one more key and admit it. Running services notice it. Returns its file. Raises `config.network`."""
    owner = _read_owner(path)
    if not KEY_NAME.fullmatch(name) or name == OWNER:
        raise ConfigError("config.network", f"{name!r} is no name of a key: letters, digits, - and _", where=str(path))
    if any(holder.name == name for holder in owner.admitted.values()):
        raise ConfigError("config.network", f"there is a key {name} already", where=str(path))
    if len(owner.admitted) >= MOST_KEYS:
        raise ConfigError("config.network", f"a run has at most {MOST_KEYS} keys", where=str(path))
    guest = _make_guest(owner, role, name)
    _write(key_path(path, name), guest)
    _replace(path, msgspec.structs.replace(owner, admitted={**owner.admitted, guest.public: Holder(name, role)}))
    return key_path(path, name)


def revoke_key(path: Path, name: str) -> None:
    """Admit this key no more. Running services notice it. Raises `config.network` without such a key."""
    owner = _read_owner(path)
    kept = {public: holder for public, holder in owner.admitted.items() if holder.name != name}
    if len(kept) == len(owner.admitted):
        known = ", ".join(holder.name for holder in owner.admitted.values()) or "none"
        raise ConfigError("config.network", f"there is no key {name}; there are {known}", where=str(path))
    _replace(path, msgspec.structs.replace(owner, admitted=kept))


def _read_owner(path: Path) -> Keys:
    owner = read_keys(path)
    if not owner.leads:
        raise ConfigError("config.network", f"it is the key of a {owner.role}: only server.key admits", where=str(path))
    return owner


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
        file.flush()
        os.fsync(descriptor)


def _replace(path: Path, keys: Keys) -> None:
    """Replace a server file by one with another list of admitted keys."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    _write(temporary, keys)
    os.replace(temporary, path)


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

    sockets = [keys.server_public, keys.public, keys.secret, *keys.admitted]
    sockets += [text for text in (keys.relay_public, keys.relay_secret, keys.server_secret) if text]
    try:
        right = all(len(z85.decode(text)) == 32 for text in sockets)
        right = right and len(bytes.fromhex(keys.run_key)) == (32 if keys.role in (OWNER, "producer") else 0)
    except (ValueError, KeyError, ArithmeticError, LookupError, TypeError):
        right = False
    if not right or keys.leads != (keys.role == OWNER):
        raise ConfigError(
            "config.network",
            "key file: its keys are damaged",
            where=str(path),
            remedy="copy it again from where it was made",
        )
