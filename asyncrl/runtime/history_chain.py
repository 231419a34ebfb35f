"""The chain of `history.jsonl`: the last line of every drain of the buffer seals everything before it.

    {"t":1760000000.1,"e":"unscored","g":7}
    {"t":1760000000.1,"e":"ready","g":7,"chain":"6c5f...","sign":"09ab..."}

`chain` is the head: blake3-128 over the head and the signature of the seal before and all bytes since, without the two
fields themselves. `sign` (with `log.sign`) is a keyed blake3-128 of the head. Guarantees:
1. a byte that is changed, a line that is removed, added or moved, changes every later head;
2. lines without a seal (of an older build, of a drain that a kill cut) belong to the next seal;
3. the key is derived from the secrets of `server.key`: a guest's key can neither sign nor check.

>>> chain = Chain(); chain.seal(b'{"e":"end"}\\n')
b'{"e":"end","chain":"7aec69faded383c2c463d1b1cfa31afc"}\\n'
"""

from __future__ import annotations

import hmac
import re
from typing import NamedTuple

from blake3 import blake3

from asyncrl.net.keys import Keys
from asyncrl.wire import Buffer

DIGEST_BYTES = 16
MARK = b',"chain":"'
_SEAL = re.compile(rb',"chain":"([0-9a-f]{32})"(?:,"sign":"([0-9a-f]{32})")?\}\n\Z')
_SEAL_BYTES = 100  # longer than a seal


class Seal(NamedTuple):
    """The seal of a line; `start` is where its fields begin."""

    head: str
    sign: str
    start: int


def find_seal(line: bytes) -> Seal | None:
    """The seal of a complete line; None without one."""
    if MARK not in line[-_SEAL_BYTES:] or (found := _SEAL.search(line)) is None:
        return None
    return Seal(found[1].decode(), (found[2] or b"").decode(), found.start())


def signing_key(keys: Keys | None) -> bytes:
    """The key of the signatures; empty for the key of a guest, or for none."""
    if keys is None or not keys.leads:
        return b""
    secrets = keys.server_secret + keys.secret
    return blake3(secrets.encode(), derive_key_context="asyncrl 2026-11 signatures of histories").digest()


class Chain:
    """Follows a history, or continues it. `head` is that of the newest seal; empty before the first one."""

    def __init__(self, key: bytes = b"") -> None:
        self.head = ""
        self._key = key
        self._hash = blake3()

    def add(self, data: Buffer) -> None:
        """Bytes that no seal covers yet."""
        self._hash.update(data)

    def restart(self, seal: Seal) -> None:
        """Continue after this seal."""
        self.head = seal.head
        self._hash = blake3(f"{seal.head}{seal.sign}".encode())

    def seal(self, lines: bytes) -> bytes:
        """The lines of a drain with the seal in the last one."""
        self.add(lines)
        head = self._hash.hexdigest(length=DIGEST_BYTES)
        sign = self._sign(head) if self._key else ""
        self.restart(Seal(head, sign, 0))
        fields = f',"chain":"{head}"' + (f',"sign":"{sign}"' if sign else "")
        return lines[:-2] + fields.encode() + lines[-2:]

    def follow(self, line: bytes, seal: Seal) -> bool:
        """Whether this sealed line follows from what came before. The chain continues from its seal in either case."""
        self.add(line[: seal.start] + b"}\n")
        follows = self._hash.hexdigest(length=DIGEST_BYTES) == seal.head
        self.restart(seal)
        return follows

    def is_signed(self, seal: Seal) -> bool:
        """Whether the holder of the key has signed this head; compared in constant time."""
        return bool(self._key) and hmac.compare_digest(self._sign(seal.head), seal.sign)

    def _sign(self, head: str) -> str:
        return blake3(head.encode(), key=self._key).hexdigest(length=DIGEST_BYTES)
