"""max_staleness 1 -> 4 -> 0 on a running system: seen in lags and audit, and no group above its own bound."""

from __future__ import annotations

import os
import signal

import pytest


def lags(run, first: int, last: int) -> list[float]:  # type: ignore[no-untyped-def]
    return [line["lag_max"] for line in run.lines("metrics/learner.jsonl") if first <= line["step"] <= last]


@pytest.mark.timeout(300)
def test_tuning_is_seen_in_the_lags_and_in_the_audit(run) -> None:  # type: ignore[no-untyped-def]
    launcher = run.start(
        "launch",
        "all",
        str(run.config),
        "--set",
        "buffer.max_staleness=1",
        "--set",
        "buffer.pipeline_depth=max",
        "--set",
        "learner.steps=2000",
        "--set",
        "learner.checkpoint_every=50",
    )
    run.wait("step 6", lambda: 6 in run.steps())
    wide = run.command("tune", str(run.dir), "max_staleness=4", timeout=60)
    assert wide.returncode == 0 and "max_staleness: 1 -> 4" in wide.stdout, wide.stdout
    began = max(run.steps())
    run.wait("a lag above 1", lambda: max(lags(run, began, 2000), default=0) > 1)
    assert max(lags(run, 1, began - 1)) <= 1
    none = run.command("tune", str(run.dir), "max_staleness=0", timeout=60)
    assert none.returncode == 0 and "max_staleness: 4 -> 0" in none.stdout, none.stdout
    changed = max(run.steps())
    run.wait("lag 0", lambda: max(run.steps()) >= changed + 8 and lags(run, changed + 6, changed + 8) == [0, 0, 0])
    told = run.command("tune", str(run.dir), "--list", timeout=60).stdout
    assert "max_staleness: 1 -> 4" in told and "max_staleness: 4 -> 0" in told
    os.kill(launcher.pid, signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, output
    audit = run.audit()
    assert audit["exit"] == 0 and audit["over_bound"] == 0 and audit["doubled"] == audit["lost"] == 0
    assert [change["n"] for change in audit["tuned"]] == [1, 2]
    assert max(map(int, audit["lag_before_tuning"])) <= 1 < max(map(int, audit["tuned"][0]["lag_counts"])) <= 4
    assert audit["tuned"][1]["lag_counts"]["0"] > 0
