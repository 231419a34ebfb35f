"""Stateful property tests of weight sync on larger systems than can be searched: hypothesis picks the schedule.

Up to four members and five versions; messages are lost, doubled and delayed, members, learners and services are killed,
transfers fail and deliver wrong bytes, in any order and number. Every promise of `sync_world` is checked at every step;
at the end of every schedule the failures stop, and everybody must serve the newest version within `HEALED_S`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sync_mutants import AnyDigestIsCommitted, AnyMemberRelays, EveryWordCounts, parts_with
from sync_world import EXPECTED, Case, World

from weightsync.coordinator.rounds import Parts

HEALED_S = 40
SEEN: Counter[str] = Counter()
FAILURES = ("killed", "is lost", "wrong bytes", "wrong bytes", "fails", "fails", "doubled", "delayed")


class System(RuleBasedStateMachine):
    """A run of a minute or so."""

    parts: Parts = Parts()

    @initialize(
        transport=st.sampled_from(["stream", "stream", "auto", "collective", "local"]),
        members=st.integers(2, 4),
        fanout=st.integers(0, 2),
        carries=st.sampled_from(["full", "delta", "adapter"]),
        place=st.integers(0, 2),
        spread=st.booleans(),
    )
    def begin(self, transport: str, members: int, fanout: int, carries: str, place: int, spread: bool) -> None:  # noqa: PLR0917
        spread = spread and transport != "local"
        place = 0 if carries == "adapter" else place
        case = Case(
            transport,
            members,
            5,
            1 << 20,
            (),
            fanout,
            carries == "delta",
            place > 0,
            place > 1,
            spread,
            carries == "adapter",
        )
        self.world = World(case, self.parts)
        self.node = self.world.start()

    def step(self, pick: int, *, good: bool, words: str = "") -> None:
        moves = [move for move in self.world.moves(self.node) if move.good is good and words in move.label]
        if moves:
            move = moves[pick % len(moves)]
            self.node = move.node
            self.world.check_state(self.node)
            SEEN[move.label.partition(" ")[2] if move.label[1:2] in " '" else move.label.split()[0]] += 1

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=12))
    def healthy(self, picks: list[int]) -> None:
        for pick in picks:
            self.step(pick, good=True)

    @rule(steps=st.integers(1, 4))
    def all_at_their_pace(self, steps: int) -> None:
        for _ in range(steps):
            self.node = self.world._everyone(self.node, learner=True)

    @rule(fates=st.lists(st.sampled_from(("", "", "", "", *FAILURES)), min_size=6, max_size=24))
    def work_with_failures(self, fates: list[str]) -> None:
        """The members one after the other; who can fail in the way that comes up does."""
        for number, words in enumerate(fates):
            name = self.world.names[number % len(self.world.names)]
            self.member(name, words if words != "killed" or number % 5 == 0 else "")

    def member(self, name: str, words: str) -> None:
        moves = list(self.world._process_moves(self.node, name))
        bad = [move for move in moves if words and not move.good and words in move.label]
        for move in (bad or [move for move in moves if move.good])[:1]:
            self.node = move.node
            self.world.check_state(self.node)
            SEEN[move.label[2:] if move.label[1] in " '" else move.label] += 1

    @rule(pick=st.integers(0, 99), words=st.sampled_from(FAILURES))
    def failure(self, pick: int, words: str) -> None:
        self.step(pick, good=False, words=words)

    @rule()
    def publish(self) -> None:
        self.step(0, good=False, words="publish")
        self.step(0, good=True, words="announce")

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.node = self.world.tick(self.node)
            self.world.check_state(self.node)

    @precondition(lambda self: self.node.learner.staged)
    @rule()
    def everybody_serves(self) -> None:
        seconds, node = self.world.heal(self.node, limit=HEALED_S)
        assert seconds >= 0, f"not everybody serves after {HEALED_S} s"
        self.node = node._replace(faults=1 << 20)
        SEEN["healed"] += 1
        SEEN["slowest"] = max(SEEN["slowest"], seconds)

    def teardown(self) -> None:
        if hasattr(self, "node") and self.node.learner.staged:
            self.everybody_serves()


def schedules(parts: Parts, *, examples: int) -> None:
    machine = type("System", (System,), {"parts": parts})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            print_blob=False,
        ),
    )


def test_schedules_of_larger_systems(figure: Callable[[str], None]) -> None:
    SEEN.clear()
    with patch("weightsync.coordinator.queries.FORM_S", 1.0):
        schedules(Parts(), examples=100)
    figure(", ".join(f"{name} {count}" for name, count in SEEN.most_common()))
    assert SEEN["healed"] > 90


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_more_schedules(figure: Callable[[str], None]) -> None:
    SEEN.clear()
    schedules(Parts(), examples=3000)
    figure(", ".join(f"{name} {count}" for name, count in SEEN.most_common()))


@pytest.mark.parametrize("kind", [AnyDigestIsCommitted, AnyMemberRelays, EveryWordCounts])
def test_schedules_see_wrong_rules(kind: type[Any]) -> None:
    with pytest.raises(EXPECTED):
        schedules(parts_with(kind), examples=100)
