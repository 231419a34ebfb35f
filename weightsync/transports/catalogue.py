"""Transports by name, made from the configuration.

The packages of a transport are imported when it is first used: torch for `collective`, fsspec for `disk` at a URL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import WeightSyncConfig
from asyncrl.net.keys import Keys
from asyncrl.wire import Instruction
from weightsync.transports.base import Inbox, InboxMaker, Outbox

#: In the run folder, if `weightsync.disk_dir` is empty.
DISK_FOLDER = "weights"


def make_inboxes(config: WeightSyncConfig, *, keys: Keys | None = None) -> dict[str, InboxMaker]:
    """Makers of inboxes by transport name."""
    from weightsync.transports.shared_memory import LocalInbox, Maps

    maps = Maps()
    kept: list[Any] = []  # the groups of `collective`, once it was used

    def local(instruction: Instruction) -> Inbox:
        return LocalInbox(instruction, maps)

    def collective(instruction: Instruction) -> Inbox:
        from weightsync.transports.collective_inbox import CollectiveInbox
        from weightsync.transports.kept_groups import Groups

        kept.extend([] if kept else [Groups()])
        return CollectiveInbox(instruction, groups=kept[0])

    def stream(instruction: Instruction) -> Inbox:
        from weightsync.transports.stream import StreamInbox

        return StreamInbox(instruction, keys=keys, chunk_bytes=config.stream_chunk_bytes)

    def disk(instruction: Instruction) -> Inbox:
        from weightsync.transports.disk import DiskInbox

        return DiskInbox(instruction)

    return {"local": local, "collective": collective, "stream": stream, "disk": disk, "direct": collective}


def make_outbox(
    name: str, config: WeightSyncConfig, *, run_dir: Path, keys: Keys | None = None, insecure: bool = False
) -> Outbox:
    """The outbox of a transport except `local` (whose versions are in the staging slots). Raises KeyError."""
    if name in ("collective", "direct"):
        from weightsync.transports.collective import CollectiveOutbox

        return CollectiveOutbox(config.collective_host, timeout_s=config.timeout_s, backend=config.collective_backend)
    if name == "stream":
        from weightsync.transports.stream import StreamOutbox

        return StreamOutbox(config.stream_host, keys=keys, insecure=insecure)
    if name == "disk":
        from weightsync.transports.disk import DiskOutbox

        return DiskOutbox(config.disk_dir or str(run_dir / DISK_FOLDER))
    raise KeyError(name)
