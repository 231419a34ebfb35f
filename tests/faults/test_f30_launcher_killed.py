"""F30: the launcher is killed. Every role ends with it within five seconds, also one that is stopped; nothing is lost.

Proves the row of docs/operations.md; the same command resumes the run.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from e2e_run import alive

from asyncrl.runtime.host_facts import descendants

SETTINGS = ["buffer.store=redis", "learner.steps=2000", "learner.checkpoint_every=2", "producers.count=1"]


def words(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.redis
@pytest.mark.timeout(300)
def test_f30_kill_9_of_the_launcher_leaves_no_process(run) -> None:  # type: ignore[no-untyped-def]
    launcher = run.start("launch", "all", str(run.config), *words(SETTINGS))
    run.wait("step 2", lambda: 2 in run.steps())
    below = descendants(launcher.pid)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below}
    assert any(b"redis-server" in words for words in names.values()) and len(below) >= 7  # what is to end is there
    os.kill(run.pid("producer-0"), signal.SIGSTOP)  # the kernel ends a stopped one too
    os.kill(launcher.pid, signal.SIGKILL)
    killed = time.monotonic()
    while (left := [pid for pid in below if alive(pid)]) and time.monotonic() - killed < 60:
        time.sleep(0.05)
    assert left == [], [names[pid] for pid in left]
    assert sorted(path.name for path in run.dir.glob("launcher-*.lock"))  # it had no time to clean up

    steps = max(run.steps())
    done = run.launch(*SETTINGS[:1], *SETTINGS[2:], f"learner.steps={steps + 2}")
    assert done.returncode == 0, done.stdout
    audit = run.audit()
    assert audit["exit"] == 0 and audit["lost"] == audit["doubled"] == 0 and audit["steps"] == steps + 2
