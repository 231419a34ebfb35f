"""F11: weight sync dies in the middle of a version. F12: a generator does.

Service, learner and generators are real processes, killed and stopped while a generator has just taken bucket k, for
every bucket and transport. No torn version is ever current, those that live agree, the learner is not held up, and who
comes back takes the newest version before it serves.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forks
from sync_plant import BUCKETS, SyncPlant, sync_forks

TRANSPORTS = ["local", "collective", "stream", "disk"]
KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = sync_forks()
    yield forks
    forks.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_at_every_bucket(transport: str, tmp_path: Path, forks: Forks, figure: Any) -> None:
    """The generator, the service and the learner, each at every bucket."""
    plant = SyncPlant(forks, tmp_path, transport=transport)
    took = {
        (victim, number): plant.hurt(victim, KILL, number)
        for victim in ("g0", "service", "learner")
        for number in range(BUCKETS)
    }
    worst = max(took, key=lambda key: took[key])
    figure(
        f"{transport}: {len(took)} kills, all whole again within {max(took.values()):.1f} s ({worst[0]}, bucket "
        f"{worst[1]}); the learner was held up {max(plant.held_up) * 1000:.0f} ms at most"
    )
    plant.close()


@pytest.mark.long_except("local")
@pytest.mark.chaos_cases("stream", "disk")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_for_longer_than_its_deadline(transport: str, tmp_path: Path, forks: Forks, figure: Any) -> None:
    """A generator at every bucket, the service and the learner at one."""
    plant = SyncPlant(forks, tmp_path, transport=transport)
    cases = [("g0", number) for number in range(BUCKETS)] + [("service", 1), ("learner", 1)]
    took = [plant.hurt(victim, STOP, number) for victim, number in cases]
    figure(f"{transport}: {len(took)} stops of {plant.stopped_s:g} s, all whole again within {max(took):.1f} s")
    plant.close()


SITES = {"collective": "send_blob", "stream": "serve_blob", "disk": "write_blob"}


@pytest.mark.parametrize("transport", list(SITES))
def test_a_learner_that_dies_while_it_sends(transport: str, tmp_path: Path, forks: Forks) -> None:
    """Killed by a fail-point before it sends, serves or writes its k-th blob, for all k."""
    plant = SyncPlant(forks, tmp_path, transport=transport)
    for number in range(1, BUCKETS + 1):
        plant.kill("learner")
        plant.start("learner", ASYNCRL_FAILPOINT=f"weightsync.{SITES[transport]}:kill:{number}")
        plant.publish_to_the_dead()
        plant.wait("the learner to die", lambda: not plant.children["learner"].alive())
        for name in plant.names:
            plant.look(name)
        plant.start("learner")
        plant.next_version()
        plant.wait_whole()
    plant.check()
    plant.close()


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["full", "delta", "in_place"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everything_at_every_bucket(transport: str, form: str, tmp_path: Path, forks: Forks, figure: Any) -> None:
    """The long form: kills and stops of everybody at every bucket, with deltas and with engines that load in place."""
    encoding = "delta" if form == "delta" else "full"
    plant = SyncPlant(forks, tmp_path, transport=transport, encoding=encoding, in_place=form == "in_place")
    took = [
        plant.hurt(victim, action, number)
        for action in (KILL, STOP)
        for victim in ("g0", "g1", "service", "learner")
        for number in range(BUCKETS)
    ]
    figure(f"{transport} {form}: {len(took)} faults, whole again within {max(took):.1f} s")
    plant.close()
