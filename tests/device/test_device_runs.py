"""Whole runs on a simulated NPU: two ranks, two producers, placement, transports, memory, kill -9."""

from __future__ import annotations

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
        "learner.algorithm.kl.where=loss", "learner.optim.name=muon",
    ),
    "states on the host": ("learner.cpu_offload=true",),
}  # fmt: skip


def check_promises(run: DeviceRun, code: int, said: str, *, steps: int) -> None:
    assert code == 0, said + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 4 * steps), audit
    assert run.living() == []


def complete(run: DeviceRun, done: Any, *, steps: int = 5) -> list[dict[str, Any]]:
    """The learner's lines of metrics, after the promises of the run."""
    check_promises(run, done.returncode, done.stdout, steps=steps)
    lines = run.lines("metrics/learner.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return lines


@pytest.mark.long
@pytest.mark.chaos_cases("local", "direct*", "collective*", "*host")
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


@pytest.mark.chaos
def test_four_ranks_in_two_copies_stop_and_go_on(npu_run: DeviceRun) -> None:
    npu_run.devices = 6
    layout = ("learner.ranks=4", "learner.parallel.replicate=2")
    complete(npu_run, npu_run.train(*layout, "learner.steps=2"), steps=2)
    complete(npu_run, npu_run.train(*layout, "learner.steps=4"), steps=4)


#: Where a process of a publish is killed, and at which pass of it: both sides, each phase.
KILLED = {
    "learner.before_commit": 2, "weightsync.at_publish": 3, "weightsync.before_commit": 2, "weightsync.after_commit": 2,
}  # fmt: skip
#: And before or in the middle of a transfer.
SENT = {
    "local": {"weightsync.staged": 2, "weightsync.after_bucket": 2},
    "collective": {"weightsync.staged": 2, "weightsync.send_blob": 2, "weightsync.after_bucket": 2},
    "direct": {"weightsync.send_tensor": 2, "weightsync.after_direct_bucket": 2},
}


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", SENT)
def test_a_process_killed_in_each_phase_of_a_publish_costs_nothing(
    npu_run: DeviceRun, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    places = KILLED | SENT[transport]
    once = npu_run.folder / "once"
    once.mkdir()
    monkeypatch.setenv("ASYNCRL_FAILPOINT", ",".join(f"{name}:kill:{count}" for name, count in places.items()))
    monkeypatch.setenv("ASYNCRL_FAILPOINT_ONCE", str(once))
    words = [f"weightsync.transport={transport}", "weightsync.timeout_s=10", "learner.restarts=9", "learner.steps=16"]
    words += ["weightsync.in_place=true", "learner.ranks=2"] if transport == "direct" else ["learner.ranks=1"]
    done = npu_run.train(*words, timeout=840)
    killed = {path.name.partition(".kill")[0] for path in once.iterdir()}
    assert killed == set(places), npu_run.logs()
    check_promises(npu_run, done.returncode, done.stdout, steps=16)
