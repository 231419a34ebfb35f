"""The simulated device is as strict as a real one where the other tests rely on it."""

from __future__ import annotations

from pathlib import Path

from device_run import python

CODE = """
import torch, torch_npu
from torch_npu import _C
value = torch.arange(4.0, device="npu")
assert (value * 2).cpu().tolist() == [0, 2, 4, 6] and str(value.device) == "npu:0"
to = torch.empty(4, pin_memory=True).fill_(-1)
to.copy_(value, non_blocking=True)
value.zero_()
assert to.tolist() == [-1] * 4, "it is not there before a synchronization"
torch.npu.synchronize()
assert to.tolist() == [0, 1, 2, 3], "and then it is what was there at the call"
late = torch.empty(4, pin_memory=True).fill_(-1)
late.copy_(torch.ones(4, device="npu"), non_blocking=True)
event = torch.npu.Event()
event.record()
event.synchronize()
assert late.tolist() == [1] * 4
found = _C.copies()
assert (found["to_host"], found["blocking"], found["unpinned"]) == (3, 1, 1), found
before = _C.used(1)
with torch.npu.device(1):
    block = torch.empty(1000, device="npu")
assert block.device.index == 1 and _C.used(1) - before >= 4000 and _C.peak(1) >= 4000
try:
    torch.empty(1, device="npu:9")
except RuntimeError as error:
    assert "there is no npu" in str(error)
else:
    raise AssertionError("npu:9 was found")
import torch.distributed as dist
group = dist.Backend._plugins["HCCL"].creator_fn
store = dist.HashStore()
class Given: group_rank, group_size, timeout = 0, 1, __import__("datetime").timedelta(seconds=5)
Given.store = store
made = group(Given, None)
made.broadcast(torch.ones(2, device="npu"), 0).wait()
try:
    made.broadcast(torch.ones(2), 0)
except RuntimeError as error:
    assert "hccl: a tensor on cpu" in str(error)
else:
    raise AssertionError("a tensor of the host was taken")
print("as strict as it must be")
"""


def test_the_simulation_is_strict(library: Path, tmp_path: Path) -> None:
    done = python(CODE, library, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as strict as it must be" in done.stdout


ENGINE = """
import numpy as np, torch, torch_npu
from torch_npu import _C
from asyncrl.wire import Tensor
from producers.engines.hf.layout import HostBytes

torch.manual_seed(0)
kept = [torch.randn(300, 7), torch.randn(41), torch.randn(2000, 9), torch.zeros(0, 4), torch.randn(5)]
there = [one.to("npu") for one in kept]
cpu, npu = HostBytes(torch.device("cpu")), HostBytes(torch.device("npu", 0))
for tensors in ([0, 1, 2, 3, 4], [4], [2, 2, 1]):
    assert npu.digest([there[n] for n in tensors]) == cpu.digest([kept[n] for n in tensors])
room = [np.zeros(one.nbytes, np.uint8) for one in kept]
npu.read(there, room)
assert [one.tobytes() for one in room] == [one.numpy().tobytes() for one in kept]
targets = [torch.empty(one.shape, dtype=torch.float64, device="npu") for one in kept]
npu.load([(to, data, Tensor("", "F32", tuple(one.shape), 0, 0, one.nbytes))
          for to, data, one in zip(targets, room, kept, strict=True)])
found = _C.copies()
assert found["to_host"] > 9 and found["blocking"] == found["unpinned"] == 0, found
assert all(bool((to.cpu() == one.double()).all()) for to, one in zip(targets, kept, strict=True))
print("as on the host")
"""


def test_an_engine_reads_and_loads_weights_through_pinned_memory(library: Path, tmp_path: Path) -> None:
    done = python(ENGINE, library, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as on the host" in done.stdout
