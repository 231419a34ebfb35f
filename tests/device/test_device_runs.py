"""Whole runs on a simulated NPU: two ranks, two producers, placement, transports, memory, kill -9."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from device_run import DeviceRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKENS_BYTES = 100_000  # tokens and log-probs of a run; a version has more than a million bytes
HALF = "model.dtype=bfloat16"
LAYOUTS = {
    "local": (),
    "direct in bfloat16": ("weightsync.transport=direct", "weightsync.in_place=true", HALF),
    "collective in bfloat16": ("weightsync.transport=collective", HALF),
    "in place, idle states away": (
        "weightsync.in_place=true", "learner.offload_idle=true", "learner.gradient_checkpointing=true",
        "learner.algorithm.kl.where=loss",
    ),
    "states on the host": ("learner.cpu_offload=true",),
}  # fmt: skip


def complete(run: DeviceRun, done: Any, *, steps: int = 5) -> list[dict[str, Any]]:
    """The learner's lines of metrics, after the promises of the run."""
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 4 * steps), audit
    assert run.living() == []
    lines = run.lines("metrics/learner.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return lines


@pytest.mark.long_except("local", "direct in bfloat16", "collective in bfloat16")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_devices_is_exact(npu_run: DeviceRun, layout: str, figure: Callable[[str], None]) -> None:
    lines = complete(npu_run, npu_run.train(*LAYOUTS[layout]))
    if HALF not in LAYOUTS[layout]:
        assert lines[0]["lag/0/logprob_gap_mean"] < 1e-5, "engine and learner agree under the same weights"
    learners, producers = npu_run.reports("learners/main.py"), npu_run.reports("producers/main.py")
    assert len(learners) == 2 and len(producers) == 2
    for one in (*learners, *producers):
        assert one["operators"] > 20, "the work was done on the device"
    assert [sum(peak > 0 for peak in one["peak"]) for one in learners] == [1, 1], "each rank has a device of its own"
    ways = {way["transport"] for line in npu_run.lines("metrics/weightsync.jsonl") for way in line["ways"].values()}
    assert "direct" not in layout or "direct" in ways
    if "collective" in layout or "direct" in layout:
        assert all(one["collectives"].get("broadcast", 0) > 0 for one in producers), "by hccl"
    for one in producers:
        assert one["copies"]["bytes_unpinned"] < TOKENS_BYTES, "weights go through pinned memory"
        assert "direct" not in ways or one["copies"]["bytes_to_host"] < TOKENS_BYTES, "weights stay on the device"
    if "direct" in layout:
        return  # tests/device/test_direct_budget.py looks at its copies
    if "on the host" in layout:
        return  # so are the published rows
    pinned = sum(one["copies"]["bytes_to_host"] - one["copies"]["bytes_unpinned"] for one in learners)
    published = sum(line["publish_bytes"] for line in lines)
    figure(f"{layout}: {published:.0f} bytes published, {pinned} copied to pinned memory")
    assert pinned >= published > 0, "versions go through pinned memory"


@pytest.mark.long
def test_four_ranks_in_two_copies(npu_run: DeviceRun) -> None:
    npu_run.devices = 6
    complete(npu_run, npu_run.train("learner.ranks=4", "learner.parallel.replicate=2"))


@pytest.mark.long
def test_processes_on_devices_are_killed_and_go_on(npu_run: DeviceRun) -> None:
    words = ["learner.device=npu", "producers.device=npu", "learner.ranks=2", "learner.steps=12", "learner.restarts=3"]
    settings = [word for one in (*words, "weightsync.transport=collective") for word in ("--set", one)]
    main = npu_run.start("launch", "all", str(npu_run.config), *settings)
    npu_run.wait("step 4", lambda: max(npu_run.steps(), default=0) >= 4)
    os.kill(npu_run.pid("producer"), 9)
    npu_run.wait("step 7", lambda: max(npu_run.steps(), default=0) >= 7)
    os.kill(npu_run.pid("learner"), 9)
    out, _ = main.communicate(timeout=200)
    assert main.returncode == 0, out + npu_run.logs()
    audit = npu_run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 48), audit
