"""The whole system under simulated faults: no prompt lost, none doubled, no bound broken, every run ends.

The schedules run on two processes; their figures stand at the end of the output. A failure names its seed:
`python tests/simulator/sim_run.py --seed N` shows that run message by message.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable

import pytest
from sim_faults import FAULTS
from sim_mutants import MUTANTS, PAIRS, hunt_all
from sim_mutants import told as told_mutants
from sim_run import campaign, schedule, told

MESSAGE_FAULTS = {"lost_request", "lost_answer", "doubled", "overtaken", "flipped", "of_the_dead"}
#: What must have been seen at least once: the paths behind it were taken.
CONSEQUENCES = {
    "registered_again",
    "fenced_learner",
    "service_fenced",
    "publish_refused",
    "sent_after_all",
    "continued",
}
FAULTS_EACH = 25


def check(schedules: int, *, first: int, figure: Callable[[str], None]) -> None:
    result = campaign(first=first, schedules=schedules, processes=2)
    figure(told(result))
    assert not result["failures"], told(result)
    assert result["schedules"] == schedules
    assert result["faults"] >= FAULTS_EACH * schedules
    rare = {kind for kind in {*FAULTS, *MESSAGE_FAULTS} if result["hits"][kind] < schedules // 100}
    assert not rare, f"these faults hardly ever hit: {rare}"
    assert not {kind for kind in CONSEQUENCES if not result["hits"][kind]}


@pytest.mark.timeout(300)
def test_nothing_is_lost_doubled_or_too_old_in_a_thousand_schedules(figure: Callable[[str], None]) -> None:
    check(1_000, first=1, figure=figure)


@pytest.mark.chaos
@pytest.mark.timeout(6000)
def test_nothing_is_lost_doubled_or_too_old_in_twenty_thousand_others(figure: Callable[[str], None]) -> None:
    check(20_000, first=1_000_001, figure=figure)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_mutant_is_caught(figure: Callable[[str], None]) -> None:
    found = hunt_all(processes=2, limit=3000)
    figure(told_mutants(found))
    assert len(found) == len(MUTANTS | PAIRS) >= 12
    assert not [name for name, count, _ in found if not count], told_mutants(found)
    assert Counter(why.split(":")[0] for _, _, why in found)["crash"] <= 3  # caught by a promise, not by an accident


def digest_of(seed: int) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        return schedule(seed).run().digest()


def test_the_same_seed_is_the_same_run() -> None:
    seeds = range(7000, 7030)
    first = [digest_of(seed) for seed in seeds]
    assert first == [digest_of(seed) for seed in seeds]
    assert len(set(first)) == len(first)
