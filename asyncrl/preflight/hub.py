"""Replaces names on the hub (`model.hub`) by folders and files: `model.path`, `data.path`, `evaluation.path`.

`asyncrl check` asks the hub and says what a launch would fetch; a launch fetches it before any role starts.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError, error_for
from asyncrl.preflight.memory import format_bytes
from asyncrl.runtime import hub, modelscope
from asyncrl.runtime.data_files import split_paths

#: Section -> names of its split, the likeliest first.
SPLITS = {"data": ("train",), "evaluation": ("test", "validation", "val")}


class Settled(NamedTuple):
    """The configuration with local paths. `pending`: settings whose files a launch has to fetch first."""

    config: Config
    notes: list[str]
    errors: list[AsyncRLError]
    pending: frozenset[str]


def settle_hub(config: Config, *, fetch: bool, weights: bool = True) -> Settled:
    """`fetch`: also get what is not in the cache; without `weights`, of a model only its other files."""
    notes, errors, pending = list[str](), list[AsyncRLError](), set[str]()
    look_up, fetch_files = (
        (modelscope.look_up, modelscope.fetch) if config.model.hub == "modelscope" else (hub.look_up, hub.fetch)
    )

    def find(text: str, kind: hub.Kind, key: str, splits: tuple[str, ...] = ()) -> hub.OnHub | None:
        """Its files, on this machine; None if they are not here."""
        try:
            found = look_up(text, kind, splits)
            wanted = {name: size for name, size in found.files.items() if weights or not name.endswith(".safetensors")}
            found = found._replace(files=wanted)
            missing = sum(found.files.values())
            found = fetch_files(found, text, kind) if fetch and missing else found
        except ConfigError as error:
            errors.append(error_for(error.code, error.message, where=f"{key} = {text!r}", remedy=error.remedy))
            pending.add(key)
            return None
        here = fetch or not missing
        then = "in the cache" if here else f"{format_bytes(missing)} will be fetched"
        notes.append(f"{key}: {text} is revision {found.revision[:12]} on the hub, {then}")
        if here:
            return found
        pending.add(key)
        return None

    if hub.is_hub_name(config.model.path, "model") and (found := find(config.model.path, "model", "model.path")):
        config = _replace(config, "model", str(found.folder))
    for section, splits in SPLITS.items():
        parts = split_paths(getattr(config, section).path)
        paths: list[str] = []
        for part in parts:
            found = find(part, "dataset", f"{section}.path", splits) if hub.is_hub_name(part, "dataset") else None
            paths += [part] if found is None else [str(found.folder / name) for name in found.files]
        if paths != parts:
            config = _replace(config, section, ",".join(paths))
    return Settled(config, notes, errors, frozenset(pending))


def _replace(config: Config, section: str, path: str) -> Config:
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), path=path)})
