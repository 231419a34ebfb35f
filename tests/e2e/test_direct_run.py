"""Transport `direct` in a whole run: one generator joins late, one is killed in the middle of a version.

The learner is held after two steps by stopping its process, so that joins fall between versions; the killed generator
falls at a fail-point in the middle of its second version.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e_run import Run
from test_weight_sync_run import (
    JOINED,
    KILLED,
    LATE,
    SURVIVOR,
    TRAINED,
    Cluster,
    check_run,
    check_samples,
    committed,
    read_state,
    tensors_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HOLDS = f"learner.after_commit:stop:{TRAINED},learner.after_commit:stop:{JOINED}"
SETTINGS = ("learner.ranks=2", "weightsync.in_place=true", "weightsync.timeout_s=20")
TAKEN = ("local", "stream")  # by those that missed a group


RANKS = ("alive/learner.json", "alive/learner-rank1.json")


def hold(run: Run) -> list[int]:
    """Wait until both ranks of the learner, which both send, stand at a fail-point; their pids."""

    def pids() -> list[int]:
        return [int(line["pid"]) for name in RANKS for line in run.lines(name)]

    run.wait("the learner at a fail-point", lambda: [read_state(pid) for pid in pids()] == ["T", "T"])
    return pids()


def go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_one_joins_late_and_one_is_killed_in_a_version(run: Run, tiny_model: Path, figure: Any) -> None:
    buckets = tensors_of(tiny_model)
    run.fresh = True
    cluster = Cluster(run, "direct", *SETTINGS, holds=HOLDS)
    learner = hold(run)
    killed = cluster.join(KILLED, f"weightsync.after_direct_bucket:kill:{buckets + buckets // 2}")
    run.wait("the one that is going to be killed", lambda: KILLED in cluster.members())
    go_on(learner)

    run.wait("the kill", lambda: killed.poll() is not None)
    assert killed.returncode == -signal.SIGKILL
    assert hold(run) == learner
    late = cluster.join(LATE)
    run.wait("the late one", lambda: LATE in cluster.members())
    go_on(learner)

    out, _ = cluster.main.communicate(timeout=200)
    assert cluster.main.returncode == 0, out + run.logs()
    late.wait(30)
    cluster.service.close()
    check_run(run)
    digests = committed(run)
    check_samples(run, digests)
    check_rounds(cluster.rounds(), digests, figure)


def check_rounds(rounds: list[dict[str, Any]], digests: dict[int, str], figure: Any) -> None:
    """The killed one failed in one version; the survivor has it, or a newer one, in another round."""
    left_out = [line for line in rounds if line["members"].get(KILLED, line["digest"]) != line["digest"]]
    assert len(left_out) == 1 and left_out[0]["ways"][KILLED]["transport"] == "direct", rounds
    torn = left_out[0]["version"]
    assert [line for line in rounds if line["version"] >= torn and line["members"].get(SURVIVOR) == line["digest"]]
    ways: dict[str, list[str]] = {}
    for line in rounds:
        assert line["digest"] == digests.get(line["version"], line["digest"])
        for name, way in line["ways"].items():
            if line["members"][name] == line["digest"]:
                ways.setdefault(name, []).append(way["transport"])
    assert {way for one in ways.values() for way in one} <= {"direct", *TAKEN}
    assert ways[SURVIVOR].count("direct") >= 3 and "direct" in ways[LATE]
    figure(f"ways of versions: {ways}; torn: version {torn}, {left_out[0]['members']}")
