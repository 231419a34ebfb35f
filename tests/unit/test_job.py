"""A launcher as a job of a scheduler: its exit code, the time a stop may take, its names where all pids are alike."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import parse
from asyncrl.launcher.launch import LaunchOptions, _grace, _locks, exit_code, gang_is_done
from asyncrl.launcher.supervisor import Grace
from asyncrl.process_plan.plan import Outcome
from asyncrl.runtime.run_dir import RunDir, launcher_mark, launchers

TEXT = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[[reward]]\nfunction = "a:b"\n'
JOB = LaunchOptions(target="producers", connect="tcp://services:5555", job=True)


@pytest.mark.parametrize(
    ("outcome", "job", "shell"),
    [
        (Outcome(0, "done", 1.0), 0, 0),
        (Outcome(0, "stopped by SIGTERM", 1.0, stopped=True), 143, 0),
        (Outcome(130, "stopped by SIGINT", 1.0, stopped=True), 130, 130),
        (Outcome(70, "hang", 1.0), 70, 70),
    ],
)
def test_a_stopped_job_is_not_taken_for_a_complete_one(outcome: Outcome, job: int, shell: int) -> None:
    assert (exit_code(outcome, JOB), exit_code(outcome, LaunchOptions())) == (job, shell)


def test_a_learner_has_the_grace_of_its_scheduler() -> None:
    long, short = (parse(TEXT, overrides=[f"cluster.grace_s={seconds}"]) for seconds in (900, 60))
    assert _grace(long, JOB).learner_s == 870.0 and _grace(long, LaunchOptions()) == Grace()
    assert _grace(short, JOB).learner_s == Grace().learner_s, "the scheduler's own kill is the limit then"


def test_launchers_with_one_pid_on_several_hosts_work_side_by_side(tmp_path: Path, monkeypatch: Any) -> None:
    """Containers number their processes anew: the same pid in every pod, on a run folder that all share."""
    run = RunDir(tmp_path / "run").create()
    monkeypatch.setattr(os, "getpid", lambda: 7)
    held, marks, tags = [], [], []
    for host in ("pod-a", "pod-b", "pod-c"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        locks, tag = _locks(run, JOB)
        held += [*locks, run.lock(launcher_mark("producers"))]
        marks.append(launchers(run))
        tags.append(tag)
    assert tags == ["pod-a-7", "pod-b-7", "pod-c-7"]
    assert marks == [[("producers", 7)]] * 3, "each host sees its own"
    for lock in held:
        lock.close()
    assert launchers(run) == []


@pytest.mark.parametrize(
    ("result", "steps", "done"),
    [
        (None, 6, False),
        ({"steps": 6, "ledger": {}}, 6, True),
        ({"steps": 6, "ledger": {}, "done": True}, 7, False),  # more steps are wanted now
        ({"steps": 6, "done": False}, 6, False),  # stopped after the last step, before it was exported
    ],
)
def test_a_host_of_a_complete_gang_waits_for_nobody(tmp_path: Path, result: Any, steps: int, done: bool) -> None:
    run = RunDir(tmp_path / "run").create()
    if result is not None:
        run.result.write_text(json.dumps(result))
    several, one = (parse(TEXT, overrides=[f"cluster.learner_hosts={n}", f"learner.steps={steps}"]) for n in (2, 1))
    learner = LaunchOptions(target="learner", node_rank=1, head="head:1")
    assert gang_is_done(run, several, learner) is done
    assert not gang_is_done(run, one, learner), "a learner on one host says goodbye to the buffer once more"
    assert not gang_is_done(run, several, JOB)
