"""F31: a process stands still. It is named within `run.silent_timeout_s` + 2 s; what nobody wakes ends the run with 70.

Proves the row of docs/operations.md with SIGSTOP of each role of a real run in turn, the private Redis among them, and
with a reward worker that no signal has stopped: its interpreter is held by native code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from e2e_run import alive

from asyncrl.runtime.host_facts import descendants

LIMIT_S = 3.0
ROLES = ("buffer", "redis-server", "weightsync", "producer-0", "reward-0", "learner")
SLOW_REWARD = """
import os, pathlib, time
def length_reward(data_source, solution_str, ground_truth, extra_info=None):
    if not pathlib.Path({fast!r}).exists():
        time.sleep(0.1)
    return min(len(solution_str), 20) / 20
"""
SETTINGS = (
    "buffer.store=redis",
    "producers.count=1",
    "learner.steps=40",
    f"run.silent_timeout_s={LIMIT_S}",
    "log.heartbeat_s=0.5",
    "learner.checkpoint_every=10",
)


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def pid_of(run, role: str, launcher: int) -> int:  # type: ignore[no-untyped-def]
    if role != "redis-server":
        return int(run.pid(role))
    return next(pid for pid in descendants(launcher) if Path(f"/proc/{pid}/comm").read_text().strip() == role)


def said(run) -> list[str]:  # type: ignore[no-untyped-def]
    return [line["text"] for line in run.lines("logs/launch.jsonl") if line["event"] in ("silent", "back")]


@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_f31_every_stopped_role_is_named_in_time_and_the_run_completes(run) -> None:  # type: ignore[no-untyped-def]
    fast = run.folder / "fast"
    (run.folder / "my_rewards.py").write_text(SLOW_REWARD.format(fast=str(fast)))
    launcher = run.start("launch", "all", str(run.config), *words(*SETTINGS))
    run.wait("step 1", lambda: 1 in run.steps())
    for role in ROLES:
        pid = pid_of(run, role, launcher.pid)
        os.kill(pid, signal.SIGSTOP)
        name = f"{role} of buffer" if role == "redis-server" else role
        who = f"{name} (pid {pid} on {socket.gethostname()})"
        named = re.compile(rf"{re.escape(who)} is silent for (\d+) s; it is stopped \(state T\)")
        run.wait(f"{role} to be named", lambda named=named: any(map(named.match, said(run))), timeout=30)
        silent_s = next(float(found[1]) for found in map(named.match, said(run)) if found)
        if role == "producer-0":
            status = json.loads(run.command("status", str(run.dir), "--json", timeout=60).stdout)
            assert status["alive"]["producer-0"]["state"] == "T" and status["alive"]["producer-0"]["pid"] == pid
        os.kill(pid, signal.SIGCONT)
        assert LIMIT_S - 1 <= silent_s <= LIMIT_S + 2, said(run)
        back = f"{name} (pid {pid}) is back"
        run.wait(f"{role} to be back", lambda back=back: any(back in line for line in said(run)))
    assert launcher.poll() is None  # it was still at work through all of this
    fast.touch()
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert output.count("it is stopped (state T)") >= len(ROLES)  # on the terminal too
    audit = run.audit()
    assert audit["exit"] == 0 and audit["steps"] == 40 and audit["lost"] == audit["doubled"] == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_f31_what_nobody_wakes_ends_with_code_70_and_the_stacks_of_all_roles(run) -> None:  # type: ignore[no-untyped-def]
    settings = words(
        "producers.count=1",
        "learner.steps=500",
        "run.silent_timeout_s=2",
        "run.hang_timeout_s=40",
        "log.heartbeat_s=0.5",
    )
    launcher = run.start("launch", "all", str(run.config), *settings)
    run.wait("step 2", lambda: 2 in run.steps())
    below = descendants(launcher.pid)
    pid = run.pid("producer-0")
    os.kill(pid, signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 70, output
    error = output[output.index("error[hang]") :]
    assert "no step for" in error
    assert f"stopped by a signal: producer-0 (pid {pid} on {socket.gethostname()})" in error
    assert re.search(r"queue: .*retired \d", error)
    for role in ("buffer", "weightsync", "producer-0", "reward-0", "learner"):
        assert "most recent call first" in (run.dir / "logs" / f"{role}.log").read_text(), role
    assert not any(alive(pid) for pid in below)
    assert json.loads((run.dir / "result.json").read_text())["code"] == 70


@pytest.mark.timeout(300)
def test_f31_a_reward_worker_that_hangs_by_itself_is_named_and_the_run_goes_on(  # type: ignore[no-untyped-def]
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker scores what it held, and it does not keep the run from its end."""
    once = run.folder / "once"
    once.mkdir()
    monkeypatch.setenv("ASYNCRL_FAILPOINT", "reward.before_score:hang:2")
    monkeypatch.setenv("ASYNCRL_FAILPOINT_ONCE", str(once))
    settings = words(
        "producers.count=1",
        "reward_workers.count=2",
        "learner.steps=20",
        "log.heartbeat_s=0.5",
        f"run.silent_timeout_s={LIMIT_S}",
        "reward_workers.restarts=0",
    )
    launcher = run.start("launch", "all", str(run.config), *settings)
    run.wait("a worker that hangs", lambda: any(once.iterdir()))
    before = max(run.steps(), default=0)
    run.wait("it to be named", lambda: bool(said(run)))
    (line,) = said(run)
    found = re.match(
        r"(reward-[01]) \(pid (\d+) on [^)]+\) is silent for (\d+) s; it is not stopped \(state [SR]\)", line
    )
    assert found is not None, line
    assert int(found[2]) == run.pid(found[1]) and LIMIT_S - 1 <= int(found[3]) <= LIMIT_S + 2
    assert "hang at pass 2" in (run.dir / "logs" / f"{found[1]}.log").read_text()
    run.wait("steps beside it", lambda: max(run.steps(), default=0) >= before + 5)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, output
    assert not run.living()
    audit = run.audit()
    assert audit["exit"] == 0 and audit["steps"] == 20 and audit["lost"] == audit["doubled"] == 0
