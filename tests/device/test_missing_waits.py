"""The simulated device finds what a real one mostly forgives: memory of the device that the host touches, and work that
uses memory before somebody waited for who writes it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from device_run import python
from test_simulated_npu import ENGINE

START = """
import ctypes, datetime, types
import torch, torch_npu
import torch.distributed as dist
main, side = torch.npu.current_stream(), torch.npu.Stream()
value, other = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
room = torch.empty(64, pin_memory=True).fill_(-1)
torch.npu.synchronize()
place = types.SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=1, timeout=datetime.timedelta(seconds=5))
group = dist.Backend._plugins["HCCL"].creator_fn(place, None)
"""


class Plant(NamedTuple):
    """Code that is right with the line `wait` in place of WAIT, and fails without it: it says `says`."""

    code: str
    wait: str
    says: str


PLANTS = {
    "a side stream reads too early": Plant(
        "value.add_(1)\nWAIT\nwith side: other.copy_(value)", "side.wait_stream(main)",
        "a copy reads memory that aten::add",
    ),
    "the main stream reads too early": Plant(
        "with side: value.add_(1)\nWAIT\nvalue * 2", "main.wait_stream(side)", "aten::mul"
    ),
    "an event is recorded too early": Plant(
        "event = torch.npu.Event()\nwith side:\n    event.record()\n    value.add_(1)\n    WAIT\n"
        "event.wait()\nvalue * 2", "event.record()", "aten::mul",
    ),
    "memory is overwritten while a side stream reads it": Plant(
        "with side: other.copy_(value)\nWAIT\nvalue.add_(1)", "side.synchronize()", "writes memory that a copy reads"
    ),
    "memory is freed while a side stream reads it": Plant(
        "late = torch.zeros(999, device='npu')\nside.wait_stream(main)\nwith side: late.sum()\nWAIT\ndel late\n"
        "torch.zeros(999, device='npu')", "late.record_stream(side)", "writes memory that aten::sum",
    ),
    "a collective is not waited for": Plant(
        "work = group.allreduce(value)\nWAIT\nvalue * 2", "work.wait()", "aten::mul reads memory that allreduce writes"
    ),
    "a collective sends what is written meanwhile": Plant(
        "work = group.broadcast(value, 0)\nWAIT\nvalue.add_(1)", "work.wait()", "memory that broadcast reads"
    ),
    "a side stream's number is read too early": Plant(
        "with side: value.add_(1)\nWAIT\nvalue[0].item()", "side.synchronize()", "missing wait: item"
    ),
    "pinned memory is written while a copy reads it": Plant(
        "there = room.to('npu', non_blocking=True)\nWAIT\nroom.zero_()\ntorch.npu.synchronize()", "main.synchronize()",
        "the host writes pinned memory",
    ),
    "pinned memory is read before the copy's own event": Plant(
        "early = main.record_event()\nroom.copy_(value, non_blocking=True)\nearly.synchronize()\nWAIT\n"
        "assert room[0] == 0, 'not there'", "main.record_event().synchronize()", "AssertionError: not there",
    ),
}  # fmt: skip


ALL = """
import json, sys, torch, torch_npu
start, cases = json.loads(sys.stdin.read())
found = {}
for name, pair in cases.items():
    for code in pair:
        torch.npu.synchronize()  # for the memory of the case before
        try:
            exec(start + code, {})
            said = ""
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found.setdefault(name, []).append(said)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def said(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each case says, with its wait and without, all in one process."""
    cases = {name: [one.code.replace("WAIT", wait) for wait in (one.wait, "pass")] for name, one in PLANTS.items()}
    done = python(ALL, library, tmp_path_factory.mktemp("plants"), given=json.dumps([START, cases]))
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", PLANTS)
def test_a_missing_wait_is_an_error(said: dict[str, list[str]], name: str) -> None:
    right, wrong = said[name]
    assert right == "" and PLANTS[name].says in wrong.partition("\n")[0], (right, wrong)


@pytest.mark.parametrize("touch", ["ctypes.string_at(place, 4)", "ctypes.memset(place, 0, 4)"])
def test_the_host_cannot_touch_memory_of_the_device(library: Path, tmp_path: Path, touch: str) -> None:
    code = "".join(
        f"place = {tensor}.data_ptr()\n{touch}\nprint('{tensor} touched', flush=True)\n" for tensor in ("room", "value")
    )
    died = python(START + code, library, tmp_path)
    assert (died.returncode, died.stdout) == (-signal.SIGSEGV, "room touched\n"), died.stderr


def test_waits_that_an_engine_leaves_out_are_found(library: Path, tmp_path: Path) -> None:
    cut = "from asyncrl.runtime.device import Device\nDevice.wait_for = lambda *_: None\n"
    done = python(cut + ENGINE, library, tmp_path)  # as it is: tests/device/test_simulated_npu.py
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "AssertionError", done.stderr
