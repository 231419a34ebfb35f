"""F24: the clocks of the processes differ by an hour, and one jumps while the run goes on: nothing notices.

Deadlines and leases are measured on the monotonic clock of one process. `time.time` is replaced in the children.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plant import Plant

SKEWED = """
import os, time
_real, _skew, _jump = time.time, float(os.environ.get("CLOCK_SKEW_S", "0")), os.environ.get("CLOCK_JUMP", "")
time.time = lambda: _real() + _skew - (7200.0 if _jump and os.path.exists(_jump) else 0.0)
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.mark.timeout(300)
def test_f24_clocks_an_hour_apart(tmp_path: Path, figure: Any) -> None:
    # A lease outlives any pause of a busy host, and none of the skews.
    with Plant(tmp_path, extra=("learner.steps=1000000", "buffer.lease_timeout_s=600")) as plant:
        (tmp_path / "made" / "sitecustomize.py").write_text(SKEWED)
        skews = {
            "buffer": 3600,
            "producer-0": -3600,
            "producer-1": 3600,
            "reward-0": -3600,
            "learner": -3600,
            "weightsync": 3600,
        }
        signal = tmp_path / "jump"
        jump = {"CLOCK_JUMP": str(signal)}  # back by two hours, in the middle of the run
        for name, skew in skews.items():
            plant.roles[name].env = {"CLOCK_SKEW_S": str(skew), **(jump if name in ("buffer", "producer-1") else {})}
        plant.start()
        plant.wait("commits", lambda: plant.committed() >= 5)
        first = plant.history("service")[0]["t"]
        signal.touch()
        plant.wait("the jump", lambda: _went_back(plant))
        at = plant.committed()
        plant.wait("progress after it", lambda: plant.committed() > at + 10)
        # A restart under a clock that is an hour earlier still: its epoch must be above the one before.
        plant.roles["buffer"].env = {"CLOCK_SKEW_S": "-3600"}
        plant.kill("buffer")
        at = plant.committed()
        plant.wait("progress after the restart", lambda: plant.committed() > at + 5)
        epochs = [line["service_epoch"] for line in plant.history("service")]
        assert epochs == sorted(set(epochs)) and len(epochs) == 2
        assert abs(first - plant.history("service")[1]["t"]) > 3600
        plant.finish()
        found = plant.assert_accounted()
        assert found.lost_leases == 0 and not any(
            role.codes[:-1] for name, role in plant.roles.items() if name[0] in "pr"
        )
        figure("clocks +-1 h apart, one jumped by -2 h, a restart 1 h earlier: no lease lost, epochs rise")


def _went_back(plant: Plant) -> bool:
    """The sign of producer-1 carries its own clock: it is behind the buffer's start by now."""
    path = plant.run.alive / "producer-1.json"
    return (
        path.exists()
        and b'"t":' in (text := path.read_bytes())
        and float(text.split(b'"t":')[1].split(b",")[0]) < plant.history("service")[0]["t"] - 3600
    )
