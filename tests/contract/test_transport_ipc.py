"""Device memory shared between processes, as far as a CPU can show it: handles to files stand in for the device's."""

import base64
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import warm
from transport_rigs import PLAN, LocalRig, digest_of, digests_from

from asyncrl.wire import Instruction
from weightsync.transports.base import TransportError, TransportUnusable
from weightsync.transports.cuda_ipc import CudaHandles, DeviceInbox, DeviceOutbox

ROOT = Path(__file__).parents[2]


class FileHandles:
    """Buffers are files that both ends map."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[int, Path] = {}

    def make(self, nbytes: int) -> torch.Tensor:
        path = self.folder / f"buffer-{len(self.made)}"
        path.write_bytes(bytes(nbytes))
        buffer = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        self.made[buffer.data_ptr()] = path
        return buffer

    def export(self, buffer: torch.Tensor) -> bytes:
        return str(self.made[buffer.data_ptr()]).encode()

    def open(self, handle: bytes) -> torch.Tensor:
        path = Path(handle.decode())
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


class IpcRig(LocalRig):
    name = "ipc"

    def make_outbox(self) -> DeviceOutbox:
        self.handles = FileHandles(self.folder)
        return DeviceOutbox(self.handles)


@pytest.fixture
def rig(tmp_path: Path) -> IpcRig:
    return IpcRig(tmp_path)


def inbox(rig: IpcRig, told: Instruction | None = None) -> DeviceInbox:
    return DeviceInbox(told or rig.instruction(), handles=rig.handles)


CHILD = """
import sys
sys.path.insert(0, "tests/contract")
from pathlib import Path
import msgspec
from asyncrl.wire import Instruction
from test_transport_ipc import DeviceInbox, FileHandles
from weightsync.plan.digest import bucket_digest
from weightsync.plan.buckets import by_bucket
told = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Instruction)
inbox = DeviceInbox(told, handles=FileHandles(Path(".")))
inbox.open()
groups = by_bucket(told.tensors, len(told.manifest.bucket_bytes))
print(*(bucket_digest(group, inbox.read(number)) for number, group in enumerate(groups)))
"""


def test_another_process_maps_the_buckets(rig: IpcRig) -> None:
    done = warm.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        input=msgspec.msgpack.encode(rig.instruction()),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == list(rig.manifest.bucket_digests)


def test_two_buffers_take_turns_and_an_overwritten_one_shows(rig: IpcRig) -> None:
    first = inbox(rig)
    first.open()
    assert digest_of(rig, 0, memoryview(first.tensor(0).numpy())) == rig.manifest.bucket_digests[0]
    old = rig.manifest
    rig.publish()
    assert digests_from(rig, inbox(rig)) == list(rig.manifest.bucket_digests)
    assert digest_of(rig, 1, first.read(1)) == old.bucket_digests[1]
    rig.publish()
    assert len(rig.handles.made) == 2
    assert digest_of(rig, 1, first.read(1)) == rig.manifest.bucket_digests[1] != old.bucket_digests[1]
    first.close()
    with pytest.raises(TransportError, match="closed"):
        first.read(0)


def test_what_cannot_be_mapped_is_unusable_here(rig: IpcRig) -> None:
    told = rig.instruction()
    for path in rig.handles.made.values():
        path.unlink()
    with pytest.raises(TransportUnusable, match="cannot be mapped"):
        inbox(rig, told).open()
    content = msgspec.msgpack.encode((PLAN.bucket_bytes, b"\xff"))
    for address in ("ipc:", "ipc:%%%", "other:" + told.address[4:], "ipc:" + base64.b64encode(b"\xff\xfe").decode()):
        with pytest.raises(TransportError):
            inbox(rig, msgspec.structs.replace(told, address=address)).open()
    with pytest.raises(TransportUnusable):
        inbox(rig, msgspec.structs.replace(told, address="ipc:" + base64.b64encode(content).decode())).open()
    manifest = msgspec.structs.replace(told.manifest, bucket_bytes=(4,) * 5)
    with pytest.raises(TransportError, match="another layout"):
        inbox(rig, msgspec.structs.replace(told, manifest=manifest)).open()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_a_cuda_handle_is_unusable(rig: IpcRig) -> None:
    handle = msgspec.msgpack.encode(((8,), (1,), 0, (0, b"h" * 64, 8, 0, False, b"r", 0, b"e", False)))
    content = msgspec.msgpack.encode((PLAN.bucket_bytes, handle))
    told = msgspec.structs.replace(rig.instruction(), address="ipc:" + base64.b64encode(content).decode())
    with pytest.raises(TransportUnusable):
        DeviceInbox(told, handles=CudaHandles(torch.device("cuda", 0))).open()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_handles_round_trip_between_processes(tmp_path: Path) -> None:
    """Written for a GPU; has not run yet."""
    handles = CudaHandles(torch.device("cuda", 0))
    buffer = handles.make(1024)
    buffer.copy_(torch.arange(1024, dtype=torch.uint8))
    code = (
        "import sys, torch\nfrom weightsync.transports.cuda_ipc import CudaHandles\n"
        "found = CudaHandles(torch.device('cuda', 0)).open(sys.stdin.buffer.read())\nprint(int(found.long().sum()))"
    )
    done = warm.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input=handles.export(buffer),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert int(done.stdout) == int(buffer.long().sum()), done.stderr.decode()
