"""F17: a learner is cut off from the buffer, another one takes its place, and the first one comes back.

At most one learner writes: the zombie is refused by its epoch, ends with 75, and leaves the checkpoint alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plant import Plant


@pytest.mark.timeout(300)
def test_f17_partitioned_learners_are_fenced(tmp_path: Path, figure: Any) -> None:
    with Plant(tmp_path, extra=("learner.steps=1000000", "learner.checkpoint_every=2")) as plant:
        plant.start()
        role = plant.roles["learner"]
        codes = []
        for number in range(5):
            at = plant.committed()
            plant.wait("progress", lambda at=at: plant.committed() > at + 2)
            old, link = role.process, role.link
            assert old is not None and link is not None
            link.held = frozenset({"up", "down"})  # what it says is on its way, and arrives after the takeover
            role.link = plant.proxies.link(plant.port)
            role.words = ["--takeover"]
            with plant._lock:
                plant.spawn(role)
            wanted = number + 2
            plant.wait("the next learner", lambda wanted=wanted: len(plant.history("register")) == wanted)
            at = plant.committed()
            plant.wait("its steps", lambda at=at: plant.committed() > at)
            link.heal()
            codes.append(old.wait(60))
        plant.finish()
        found = plant.assert_accounted()
        assert codes == [75] * 5, plant.tail()
        assert found.learner_starts == 7
        figure(f"5 learners came back after another had taken over: exit codes {codes}")
