"""The staleness theorem, delivery and liveness by exhaustive search over the real state machine (docs/staleness.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from model_cases import LONG, SHORT, SMALLEST
from model_mutants import NAIVE, NAIVE_BUT_FRESH, FeasibleIgnored
from model_search import Found, search
from model_world import Case

from buffers.groups.group_table import GroupTable
from buffers.groups.machine import Parts


def proved(found: Found) -> None:
    assert not found.violation, "\n".join([found.violation, *found.trace])
    assert not found.cut
    assert found.deadlocks == 0 and found.stuck == 0, "\n".join(found.trace)


def test_every_interleaving_of_the_smallest_systems(figure: Callable[[str], None]) -> None:
    """No group above its bound, conservation, (F), (D), idempotence, a completion reachable from every state."""
    assert prove_all(SMALLEST, figure) > 15_000


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_every_interleaving_of_small_systems(figure: Callable[[str], None]) -> None:
    assert prove_all([case for case in SHORT if case not in SMALLEST], figure) > 35_000


def prove_all(cases: Sequence[Case], figure: Callable[[str], None]) -> int:
    """The number of states of all cases together."""
    states = transitions = 0
    for case in cases:
        found = search(case)
        figure(found.line())
        proved(found)
        if case.on_late != "train" and not case.total:
            # tight: the largest lag that any setting of the case allows is really reached, and none above it
            assert found.max_lag == max([case.eta, *(eta for eta, _ in case.tunes)])
        states += found.states
        transitions += found.transitions
    figure(f"{len(cases)} configurations, {states} states, {transitions} transitions, 0 violations")
    return states


class ArchivedAtOnce(GroupTable):
    """A prompt moves to the archive by itself, at the first full check after its end."""

    chunk = 1


@pytest.mark.chaos
@pytest.mark.parametrize("case", [case for case in SMALLEST if case.restarts], ids=str)
def test_the_archive_decides_nothing(case: Case) -> None:
    """The same states are reached where prompts leave the table early, also by learners that return to the past."""
    found, plain = search(case, parts=Parts(table=ArchivedAtOnce)), search(case)
    proved(found)
    assert (found.states, found.transitions, found.max_lag) == (plain.states, plain.transitions, plain.max_lag)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_interleaving_of_larger_systems(case: Case, figure: Callable[[str], None]) -> None:
    found = search(case)
    figure(f"{found.line()} ({found.seconds:.0f} s)")
    proved(found)


def test_the_counter_example_of_the_naive_rule_is_found(figure: Callable[[str], None]) -> None:
    """A cap of (eta + 1) * B outstanding groups, first come first served, does not bound the lag: not even where
    engines get work only while they hold the newest weights.
    """
    case = Case(batch=1, size=1, eta=2, depth=2, producers=2, losses=False)
    for parts in (NAIVE, NAIVE_BUT_FRESH):
        found = search(case, parts=parts, only=True)
        assert "its bound is 2" in found.violation
        figure("\n".join([f"{parts.schedule.__name__}: {found.violation}", *found.trace]))
    proved(search(case))


def test_train_lets_a_group_exceed_its_bound_and_keeps_the_rest() -> None:
    """`on_late = train` is the one rule without the theorem: the search sees lags above eta, and nothing else."""
    case = Case(batch=1, size=1, eta=1, depth=1, producers=2, on_late="train", total=4)
    found = search(case)
    proved(found)
    assert found.max_lag > case.eta


@pytest.mark.parametrize("eta", [0, 1])
def test_synchronous_and_one_step_off_are_settings(eta: int) -> None:
    """eta = 0: nobody generates while the learner trains. eta = 1: one batch ahead at most."""
    found = search(Case(batch=1, size=2, eta=eta, depth=eta, producers=2))
    proved(found)
    assert found.max_lag == eta


def test_the_depth_implies_feasibility_for_new_prompts_under_one_bound() -> None:
    """(F) decides only where bounds differ or a group with samples is resumed: elsewhere (D) is enough."""
    proved(search(Case(batch=1, size=1, eta=2, depth=2, producers=1), parts=Parts(schedule=FeasibleIgnored)))
    tuned = Case(batch=1, size=1, eta=1, depth=1, producers=1, tunes=((1, 1), (2, 2)))
    assert "(F)" in search(tuned, parts=Parts(schedule=FeasibleIgnored)).violation
