"""Signatures of manifests: the learner signs with the run's key, a receiver checks.

Most transports do not use CURVE, and weights pass through services and other members. The digest in the manifest
protects them. Guarantees:
1. the signature covers every other field of the manifest: version, layout, digests, encoding, base and adapter;
2. without keys (sockets in a private folder, loopback) nothing is signed and no signature is required.
"""

from __future__ import annotations

import msgspec

from asyncrl.net.keys import Keys
from asyncrl.wire import Manifest

PURPOSE = "manifest"


def sign(manifest: Manifest, keys: Keys | None) -> Manifest:
    """The manifest with its signature; unchanged without keys."""
    if keys is None:
        return manifest
    return msgspec.structs.replace(manifest, signature=keys.sign(PURPOSE, _signed_bytes(manifest)))


def is_genuine(manifest: Manifest, keys: Keys | None) -> bool:
    """Whether the run's key signed it; true without keys."""
    return keys is None or keys.verify(manifest.signature, PURPOSE, _signed_bytes(manifest))


def _signed_bytes(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(manifest, signature=""))
