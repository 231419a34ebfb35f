"""The fingerprint of a model folder: both ends of a run must agree on it before they exchange tokens or weights.

Guarantees:
1. it covers the model's shape (`config.json` without fields that change no tensor), the tokenizer with its chat
   template, and the dtype of the run; weights have their own digests;
2. it is 32 hex digits, the same on every host and Python version.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError

#: Fields of `config.json` that tools rewrite without changing the model.
IGNORED = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "_attn_implementation"}
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def model_fingerprint(path: str | Path, *, dtype: str) -> str:
    """Digest of the model folder's shape and tokenizer and of the run's dtype (`model.dtype`)."""
    folder = Path(path)
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, *UNREADABLE) as error:
        raise ConfigError("config.model", f"config.json: {error}", where=str(folder)) from None
    shape = {key: value for key, value in config.items() if key not in IGNORED}
    digest = hashlib.blake2b(msgspec.json.encode(shape, order="deterministic"), digest_size=16)
    digest.update(dtype.encode())
    for name in TOKENIZER_FILES:
        file = folder / name
        if file.exists():
            digest.update(name.encode() + b"\0" + hashlib.blake2b(file.read_bytes(), digest_size=16).digest())
    return digest.hexdigest()
