"""Transport `local` beyond the contract: which files it maps."""

from pathlib import Path

import msgspec
import pytest
from transport_rigs import LocalRig

from weightsync.transports.base import TransportUnusable
from weightsync.transports.shared_memory import LocalInbox


def test_local_refuses_files_that_are_not_slots(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    strange, small, link = tmp_path / "secret", tmp_path / "asyncrl-small", tmp_path / "asyncrl-link"
    strange.write_bytes(bytes(100_000))
    small.write_bytes(b"x")
    link.symlink_to(rig.slot.path)
    for path in (strange, small, link, tmp_path / "asyncrl-none"):
        with pytest.raises(TransportUnusable, match=path.name):
            LocalInbox(msgspec.structs.replace(rig.instruction(), address=str(path))).open()
    rig.close()
