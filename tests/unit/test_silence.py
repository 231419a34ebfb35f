"""Signs of life and the watch over them: who is silent is named in time, who is not is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.launcher.liveness_watch import SilenceWatch
from asyncrl.runtime.host_facts import child_pids, descendants, process_state
from asyncrl.runtime.liveness import Sign, Ticker, read_signs
from asyncrl.runtime.run_dir import RunDir


def wait_for(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child of its own."""
    code = "import subprocess, sys; subprocess.run(['sleep', '60'], timeout=60)"
    child = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: child_pids(child.pid) != [])
    below = child_pids(child.pid)
    wait_for(lambda: Path(f"/proc/{below[0]}/comm").read_text() == "sleep\n")  # until then it is a copy of its parent
    yield child
    for pid in (child.pid, *below):
        os.kill(pid, signal.SIGKILL)
    child.wait(timeout=60)


def test_a_sign_says_who_waits_for_what_since_when(tmp_path: Path) -> None:
    now = [100.0]
    sign = Sign(tmp_path, role="producer", name="producer-0", clock=lambda: now[0])
    sign.beat()
    assert read_signs(tmp_path)["producer-0"].since == 0.0
    for moment, words in ((101.0, "a lease"), (105.0, "the buffer")):
        now[0] = moment
        sign.beat(words)
    seen = read_signs(tmp_path)["producer-0"]
    assert (seen.pid, seen.t, seen.waiting_for, seen.since) == (os.getpid(), 105.0, "the buffer", 101.0)
    now[0] = 106.0
    sign.beat("")
    sign.beat("again", every_s=1.0)
    assert read_signs(tmp_path)["producer-0"].since == 106.0  # it had worked in between
    now[0] = 106.5
    sign.beat("too soon", every_s=1.0)
    assert read_signs(tmp_path)["producer-0"].waiting_for == "again"
    (tmp_path / "damaged.json").write_text("{")
    assert list(read_signs(tmp_path)) == ["producer-0"]
    sign.close()
    assert read_signs(tmp_path) == {}


def test_a_full_disk_costs_the_sign_and_not_the_role(tmp_path: Path) -> None:
    Sign(tmp_path / "missing", role="buffer", name="buffer").beat()


def test_a_ticker_signs_while_its_owner_is_busy_and_ends_with_it(tmp_path: Path) -> None:
    with Ticker(Sign(tmp_path, role="learner", name="learner"), every_s=0.01, waits=lambda: "a collective"):
        wait_for(lambda: "learner" in read_signs(tmp_path))
        first = read_signs(tmp_path)["learner"].t
        wait_for(lambda: read_signs(tmp_path)["learner"].t > first)
        assert read_signs(tmp_path)["learner"].waiting_for == "a collective"
    assert read_signs(tmp_path) == {}


class Watched:
    """A watch over one process whose clock and signs the test holds."""

    def __init__(self, root: Path, pid: int) -> None:
        self.run = RunDir(root).create()
        self.now = 0.0
        self.pid = pid
        self.watch = SilenceWatch(self.run, limit_s=5.0, clock=lambda: self.now)

    def sign(self, t: float, waits: str = "") -> None:
        sign = Sign(self.run.alive, role="producer", name="producer-0", clock=lambda: t)
        sign._who = ("producer", "producer-0", self.pid, sign._who[3])
        sign.beat(waits)

    def look(self, until: float) -> list[tuple[str, str]]:
        found = []
        while self.now < until:
            self.now += 0.5
            found += self.watch.look({self.pid: "producer-0"})
        return found


def test_silence_is_named_once_and_its_end_too(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(tmp_path, sleeper.pid)
    assert watched.look(20.0) == []  # it never signed: it loads its model
    watched.sign(1.0, "a lease")
    assert watched.look(25.0) == []
    watched.sign(2.0, "a lease")
    events = watched.look(40.0)
    assert [kind for kind, _ in events] == ["silent"]
    text = events[0][1]
    assert f"producer-0 (pid {sleeper.pid} on " in text and "is silent for 5 s; it is not stopped (state " in text
    assert text.endswith("), its last words: it waits for a lease")
    watched.sign(3.0)
    assert [kind for kind, _ in watched.look(42.0)] == ["back"]


def test_a_stopped_process_below_a_role_is_named_after_it(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(tmp_path, sleeper.pid)
    below = child_pids(sleeper.pid)[0]
    os.kill(below, signal.SIGSTOP)
    wait_for(lambda: process_state(below) == "T")
    events = watched.look(8.0)
    assert len(events) == 1 and f"sleep of producer-0 (pid {below} on " in events[0][1]
    assert events[0][1].endswith("is silent for 5 s; it is stopped (state T)")
    os.kill(below, signal.SIGCONT)
    wait_for(lambda: process_state(below) != "T")
    assert [kind for kind, _ in watched.look(9.0)] == ["back"]


def test_what_is_stopped_in_a_sandbox_is_left_alone(tmp_path: Path) -> None:
    inside = (
        "import subprocess; open('/proc/self/comm', 'w').write('bwrap'); subprocess.run(['sleep', '60'], timeout=60)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inside!r}], timeout=60)"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: any(child_pids(pid) for pid in child_pids(child.pid)))
        sandbox = child_pids(child.pid)[0]
        below = child_pids(sandbox)[0]
        watched = Watched(tmp_path, child.pid)
        os.kill(below, signal.SIGSTOP)
        wait_for(lambda: process_state(below) == "T")
        assert watched.look(8.0) == []
        os.kill(sandbox, signal.SIGSTOP)
        wait_for(lambda: process_state(sandbox) == "T")
        assert [f"bwrap of producer-0 (pid {sandbox} on " in text for _, text in watched.look(16.0)] == [True]
    finally:
        for pid in descendants(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.kill()
        child.wait(timeout=60)


def test_a_watch_that_was_stopped_itself_accuses_nobody(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    watched = Watched(tmp_path, sleeper.pid)
    watched.sign(1.0)
    watched.look(2.0)
    watched.now += 3600.0
    assert watched.look(watched.now + 4.0) == []
    assert [kind for kind, _ in watched.look(watched.now + 4.0)] == ["silent"]  # it really is


def test_who_has_ended_is_not_silent(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    watched = Watched(tmp_path, child.pid)
    watched.sign(1.0)
    watched.look(2.0)
    child.kill()
    wait_for(lambda: process_state(child.pid) == "")  # a zombie until it is waited for
    assert watched.look(20.0) == []
    child.wait(timeout=60)
    assert watched.look(30.0) == []
