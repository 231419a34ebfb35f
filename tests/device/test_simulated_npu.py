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
