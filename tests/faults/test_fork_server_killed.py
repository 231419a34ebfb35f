"""The process that forks roles is killed in the middle of a run: the run goes on, and a killed producer starts anew."""

from __future__ import annotations

import os
import signal

import pytest

from asyncrl.runtime.host_facts import child_pids


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_goes_on_without_its_fork_server(run) -> None:  # type: ignore[no-untyped-def]
    settings = ["learner.steps=2000", "producers.count=1", "producers.restarts=5"]
    launcher = run.start("launch", "all", str(run.config), *(word for one in settings for word in ("--set", one)))
    run.wait("step 2", lambda: 2 in run.steps())

    def kill_producer() -> None:
        """Kill it, and wait for a step with samples of the next one."""
        before = run.pid("producer-0")
        os.kill(before, signal.SIGKILL)
        run.wait("the next producer", lambda: is_back(before))
        goal = max(run.steps()) + 4  # more than was in flight
        run.wait(f"step {goal}", lambda: goal in run.steps())

    def is_back(before: int) -> bool:
        try:
            return run.pid("producer-0") != before
        except AssertionError:  # not yet
            return False

    kill_producer()
    named = {line["pid"] for line in run.lines("processes.jsonl")}
    (server,) = [pid for pid in child_pids(launcher.pid) if pid not in named]
    roles = {line["pid"] for line in run.living()}
    os.kill(server, signal.SIGKILL)
    kill_producer()
    gone = roles - {line["pid"] for line in run.living()}
    assert len(gone) == 1  # the producer alone
    launcher.terminate()
    assert launcher.wait(60) == 0, run.logs()
    assert run.audit()["exit"] == 0
