"""Who says what the weights are: the learner signs every manifest with the run's key, a receiver checks it.

Weights travel outside of CURVE on most transports, and
by way of services and other members: what counts is their digest, and the digest is in the manifest. Guarantees:
1. the signature covers every other field of the manifest: version, layout, digests, encoding, base and adapter;
2. without keys (sockets in a private folder, loopback) nothing is signed and nothing is asked for.
"""

from __future__ import annotations

import msgspec

from asyncrl.net.keys import Keys
from asyncrl.wire import Manifest

PURPOSE = "manifest"


def signed(manifest: Manifest, keys: Keys | None) -> Manifest:
    """The manifest with its signature; as it is without keys."""
    if keys is None:
        return manifest
    return msgspec.structs.replace(manifest, signature=keys.sign(PURPOSE, _covered(manifest)))


def is_genuine(manifest: Manifest, keys: Keys | None) -> bool:
    """Whether the run's key signed it; true without keys."""
    return keys is None or keys.signed(manifest.signature, PURPOSE, _covered(manifest))


def _covered(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(manifest, signature=""))
