"""The promises of weight sync by exhaustive search over the real state machine (docs/weightsync.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from sync_cases import LONG, SHORT, SMALLEST
from sync_search import Found, search
from sync_world import Case, World


def proved(found: Found) -> None:
    assert not found.violation, "\n".join([found.violation, *found.trace])
    assert not found.cut
    assert found.served and found.stuck == 0, "\n".join(found.trace)


def test_every_interleaving_of_the_smallest_systems(figure: Callable[[str], None]) -> None:
    """No false SERVING, no commit without proof, no wait beyond a deadline; from every state all can be served."""
    assert prove_all(SMALLEST, figure) > 5_000


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_interleaving_of_small_systems(figure: Callable[[str], None]) -> None:
    assert prove_all([case for case in SHORT if case not in SMALLEST], figure) > 50_000


def prove_all(cases: Sequence[Case], figure: Callable[[str], None]) -> int:
    """The number of states of all cases together."""
    states = transitions = 0
    for case in cases:
        found = search(case, every=53)
        figure(f"{found.line()} ({found.seconds:.0f} s)")
        proved(found)
        states += found.states
        transitions += found.transitions
    figure(f"{len(cases)} systems, {states} states, {transitions} transitions, 0 violations")
    return states


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_every_interleaving_of_larger_systems(case: Case, figure: Callable[[str], None]) -> None:
    found = search(case, every=997)
    figure(f"{found.line()} ({found.seconds:.0f} s)")
    proved(found)


def test_a_learner_that_dies_in_mid_round_leaves_everybody_where_it_was() -> None:
    """Nobody commits the version that did not arrive; who holds the old one keeps it."""
    world = World(Case())
    publish = next(move for move in world.moves(world.start()) if move.label == "publish 0")
    _, node = world.heal(publish.node, limit=9)
    publish = next(move for move in world.moves(node) if move.label == "publish 1")
    node = world.announce(publish.node)
    for name in world.names:
        node = world.hear(node, name) if node.processes[name].answer is not None else node
    assert any(process.job is not None for process in node.processes.values())
    killed = next(move for move in world.moves(node._replace(faults=1)) if move.label == "learner killed")
    seconds, later = world.heal(killed.node, limit=12, learner=False)
    assert seconds == -1
    assert {process.version for process in later.processes.values()} == {0}
    seconds, later = world.heal(later, limit=12)
    assert seconds >= 0, "the next learner's version reaches everybody"


def test_who_serves_relays_where_the_learner_is_dead() -> None:
    """Two members, one has the version, the learner dies: the other gets it from the first."""
    world = World(Case(versions=1))
    node = next(move for move in world.moves(world.start()) if move.label == "publish 0").node
    node = world.announce(node)
    while (
        "a" not in node.rounds.state.members
        or node.rounds.queries.state_for(node.rounds.state.members["a"]) != "serving"
    ):
        node = next(move for move in world._process_moves(node, "a") if move.good).node
    killed = next(move for move in world.moves(node._replace(faults=1)) if move.label == "learner killed")
    seconds, later = world.heal(killed.node, limit=12, learner=False)
    assert seconds >= 0 and {process.version for process in later.processes.values()} == {0}
