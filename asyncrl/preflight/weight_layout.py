"""The settings that a version's digest depends on: a run that goes on from a checkpoint keeps them."""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config, mode
from asyncrl.errors import ConfigError

BACK = "set it back, or start anew in another run.dir"


def weight_layout(config: Config) -> dict[str, Any]:
    """The settings, by key."""
    if mode.streams(config):
        return {}
    sync = config.weightsync
    plain = config.model.dtype if sync.dtype == "auto" or sync.quantised else sync.dtype
    return {
        "weightsync.dtype": (plain, sync.dtype if sync.quantised else ""),
        "weightsync.bucket_bytes": sync.bucket_bytes,
        "weightsync.transport": "direct" if sync.transport == "direct" else "",
        "learner.lora.publish": mode.sends_adapters(config),
    }


def refuse_other_layout(old: Config, new: Config) -> None:
    """Raise `config.conflict` if versions have other digests under the new settings. The buffer knows the version of
    the checkpoint by its digest, and would refuse every sample of the same weights in another layout.
    """
    before, after = weight_layout(old), weight_layout(new)
    for key, value in before.items():
        if key in after and after[key] != value:
            by_model = key == "weightsync.dtype" and old.weightsync.dtype == new.weightsync.dtype
            what = "the version of the checkpoint would have another digest, and no sample of it would be accepted"
            raise ConfigError("config.conflict", what, where="model.dtype" if by_model else key, remedy=BACK)
