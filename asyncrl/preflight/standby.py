"""Checks of a buffer with a stand-by on this machine: its address, and a run folder that the other host can read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.rules.standby import is_local
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.net.probe import find_free
from asyncrl.runtime.host_facts import filesystem

#: File systems that one host alone sees.
LOCAL = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "overlay", "aufs", "tmpfs", "ramfs"]
)


def check_folder(config: Config, mounts: Path = Path("/proc/mounts")) -> Iterator[AsyncRLError]:
    """The stand-by reads payloads, images and history in the run folder."""
    if not config.network.standby or is_local(config):
        return
    kind = filesystem(Path(config.run.dir), mounts)
    if kind in LOCAL:
        yield ConfigError(
            "config.conflict",
            f"it is on a local file system ({kind}): a stand-by on another host cannot read the payloads there",
            where=f"run.dir = {config.run.dir!r}",
            remedy="put run.dir on a file system that both hosts mount (NFS, Lustre, CephFS)",
        )


def check_address(config: Config) -> Iterator[AsyncRLError]:
    """A stand-by was asked for, and one of the buffer's two addresses belongs to this host."""
    if not config.network.standby:
        what = "--standby needs network.standby, the address where it will listen"
        yield ConfigError("config.missing", what, where="network.standby")
        return
    free, reasons = find_free((config.network.standby, config.network.buffer))
    if not free:
        what = f"a stand-by can listen at neither address: {reasons}"
        yield ConfigError("config.network", what, where=f"network.standby = {config.network.standby!r}")
