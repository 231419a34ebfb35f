"""Faults without a pause on a run of real processes: it goes on training, and nothing is lost, doubled or too old.

The short form runs with every change, the long one by `make chaos`. CHAOS_SEED replays the faults of a printed seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos
from plant import Plant

EXTRA = (
    "buffer.store=redis",
    "learner.steps=1000000",
    "buffer.batch_groups=16",
    "sampling.max_new_tokens=20",
    "buffer.place_bytes=256",  # some payloads by place, some as frames
    "producers.checkpoint_tokens=8",
)


def run_chaos(
    folder: Path, figure: Callable[[str], None], *, seconds: float, at_least: int, of_each: int, groups: int
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"CHAOS_SEED={seed}")
    once = folder / "once"
    once.mkdir(parents=True)
    with Plant(folder, producers=2, rewards=2, extra=EXTRA, seed=seed, env={"TOY_TOKEN_S": "0.02"}) as plant:
        plant.start()
        plant.wait("the first steps", lambda: plant.committed() >= 2)
        chaos = Chaos(plant, seed, once=once)
        chaos.commits.look()
        before, began = chaos.commits.groups, time.monotonic()
        chaos.run(seconds=seconds, at_least=at_least, of_each=of_each)
        took = time.monotonic() - began
        chaos.commits.look()
        during = chaos.commits.groups - before
        plant.finish()
        found = plant.assert_accounted()
        hits: dict[str, int] = {}
        for role in plant.roles.values():
            for name, count in (role.link.counts if role.link is not None else {}).items():
                hits[name] = hits.get(name, 0) + count
        lost = _reasons(plant)
        figure(
            f"seed {seed}: {chaos.report()}\nmissed {dict(chaos.missed)}\n{found.trained} groups trained, {during} of "
            f"them during {took:.0f} s of faults; lost {found.lost}, doubled {found.doubled}, above the bound "
            f"{found.over_bound}; dropped {found.dropped}, dead {found.dead}, superseded {found.superseded}; learner "
            f"starts {found.learner_starts}, service starts {found.service_starts}, steps replayed "
            f"{found.replayed_steps}, leases lost {lost}, learners fenced {chaos.fenced}, messages {hits}"
        )
        assert during >= 0.8 * found.trained and during >= groups
        assert sum(chaos.faults.values()) >= at_least
        assert len(chaos.faults) >= 7 and min(chaos.faults[name] for name in chaos.kinds) >= of_each
        assert chaos.fenced > 0 and found.replayed_steps > 0 and found.lost_leases > 0
        assert hits["doubled"] > 0 and hits["flipped"] > 0 and hits["lost"] > 0
        assert set(found.dead) <= {"payload_lost"} and not found.dropped


def _reasons(plant: Plant) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for line in plant.history("lost"):
        reasons[line["why"]] = reasons.get(line["why"], 0) + 1
    return reasons


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_a_minute_of_faults(tmp_path: Path, figure: Any) -> None:
    run_chaos(tmp_path, figure, seconds=55, at_least=60, of_each=3, groups=1500)


@pytest.mark.chaos
@pytest.mark.redis
@pytest.mark.timeout(1500)
def test_eight_minutes_of_faults(tmp_path: Path, figure: Any) -> None:
    run_chaos(tmp_path, figure, seconds=480, at_least=500, of_each=15, groups=15000)
