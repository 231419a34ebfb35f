"""Transport `disk` beyond the contract: whole or not at all, what is kept, who else can read it, object stores."""

import builtins
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import warm
from safetensors import safe_open
from transport_rigs import DiskRig, digests_from, run_round

from asyncrl.errors import ConfigError, Unavailable
from weightsync.transports.base import TransportError, TransportUnusable
from weightsync.transports.disk import DiskInbox, DiskOutbox
from weightsync.transports.object_store import FileFolders

ROOT = Path(__file__).parents[2]


def versions(root: Path) -> list[str]:
    return sorted(path.name[:9] for path in root.iterdir())


def test_safetensors_loads_the_files_and_the_index_names_them(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, hops=True)
    folder = Path(rig.address)
    index = msgspec.json.decode((folder / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in rig.plan.tensors)
    buckets = rig.slot.buckets(rig.plan.bucket_bytes)
    for tensor in rig.plan.tensors:
        with safe_open(folder / index["weight_map"][tensor.name], framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            found = file.get_tensor(tensor.name)
        assert tuple(found.shape) == tensor.shape
        raw = bytes(buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes])
        flat = found.reshape(-1)
        assert (flat.view(np_bytes()).numpy().tobytes() if flat.numel() else b"") == raw
    rig.close()


def np_bytes() -> Any:
    import torch

    return torch.uint8


def test_the_last_two_are_kept_and_strange_things_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    root.mkdir()
    (root / "v-mine").mkdir()
    (root / ".v00000099-killed").mkdir()
    rig = DiskRig(tmp_path)
    rig.publish()
    rig.publish()
    assert versions(root) == ["v-mine", "v00000002", "v00000003"]
    again = DiskOutbox(str(root))
    again.open()
    before = (Path(rig.address) / "manifest.json").stat().st_mtime_ns
    assert again.offer(rig.held) == rig.address  # after a restart: it lies there, it is not written again
    assert (Path(rig.address) / "manifest.json").stat().st_mtime_ns == before
    rig.outbox = again
    rig.publish()
    assert versions(root) == ["v-mine", "v00000003", "v00000004"]
    assert run_round(rig, 1, 1) == [rig.expected()]
    rig.close()


def test_an_old_version_that_cannot_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, remove = tmp_path / "weights", FileFolders.remove
    rig = DiskRig(tmp_path)
    rig.publish()
    with monkeypatch.context() as patched:
        patched.setattr(FileFolders, "remove", lambda *_: os.fsync(1_000_000))  # OSError
        rig.publish()
    assert versions(root) == ["v00000001", "v00000002", "v00000003"]
    assert run_round(rig, 1, 1) == [rig.expected()]
    assert FileFolders.remove is remove
    rig.publish()
    assert versions(root) == ["v00000003", "v00000004"]
    rig.close()


def test_a_folder_that_cannot_be_read_is_a_transfer_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DiskRig(tmp_path)
    for name in ("visible", "size"):
        with monkeypatch.context() as patched:
            patched.setattr(FileFolders, name, lambda *_: os.fsync(1_000_000))
            with pytest.raises(TransportError, match="Bad file descriptor"):
                DiskInbox(rig.instruction()).open()
    rig.close()


def test_a_version_that_lies_there_damaged_is_written_again(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path)
    (Path(rig.address) / "manifest.json").write_bytes(b"\xff{")
    with pytest.raises(TransportError, match="damaged"):
        digests_from(rig, rig.inbox())
    rig.outbox.offer(rig.held)
    assert run_round(rig, 1, 1) == [rig.expected()]
    rig.close()


@pytest.mark.parametrize("hops", [False, True])
def test_sizes_are_checked_before_a_byte_is_taken(tmp_path: Path, hops: bool) -> None:
    rig = DiskRig(tmp_path, hops=hops)
    for path in sorted(Path(rig.address).glob("*")):
        kept = path.read_bytes()
        for wrong in (kept[:-1], kept + b"x"):
            path.write_bytes(wrong)
            if path.name != "manifest.json" or wrong == kept[:-1]:
                with pytest.raises(TransportError):
                    DiskInbox(rig.instruction()).open()
        path.write_bytes(kept)
    assert run_round(rig, 1, 1) == [rig.expected()]
    rig.close()


def test_another_version_under_the_name_is_refused(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, hops=True)
    told = rig.instruction()
    other = msgspec.structs.replace(told.manifest, digest="0" * 32)
    with pytest.raises(TransportError, match="another version"):
        DiskInbox(msgspec.structs.replace(told, manifest=other)).open()
    strange = (msgspec.structs.replace(told.hops[-1], base_digest="e" * 32),)
    with pytest.raises(TransportError, match="another version"):
        DiskInbox(msgspec.structs.replace(told, hops=strange)).open()
    with pytest.raises(TransportUnusable, match="not visible"):
        DiskInbox(msgspec.structs.replace(told, address="/nowhere/at/all")).open()
    rig.close()


def test_a_file_that_ends_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path)
    inbox = rig.inbox()
    inbox.open()
    for path in Path(rig.address).glob("*.safetensors"):
        os.truncate(path, 900)
    with pytest.raises(TransportError, match="too early"):
        inbox.read(0)
    inbox.close()
    rig.close()


KILLED = """
import sys
sys.path.insert(0, "tests/contract")
from pathlib import Path
from asyncrl.runtime import failpoints
from transport_rigs import DiskRig
rig = DiskRig(Path(sys.argv[1]), hops=True)
print(rig.address, flush=True)
failpoints.arm({"ASYNCRL_FAILPOINT": sys.argv[2]})
rig.publish()
"""


@pytest.mark.parametrize("place", ["write_blob:1", "write_blob:2", "write_blob:5", "write_blob:9", "before_rename:1"])
def test_killed_while_it_writes_the_version_before_is_the_last_one(tmp_path: Path, place: str) -> None:
    name, _, count = place.partition(":")
    command = [sys.executable, "-c", KILLED, str(tmp_path), f"weightsync.{name}:kill:{count}"]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    root = tmp_path / "weights"
    assert [name for name in versions(root) if not name.startswith(".")] == ["v00000001"]
    assert any(path.name.startswith(".v00000002") for path in root.iterdir())
    rig = DiskRig(tmp_path, hops=True)  # the learner comes back and publishes the same version again
    assert str(rig.address) == done.stdout.splitlines()[0]
    assert versions(root) == ["v00000001"]
    assert run_round(rig, 1, 1) == [rig.expected()]
    rig.close()


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DiskRig(tmp_path)
    write, calls = os.write, []

    def full(descriptor: int, data: Any) -> int:
        calls.append(1)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable) as caught:
        rig.publish()
    assert caught.value.code == "disk.full"
    monkeypatch.undo()
    assert versions(tmp_path / "weights") == ["v00000001"]
    with pytest.raises(ConfigError, match="cannot write"):
        DiskOutbox("/proc/nothing").open()
    rig.close()


# ---------------------------------------------------------------- object stores


class MemoryRig(DiskRig):
    """fsspec's store in memory: in one process, and otherwise like any other."""

    root = "memory://bucket/run/weights"


@pytest.mark.parametrize("hops", [False, True])
def test_an_object_store_by_url(tmp_path: Path, hops: bool) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    rig = MemoryRig(tmp_path, hops=hops)
    assert rig.address.startswith("memory://bucket/run/weights/v00000001-")
    assert run_round(rig, 2, 1) == [rig.expected()] * 2
    told = rig.instruction()
    rig.publish()
    rig.publish()
    assert len(store.ls("/bucket/run/weights", detail=False)) == 2
    assert run_round(rig, 1, 1) == [rig.expected()]
    with pytest.raises(TransportError, match="not there"):
        DiskInbox(told).open()
    path = rig.address.removeprefix("memory:/") + "/manifest.json"
    store.rm(path)  # without its last file a version is none
    with pytest.raises(TransportError, match="not there"):
        DiskInbox(rig.instruction()).open()
    store.rm("/bucket", recursive=True)
    rig.close()


def test_without_fsspec_a_url_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **rest: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ImportError(name)
        return real(name, *args, **rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError) as caught:
        DiskOutbox("s3://bucket/run").open()
    assert caught.value.code == "config.extra" and "asyncrl[object-store]" in caught.value.remedy


def test_a_store_whose_package_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="nostore"):
        DiskOutbox("nostore://bucket/run").open()
