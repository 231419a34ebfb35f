"""Who gets how much: what producers lack of their share is kept for them, and nobody idles beside work."""

from __future__ import annotations

import doctest

import pytest
from groups_run import Run

import buffers.groups.fair_share
from asyncrl.wire import LeaseReturn
from buffers.groups.fair_share import FEW, KEPT_S, RESERVED_S, Standing, divide, room_for
from buffers.groups.schedule import Schedule


def test_examples_of_the_docstring() -> None:
    found = doctest.testmod(buffers.groups.fair_share)
    assert found.attempted >= 3 and not found.failed


class Shared(Run):
    """A synchronous run: after each commit all producers want the next batch at once."""

    def __init__(self, producers: int = 2, **changes: int) -> None:
        super().__init__(**{"max_staleness": 0, "batch_groups": 8, "total_groups": 80, **changes})
        self.names = [f"p{place}" for place in range(producers)]
        for name in self.names:  # they have asked before: there was nothing for them
            self.lease(-1, 64, name)

    def held(self) -> list[int]:
        return [len(self.g.table.indexes.held.get(name, ())) for name in self.names]


def test_the_first_one_leaves_the_others_their_share() -> None:
    run = Shared(3, batch_groups=12)
    assert len(run.lease(0, 64, "p0")) == 4
    assert (
        run.lease(0, 60, "p0") == []
        and run.g.lease_blocked(0, "p0") == "the groups that are ready are reserved for p1, p2"
    )
    assert len(run.lease(0, 64, "p2")) == 4 and len(run.lease(0, 64, "p1")) == 4
    assert run.held() == [4, 4, 4]


def test_shares_are_by_capacity() -> None:
    run = Shared(2, batch_groups=12)
    run.lease(-1, 8, "p0")
    run.lease(-1, 16, "p1")
    assert len(run.lease(0, 8, "p0")) == 4 and len(run.lease(0, 16, "p1")) == 8


def test_one_that_does_not_come_is_not_waited_for_longer_than_said() -> None:
    run = Shared(2)
    assert len(run.lease(0, 64, "p0")) == 4 and not run.lease(0, 60, "p0")
    run.now += RESERVED_S
    run.g.workers.see("producer", "p1", run.now)
    assert not run.lease(0, 60, "p0")
    run.now += 0.1
    run.g.workers.see("producer", "p1", run.now)
    assert len(run.lease(0, 60, "p0")) == 4
    run.finish(*range(8))
    run.claim(1)
    run.commit(1)
    assert len(run.lease(1, 64, "p0")) == 4  # the next version begins anew


def test_one_that_holds_nothing_gets_something_whoever_else_is_expected() -> None:
    run = Shared(4, batch_groups=1, max_staleness=0)
    assert run.lease(0, 1, "p3") == [0]  # one group, four producers that wait: not kept for all of them
    run = Shared(2, batch_groups=8)
    for left in (4, 2, 1, 1):  # p1 never comes, p0 comes back for more each time it is through
        got = run.lease(0, 64, "p0")
        assert len(got) == left
        run.finish(*got)


def test_a_producer_at_work_is_kept_what_it_lacks_and_takes_it() -> None:
    """And two of which each lacks something do not wait for each other, where a third has more than its share."""
    run = Shared(2)
    assert len(run.lease(0, 64, "p0")) == 4 and len(run.lease(0, 1, "p1")) == 1
    assert len(run.lease(0, 60, "p0")) == 3 and run.held() == [7, 1]  # p1 can hold but one
    run = Shared(2)
    assert len(run.lease(0, 64, "p0")) == 4
    run.finish(*sorted(run.g.table.indexes.held["p0"])[:3])
    assert len(run.lease(0, 63, "p0")) == 2 and len(run.lease(0, 64, "p1")) == 2 and run.held() == [3, 2]
    three = {"a": Standing(8, 1, True), "b": Standing(8, 1, True), "c": Standing(8, 7, True)}
    assert room_for("a", three, ready=1) == (1, ["b"]) and room_for("b", three, ready=1) == (1, ["a"])
    assert room_for("c", three, ready=1) == (0, ["a", "b"])


def test_those_that_are_gone_or_wrong_are_kept_nothing() -> None:
    run = Shared(4)
    run.g.workers.barred["p1"] = (0, run.now + 99)
    run.g.give_back(LeaseReturn("p2", (), "stop"), now=run.now)
    run.now += 6.0  # p3 has been silent for so long
    assert len(run.lease(0, 64, "p0")) == 8


def test_one_that_gives_held_out_prompts_back_keeps_its_share() -> None:
    """It goes on with newer weights: only those that end are reserved nothing."""
    run = Shared(2)
    run.g.give_back(LeaseReturn("p1", (), "swapped"), now=run.now)
    run.now += 0.1
    assert len(run.lease(0, 64, "p0")) == 4 and len(run.lease(0, 64, "p1")) == 4


def test_a_fleet_shares_as_few_do_and_is_looked_at_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    many = FEW + 8
    run = Shared(many, batch_groups=4 * many, total_groups=40 * many)
    passes: list[float] = []
    monkeypatch.setattr(
        buffers.groups.fair_share, "divide", lambda *given, **more: passes.append(run.now) or divide(*given, **more)
    )
    run.now += 1.0
    for name in run.names:
        assert len(run.lease(0, 64, name)) == 4
        run.now += KEPT_S / many / 2
    assert len(passes) == 1 and run.held() == [4] * many
    run.finish(*run.g.table.indexes.held["p0"])
    run.now += KEPT_S
    assert run.lease(0, 64, "p0") == [] and run.lease(0, 64, "p1") == []  # nothing is ready: all of the batch is out


def test_of_a_fleet_the_one_that_comes_late_gets_its_share() -> None:
    many = FEW + 8
    run = Shared(many, batch_groups=4 * many, total_groups=40 * many)
    run.now += 1.0
    for name in run.names[:-1]:
        for most in (64, 60, 60):  # each asks again while the last one is on its way
            run.lease(0, most, name)
            run.now += 0.001
    assert run.held() == [4] * (many - 1) + [0]
    assert len(run.lease(0, 64, run.names[-1])) == 4


def test_a_look_at_many_that_wait_judges_each_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request that waits looks at them at every change: with many lost at once it must not look at them all."""
    run = Run(batch_groups=200, max_staleness=0, total_groups=400)
    run.lease(0, 200)
    run.g.give_back(LeaseReturn("p", tuple((n, run.g.table.groups[n].token) for n in range(200)), "stop"), now=run.now)
    asked: list[int] = []
    may = Schedule.may_resume
    monkeypatch.setattr(
        Schedule, "may_resume", lambda self, group, *more: asked.append(group.id) or may(self, group, *more)
    )
    assert run.lease(-1, 9) == [] and not asked
    run.g.table.meta.version = 1  # an engine of before the commit
    assert run.lease(0, 9) == [] and len(asked) <= 1
    run.g.table.meta.version = 0
    asked.clear()
    assert run.lease(0, 9) == list(range(9)) and len(asked) == 9
    run.g.check()


def test_the_estimate_of_what_is_ready_is_what_is_granted() -> None:
    """Alone, a producer gets exactly what is counted: through steps, losses and other depths."""
    for changes in ({}, {"max_staleness": 3, "depth": 1}, {"max_staleness": 4, "depth": 2, "total_groups": 30}):
        run = Run(**{"batch_groups": 5, "max_staleness": 1, **changes})
        for step in range(1, 5):
            for version in (step - 1, step - 2):
                ready = run.g.schedule.count_ready(version)
                got = run.lease(version, 999)
                assert len(got) == ready, (changes, step, version)
                returned = tuple((number, run.g.table.groups[number].token) for number in got[::2])
                run.g.give_back(LeaseReturn("p", returned, "stop"), now=run.now)
                assert run.g.schedule.count_ready(step - 1) >= len(returned)
            run.finish(*sorted(run.g.table.indexes.held.get("p", ())))
            run.step(step)
