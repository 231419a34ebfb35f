"""F8: Redis is killed again and again. F9: Redis loses everything, or comes back with an older state.

With its append-only file a kill costs a pause. What is lost or old is written again by a living service; where the
service dies too, the learner's ledger decides, and what it holds is never trained again.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from plant import Plant

REDIS = ("buffer.store=redis", "learner.steps=1000000")
pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]


@pytest.mark.long
def test_f08_killed_every_second(tmp_path: Path, figure: Any) -> None:
    with Plant(tmp_path, extra=(*REDIS, "buffer.lease_timeout_s=60")) as plant:  # longer than a pause of a busy host
        plant.start()
        plant.wait("a commit", plant.committed)
        pauses = []
        for _ in range(5):
            before = plant.committed()
            os.kill(plant.redis_pid(), signal.SIGKILL)
            since = time.monotonic()
            plant.wait("progress", lambda before=before: plant.committed() > before + 3)
            pauses.append(time.monotonic() - since)
            time.sleep(max(0.0, 1.0 - pauses[-1]))
        plant.finish()
        found = plant.assert_accounted()
        assert found.lost_leases == 0 and "written again" not in plant.said("buffer")
        figure(f"5 kills of Redis, four commits later after {max(pauses):.2f} s at most")


def test_f09_flushall_under_a_living_service(tmp_path: Path, figure: Any) -> None:
    with Plant(tmp_path, extra=REDIS) as plant:
        plant.start()
        for number in range(5):
            before = plant.committed()
            plant.wait("progress", lambda before=before: plant.committed() > before + 1)
            plant.redis().flushall()
            wanted = number + 1
            plant.wait("the rows again", lambda wanted=wanted: plant.said("buffer").count("written again") >= wanted)
        plant.kill("buffer")  # it reads back what it wrote
        plant.finish()
        found = plant.assert_accounted()
        assert found.learner_starts == 2  # of `finish` alone: the learner noticed nothing
        figure("5 times FLUSHALL: 0 lost, 0 doubled")


@pytest.mark.parametrize("what", ["emptied", "older"])
def test_f09_store_and_service_are_lost_together(tmp_path: Path, what: str) -> None:
    """FLUSHALL or an older append-only file, and the service that could write it again is killed as well."""
    with Plant(tmp_path, extra=REDIS) as plant:
        plant.start()
        plant.wait("some commits", lambda: plant.committed() > 6)
        aof = plant.run.store / "appendonlydir"
        role = plant.roles["buffer"]
        role.wanted = False
        plant.kill("buffer", signal.SIGKILL)
        time.sleep(0.3)  # its Redis dies with it
        shutil.copytree(aof, tmp_path / "older")
        plant.begin("buffer")
        before = plant.committed()
        plant.wait("more commits", lambda: plant.committed() > before + 6)
        role.wanted = False
        plant.kill("buffer", signal.SIGKILL)
        time.sleep(0.3)
        shutil.rmtree(aof)
        if what == "older":
            shutil.copytree(tmp_path / "older", aof)
        known = plant.committed()
        plant.begin("buffer")
        plant.wait("progress", lambda: plant.committed() > known + 5)
        assert "registering again" in plant.said("learner") and plant.history("register")[-1]["step"] > 0
        plant.finish()
        plant.assert_accounted()
