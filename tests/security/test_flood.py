"""5,000 idle connections against every port of a run: nothing restarts, steps go on, descriptors are free again."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import listeners
from test_running_job import Job, end, free_port, scan

from asyncrl.runtime.host_facts import descendants

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]
CONNECTIONS, FLOOD_S, SHORT_S = 5000, 30.0, 8.0
PROMETHEUS = free_port()


@pytest.fixture
def job(run: Any) -> Iterator[Job]:
    yield Job(run, more=[f"trackers.prometheus_port={PROMETHEUS}"])


class Flood(threading.Thread):
    """Keeps connections to a port open and says nothing; whoever is cut comes back."""

    def __init__(self, port: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.until = time.monotonic() + seconds
        self.made = self.refused = 0
        self.peak = 0

    def run(self) -> None:
        held: list[socket.socket] = []
        while time.monotonic() < self.until:
            try:
                one = socket.create_connection(("127.0.0.1", self.port), timeout=1)
                one.setblocking(False)
                held.append(one)
                self.made += 1
            except OSError:
                self.refused += 1
                time.sleep(0.01)
            if len(held) >= CONNECTIONS:
                self.peak = len(held)
                held = [one for one in held if not self._is_cut(one)]
                time.sleep(0.05)
        self.peak = max(self.peak, len(held))
        for one in held:
            one.close()

    @staticmethod
    def _is_cut(one: socket.socket) -> bool:
        try:
            if one.recv(4096):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        one.close()
        return True


def listening(job: Job) -> list[int]:
    """The ports that the job listens on now."""
    found = listeners({job.main.pid, *descendants(job.main.pid)})
    return sorted({one.port for one in found if one.kind == "tcp"})


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_closed(port: int) -> bool:
    """Whether the port drops connections, as those of ranks that have met do."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except TimeoutError:
        return True
    except ConnectionRefusedError:
        pass
    return False


def test_a_run_trains_on_under_a_flood_of_idle_connections(job: Job) -> None:
    run = job.run
    scan(run, job.main)  # a few steps: what only a meeting of ranks opens is closed again
    mine = [port for port in listening(job) if port in (*job.ports.values(), PROMETHEUS)]
    others = [port for port in listening(job) if port not in mine]
    assert len(mine) == 3 and others, (mine, others)
    before = {line["pid"]: descriptors(line["pid"]) for line in run.living()}
    closed = [port for port in others if is_closed(port)]
    assert len(closed) >= 3, (closed, others)  # the store, and Gloo on two ranks
    floods = {}
    for port in [*mine, *others]:
        if port not in listening(job) or port in closed:
            continue
        first = max(run.steps())
        floods[port] = flood = Flood(port, FLOOD_S if port in mine else SHORT_S)
        flood.start()
        flood.join(FLOOD_S + 60)
        assert not flood.is_alive() and flood.peak >= CONNECTIONS // 2, (port, flood.made, flood.refused)
        run.wait(f"steps after the flood of port {port}", lambda first=first: max(run.steps()) >= first + 2)
    after = {line["pid"]: line for line in run.living()}
    assert set(after) == set(before), f"restarts: {[line for pid, line in after.items() if pid not in before]}"
    deadline = time.monotonic() + 60
    names = {pid: line["name"] for pid, line in after.items()}
    while max((kept := {name: descriptors(pid) - before[pid] for pid, name in names.items()}).values()) > 40:
        assert time.monotonic() < deadline, f"descriptors that are not free: {kept}"
        time.sleep(0.2)
    print({port: (flood.made, flood.peak) for port, flood in floods.items()})
    assert set(mine) <= set(listening(job)) and set(mine) <= set(floods)
    end(run, job.main)
    assert Path(run.dir / "history.jsonl").exists()
