"""Every named place: it is in the code and in the list, a process can be killed there, and the run goes on.

The learner's places beyond its registration are passed by the real learner alone: test_f03 .. test_f06 kill it there.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from plant import Plant

from asyncrl.runtime.failpoints import SITES

ROOT = Path(__file__).resolve().parents[2]
CALL = re.compile(r'(?<!def )\bfailpoint\(\s*f?"([^"]+)"')
#: Of transports and turns that this run does not use: test_f11_f12_weight_sync, test_transport_disk, test_direct_run
#: and test_device_turns kill there.
ELSEWHERE = {
    f"weightsync.{name}"
    for name in ("serve_blob", "send_blob", "send_tensor", "after_direct_bucket", "write_blob", "before_rename")
} | {f"producer.{name}" for name in ("at_wake", "awake", "at_sleep", "asleep")}
#: At which pass through a place a process is killed there.
DATA_PLANE = {name: 1 for name in SITES.keys() - ELSEWHERE if not name.startswith("learner.")} | {
    "learner.at_register": 1,
    "learner.after_register": 1,
    "buffer.before_segments": 9,
    "buffer.after_segments": 7,
    "buffer.before_apply": 15,
    "buffer.after_apply": 12,
    "buffer.before_answer": 20,
    "buffer.rotate": 2,
    "buffer.before_release": 2,
    "producer.before_send": 5,
    "producer.after_ack": 3,
    "producer.after_lease": 2,
    "reward.after_score": 3,
    "reward.after_ack": 2,
    "weightsync.at_publish": 3,
    "weightsync.staged": 4,
    "weightsync.after_bucket": 5,
    "weightsync.before_commit": 3,
    "weightsync.after_commit": 2,
}


def sites_in_code() -> Counter[str]:
    found: Counter[str] = Counter()
    for package in ("asyncrl", "buffers", "learners", "producers", "weightsync"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "failpoints.py":
                found.update(CALL.findall(path.read_text()))
    return found


def test_places_in_code_and_in_the_list_are_the_same() -> None:
    found = sites_in_code()
    assert set(found) == set(SITES)
    assert len(SITES) >= 25
    assert not [name for name, times in found.items() if times > 1], "a place has a name of its own"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_a_process_killed_at_each_place_costs_nothing(tmp_path: Path, figure: Any) -> None:
    once = tmp_path / "once"
    once.mkdir()
    armed = ",".join(f"{name}:kill:{count}" for name, count in DATA_PLANE.items())
    env = {"ASYNCRL_FAILPOINT": armed, "ASYNCRL_FAILPOINT_ONCE": str(once), "TOY_TOKEN_S": "0.02"}
    extra = (
        "buffer.store=redis",
        "learner.checkpoint_every=3",
        "learner.steps=1000000",
        "sampling.max_new_tokens=20",
        "buffer.place_bytes=256",
        "producers.checkpoint_tokens=5",
    )

    def fired() -> set[str]:
        return {path.name.rpartition(".kill.")[0] for path in once.iterdir()}

    with Plant(tmp_path, producers=2, rewards=1, extra=extra, env=env | {"MINI_STEP_S": "0.02"}) as plant:
        plant.start()
        deadline = time.monotonic() + 100
        orders = {
            "buffer.at_reseed": flush,
            "buffer.after_reseed": flush,
            "buffer.at_close": terminate_buffer,
            "producer.before_give_back": terminate_producers,
        }
        while missing := set(DATA_PLANE) - fired():
            assert time.monotonic() < deadline, f"never passed: {missing}\n{plant.tail()}"
            for order in {orders[name] for name in missing & orders.keys()} if missing <= orders.keys() else ():
                order(plant)
            time.sleep(0.3)
            for role in plant.roles.values():
                if role.kind in ("producer", "buffer") and role.codes[-1:] == [0] and not role.alive():
                    plant.begin(role.name)  # it was asked to end, and did
        plant.finish()
        found = plant.assert_accounted()
        assert not found.dead and not found.dropped
        killed = sum(role.codes.count(-signal.SIGKILL) for role in plant.roles.values())
        figure(f"{len(SITES)} places; {len(DATA_PLANE)} of the data plane killed a process each ({killed} deaths seen)")


def flush(plant: Plant) -> None:
    try:
        plant.redis().flushall()
    except redis.exceptions.RedisError:
        return


def terminate_buffer(plant: Plant) -> None:
    if plant.roles["buffer"].alive() and time.monotonic() - plant.roles["buffer"].since > 2:
        plant.kill("buffer", signal.SIGTERM)


def terminate_producers(plant: Plant) -> None:
    for role in plant.roles.values():
        if role.kind == "producer" and role.alive() and time.monotonic() - role.since > 3:  # it has leases by now
            role.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
