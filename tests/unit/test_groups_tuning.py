"""Live tuning of the state machine: what is accepted, what a change does, that it lasts and can be undone."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import msgspec
import pytest
from groups_run import Run

import buffers.groups.tunable_settings
from asyncrl.errors import AsyncRLError
from buffers.groups.leases import MOST_GROUPS_PER_ANSWER
from buffers.groups.machine import GroupMachine
from buffers.groups.records import ledger_of, settings_of
from buffers.groups.tunable_settings import DepthController
from buffers.values.feasibility import Plan, capacity, depth_allows, feasible, list_requirements


def tune(run: Run, **changes: Any) -> tuple[int, dict[str, tuple[Any, Any]], str]:
    return run.g.tune({key.replace("__", "."): value for key, value in changes.items()}, author="me@here", now=run.now)


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.g.take().events if isinstance(event, dict) and event["e"] == name]


def refusal(run: Run, **changes: Any) -> str:
    before = (run.g.settings, run.g.live.tuning.number, dict(run.g.live.tuning.values))
    with pytest.raises(AsyncRLError) as caught:
        tune(run, **changes)
    assert caught.value.code == "tune.refused"
    assert (run.g.settings, run.g.live.tuning.number, run.g.live.tuning.values) == before
    return caught.value.message


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(buffers.groups.tunable_settings).failed == 0


def test_a_change_is_numbered_told_and_in_force() -> None:
    run = Run(max_staleness=4, depth=2)
    run.g.take()
    number, changed, note = tune(run, max_staleness=2, on_late="drop", late_timeout_s=5)
    assert number == 1 and "keep their bound" in note
    assert changed == {
        "buffer.late_timeout_s": (300.0, 5.0),
        "buffer.max_staleness": (4, 2),
        "buffer.on_late": ("wait", "drop"),
    }
    assert (run.g.settings.max_staleness, run.g.settings.on_late, run.g.settings.late_timeout_s) == (2, "drop", 5.0)
    told = events(run, "tune")
    assert [event["key"] for event in told] == sorted(changed)
    assert {(event["n"], event["author"]) for event in told} == {(1, "me@here")} and "undo" not in told[0]
    assert (told[1]["old"], told[1]["new"]) == (4, 2)
    assert tune(run, max_staleness=2) == (1, {}, "")  # it is so already: no change, no number
    assert events(run, "tune") == []


def test_what_is_refused_changes_nothing() -> None:
    run = Run(max_staleness=4, depth=3, batch_groups=2)
    assert "pipeline_depth = 3 is above max_staleness = 2" in refusal(run, max_staleness=2)
    assert "pipeline_depth = 9 is above max_staleness = 4" in refusal(run, pipeline_depth=9)
    assert "group_size cannot be changed" in refusal(run, group_size=3)
    assert "cannot be changed" in refusal(run, learner__lr=0.1)
    assert "cannot be changed" in refusal(run, learner__algorithm__nonsense=1)
    assert "buffer.max_staleness" in refusal(run, max_staleness=-1)
    assert "buffer.max_staleness" in refusal(run, max_staleness="high")
    assert "buffer.max_staleness" in refusal(run, max_staleness=True)
    assert "buffer.on_late" in refusal(run, on_late="sometimes")
    assert "batch_groups" in refusal(run, batch_groups=0)
    assert "minibatches = 3 exceeds batch_groups = 2" in refusal(run, learner__algorithm__minibatches=3)
    assert "nothing to change" in refusal(run)
    refusal(run, max_staleness=8, on_late="sometimes")  # as a whole or not at all
    with pytest.raises(AsyncRLError):
        run.g.undo_tune(7, author="me", now=run.now)


def test_depth_follows_the_bound_where_it_says_max() -> None:
    run = Run(max_staleness=4, depth=4, depth_rule="max")
    assert "pipeline_depth is 1 now" in tune(run, max_staleness=1)[2] and run.g.settings.depth == 1
    tune(run, max_staleness=6)
    assert run.g.settings.depth == 6
    tune(run, pipeline_depth=2)
    assert run.g.settings.depth == 2
    tune(run, max_staleness=1, pipeline_depth="max")
    assert run.g.settings.depth == 1


def test_a_group_keeps_the_bound_of_its_lease_over_a_change() -> None:
    run = Run(max_staleness=1)
    assert run.lease(0) == [0]
    tune(run, max_staleness=3, pipeline_depth=3)
    assert run.lease(0) == [1]
    assert (run.g.table.groups[0].bound, run.g.table.groups[0].deadline) == (1, 1)
    assert (run.g.table.groups[1].bound, run.g.table.groups[1].deadline) == (3, 3)
    tune(run, max_staleness=0, pipeline_depth=0)
    assert run.lease(0) == []
    assert run.g.table.groups[1].bound == 3
    run.finish(0, 1)
    assert run.claim(1) == [0]
    run.commit(1)
    assert run.claim(2) == [1]  # lag 1, above the bound in force, below its own
    run.commit(2)
    assert run.lease(1) == [] and "must sync" in run.g.lease_blocked(1)
    assert run.lease(2) == [2] and run.g.table.groups[2].deadline == 2


def test_changes_survive_a_restart_and_win_over_the_configuration() -> None:
    run = Run(max_staleness=4, depth=2, total_groups=20, batch_groups=2)
    tune(run, max_staleness=3)
    tune(run, batch_groups=4, learner__algorithm__tis_cap="off", max_groups_in_flight=2)
    before = run.g.settings
    base, run.g.live.current = run.g.settings, run.g.live.base
    run.reload()  # constructed with the configuration's settings
    assert run.g.settings == before == base and run.g.live.tuning.number == 2
    assert run.g.live.plan == Plan(((1, 4),)) and run.g.settings.total_groups == 40
    assert run.g.undo_tune(1, author="me", now=run.now)[0] == 3
    assert run.g.settings.max_staleness == 3 and run.g.settings.batch_groups == 2
    assert run.g.settings.total_groups == 20 and run.g.live.tuning.learner_overrides() == ""


def test_undo_is_a_change_of_its_own() -> None:
    run = Run(max_staleness=4, depth=1)
    tune(run, max_staleness=2)
    tune(run, max_staleness=3, on_late="drop")
    run.g.take()
    number, changed, _ = run.g.undo_tune(1, author="me@here", now=run.now)
    assert number == 3 and changed == {"buffer.max_staleness": (3, 2), "buffer.on_late": ("drop", "wait")}
    assert all(event["undo"] and event["n"] == 3 for event in events(run, "tune"))
    number, changed, _ = run.g.undo_tune(0, author="me@here", now=run.now)
    assert number == 4 and changed == {"buffer.max_staleness": (2, 4)} and run.g.settings == run.g.live.base


def test_a_checkpoint_brings_the_changes_back_where_the_store_is_gone() -> None:
    run = Run(batch_groups=1, max_staleness=2, total_groups=20)
    run.step(1)
    tune(run, batch_groups=2, max_staleness=3, pipeline_depth=3, learner__algorithm__clip_high=0.4)
    run.step(2)
    text = run.g.batches.ledger(epoch=run.epoch, step=2).to_json()
    run.g = GroupMachine(run.g.live.base, epoch=2)
    run.register(2, ledger_of(text))
    assert run.g.live.tuning.number == 1 and run.g.settings.max_staleness == 3
    assert run.g.live.plan == Plan(((1, 1), (2, 2))) and run.g.schedule.unclaimed == 1 + 2 * 19 - 3
    assert len(run.step(3)) == 2
    older = Run(max_staleness=2)
    tune(older, max_staleness=4)
    tune(older, max_staleness=5)
    older.register(0, ledger_of(text).__class__(tuning=text and ledger_of(text).tuning))
    assert older.g.settings.max_staleness == 5  # what is newer here stays


def test_settings_of_a_batch_come_back_with_it() -> None:
    run = Run(batch_groups=1, max_staleness=2)
    tune(run, learner__algorithm__tis_cap=1.5, max_staleness=3)
    run.finish(*run.lease(0, 2))
    claimed = run.g.claim(epoch=run.epoch, step=1, version=0, now=run.now)
    assert claimed is not None and msgspec.json.decode(claimed.batch.tuning) == {"learner.algorithm.tis_cap": 1.5}
    tune(run, learner__algorithm__tis_cap=3.0)
    run.reload()
    run.register(0)
    again = run.g.claim(epoch=run.epoch, step=1, version=0, now=run.now)
    assert again is not None and again.replayed and again.batch.tuning == claimed.batch.tuning
    run.commit(1)
    later = run.g.claim(epoch=run.epoch, step=2, version=1, now=run.now)
    assert later is not None and msgspec.json.decode(later.batch.tuning) == {"learner.algorithm.tis_cap": 3.0}


def test_the_quota_of_a_producer() -> None:
    run = Run(batch_groups=4, max_staleness=2)
    tune(run, max_groups_in_flight=2)
    assert run.lease(0, 9, name="a") == [0, 1] and run.lease(0, 9, name="a") == []
    assert "quota" in run.g.lease_blocked(0, "a") and run.g.lease_blocked(0, "b") == ""
    assert run.lease(0, 1, name="b") == [2]
    run.finish(0)
    assert run.lease(0, 9, name="a") == [3]
    tune(run, max_groups_in_flight=0)
    assert run.lease(0, 3, name="a") == [4, 5, 6]


# ---------------------------------------------------------------- batch_groups


def test_a_plan_against_the_plain_formulas() -> None:
    flat = Plan(((1, 3),))
    for v in range(4):
        for u in range(v - 1, 8):
            assert capacity(flat, v, u) == capacity(3, v, u) == max(0, u - v + 1) * 3
    plan = flat.resize(4, 5).resize(6, 1)
    for v in range(8):
        for u in range(v, 12):
            assert plan.capacity(v, u) == sum(plan.size(step) for step in range(v + 1, u + 2))
    assert flat.resize(4, 3) == flat and plan.resize(1, 2) == Plan(((1, 2),))
    due = {2: 3, 4: 1}
    assert feasible(due, v=2, batch=Plan(((1, 3),))) and not feasible(due, v=2, batch=Plan(((1, 2),)))
    assert list_requirements(due, v=2, batch=Plan(((1, 3), (4, 1)))) == [(2, 3), (4, 2)]
    assert depth_allows(5, depth=1, producer_lag=0, batch=Plan(((1, 4), (2, 2)))) and not depth_allows(
        6, depth=1, producer_lag=0, batch=Plan(((1, 4), (2, 2)))
    )


def test_a_larger_batch_counts_at_once() -> None:
    run = Run(batch_groups=1, max_staleness=1, total_groups=5)
    run.finish(*run.lease(0, 2))
    assert tune(run, batch_groups=2)[2] == "" and run.g.settings.total_groups == 10
    assert run.claim(1) == [0, 1]
    run.commit(1)
    for step in range(2, 6):
        run.step(step)
    assert run.g.schedule.unclaimed == 0 and run.claim(6) is None


def test_a_smaller_batch_waits_until_nothing_becomes_infeasible() -> None:
    """B = 4, eta = 1: 8 groups are due at versions up to 1. With B = 2 at once, 4 of them would miss their turn."""
    run = Run(batch_groups=4, max_staleness=1, total_groups=40)
    assert len(run.lease(0, 99)) == 8
    _, changed, note = tune(run, batch_groups=2)
    assert changed == {"buffer.batch_groups": (4, 2)} and "from step 3 on: 8 groups" in note
    assert run.g.settings.total_groups == 4 * 2 + 8 * 2
    run.finish(*range(8))
    assert run.claim(1) == [0, 1, 2, 3]
    assert run.lease(0) == [] and run.lease(1) == []  # a small batch ahead, a large one and one in training
    run.commit(1)
    assert run.lease(1, 99) == [8, 9] and run.lease(1) == []  # deadline 2: one small batch
    assert run.claim(2) == [4, 5, 6, 7]
    run.commit(2)
    run.finish(8, 9)
    assert run.claim(3) == [8, 9]
    run.commit(3)
    for step in range(4, 11):
        assert len(run.step(step)) == 2
    assert run.g.schedule.unclaimed == 0


def test_a_smaller_batch_is_taken_sooner_where_little_is_outstanding() -> None:
    run = Run(batch_groups=4, max_staleness=3, total_groups=40)
    run.finish(*run.lease(0, 3))
    assert tune(run, batch_groups=1)[2] == ""  # three groups, due at 3: three small batches do
    assert run.lease(0, 9) == [3] and run.lease(0) == []
    assert run.claim(1) == [0]


def test_a_learner_that_goes_back_gets_the_sizes_of_those_steps() -> None:
    run = Run(batch_groups=2, max_staleness=1, total_groups=20)
    run.step(1)
    ledger = run.g.batches.ledger(epoch=run.epoch, step=1)
    run.step(2)
    tune(run, batch_groups=1)
    plan = run.g.live.plan
    run.step(3)
    run.g.table.batches.clear()  # whatever made the store forget them
    for number in [number for number in run.g.table.groups if run.g.table.groups[number].step]:
        group = run.g.table.groups[number]
        run.g.group_leases.restart(group, "test")
    run.register(1, ledger)
    assert run.g.live.plan == plan and run.g.table.frontier == 1
    assert len(run.step(2)) == 2 and len(run.step(3)) == 1


# ---------------------------------------------------------------- pipeline_depth = auto


def drive(control: DepthController, idle: list[float], *, depth: int, limit: int, steps: int) -> list[int]:
    """The depth after each step, where the learner trains for a second and waits `idle[d]` seconds with depth d."""
    seen = []
    for _ in range(steps):
        depth = control.observe(idle_s=idle[depth], step_s=1.0 + idle[depth], depth=depth, limit=limit)
        seen.append(depth)
    return seen


def test_auto_depth_finds_the_smallest_that_keeps_the_learner_busy() -> None:
    seen = drive(DepthController(0.03), [1, 0.5, 0.1, 0.01, 0.0], depth=1, limit=4, steps=400)
    assert seen[40] == 3
    assert seen.count(3) > 350 and max(seen) == 3  # now and then it tries 2 again, ever more rarely
    changes = [step for step, (a, b) in enumerate(itertools.pairwise(seen)) if a != b]
    assert len(changes) < 16
    assert drive(DepthController(0.03), [0, 0, 0, 0, 0], depth=4, limit=4, steps=100)[-1] == 1
    assert drive(DepthController(0.03), [1, 1, 0.5], depth=1, limit=2, steps=50)[-1] == 2  # never above the limit
    assert set(drive(DepthController(0.03), [1], depth=0, limit=0, steps=50)) == {0}


def test_a_share_between_half_the_target_and_the_target_changes_nothing() -> None:
    assert set(drive(DepthController(0.1), [1, 0.9, 0.07, 0.0], depth=2, limit=4, steps=300)) == {2}


def test_a_depth_that_makes_no_step_shorter_is_left() -> None:
    """Producers that are too slow, or that share processors with the learner: more work in flight is only older."""
    seen = drive(DepthController(0.03), [1, 0.5, 0.49, 0.48, 0.48], depth=1, limit=4, steps=400)
    assert max(seen) == 2 and seen[-1] == 1 and seen.count(2) < 60
    contended = [(0.1, 1.0), (0.1, 1.0), (0.0, 1.1)]  # the wait becomes a slower step
    control, depth, at = DepthController(0.03), 1, []
    for _ in range(200):
        idle_s, busy_s = contended[depth]
        depth = control.observe(idle_s=idle_s, step_s=idle_s + busy_s, depth=depth, limit=2)
        at.append(depth)
    assert at[-1] == 1 and at.count(2) < 40


def test_the_wait_for_the_first_batches_does_not_count() -> None:
    control = DepthController(0.03)
    assert {control.observe(idle_s=20.0, step_s=21.0, depth=1, limit=8) for _ in range(2)} == {1}
    assert {control.observe(idle_s=0.0, step_s=1.0, depth=1, limit=8) for _ in range(40)} == {1}


def test_auto_depth_is_fed_by_the_claims_and_told_as_changes() -> None:
    run = Run(max_staleness=3, depth=1, depth_rule="auto", batch_groups=1, total_groups=200)
    run.g.take()
    for step in range(1, 24):
        assert run.claim(step) is None  # the learner asks
        run.now += 1.0 / run.g.settings.depth
        run.finish(*run.lease(step - 1, 1))
        assert run.claim(step) is not None
        run.now += 1.0
        run.commit(step)
    told = events(run, "tune")
    assert [(event["author"], event["key"], event["old"], event["new"]) for event in told] == [
        ("auto", "buffer.pipeline_depth", 1, 2),
        ("auto", "buffer.pipeline_depth", 2, 3),
    ]
    assert run.g.settings.depth == 3 and run.g.live.tunable()["buffer.pipeline_depth"] == "auto"
    run.reload()
    assert run.g.settings.depth == 3  # what was found is kept
    tune(run, max_staleness=1)
    assert run.g.settings.depth == 1
    tune(run, max_staleness=0)
    assert run.g.settings.depth == 0


def test_auto_depth_waits_for_a_learner() -> None:
    run = Run(max_staleness=3, depth=1, depth_rule="auto", batch_groups=1, total_groups=200)
    run.g = GroupMachine(run.g.settings)  # before any learner
    assert run.lease(0, 9) == [0, 1, 2, 3]  # nobody has waited yet: as many as the bound allows
    run.register(0)
    run.finish(0, 1, 2)
    assert run.claim(1) is not None and run.lease(0, 9) == []
    run.commit(1)
    assert run.claim(2) is not None and run.lease(1, 9) == [] and "pipeline_depth is 1" in run.g.lease_blocked(1)


def test_the_configuration_takes_auto() -> None:
    from test_config import GOOD

    from asyncrl import config

    parsed = config.parse(GOOD + '[buffer]\npipeline_depth = "auto"\nmax_staleness = 3\n')
    found = settings_of(parsed)
    assert parsed.buffer.depth == 3 and (found.depth, found.depth_rule, found.learner_idle_target) == (1, "auto", 0.03)
    assert settings_of(config.parse(GOOD + '[buffer]\npipeline_depth = "auto"\nmax_staleness = 0\n')).depth == 0


def test_the_groups_ahead_of_the_learner_have_a_limit() -> None:
    run = Run(max_staleness=4, depth=4)
    for value in ({"max_staleness": 2**61, "pipeline_depth": "max"}, {"batch_groups": 10**6}):
        assert "ahead of the learner" in refusal(run, **value)
    tune(run, max_staleness=900, pipeline_depth="max", batch_groups=1000)


def test_one_answer_has_a_limited_number_of_groups() -> None:
    run = Run(max_staleness=900, depth=900, batch_groups=1000, total_groups=10**6)
    first = run.g.lease("greedy", engine_version=0, max_groups=2**61, request=1, now=run.now)
    second = run.g.lease("greedy", engine_version=0, max_groups=2**61, request=2, now=run.now)
    assert len(first) == len(second) == MOST_GROUPS_PER_ANSWER and not {*first} & {*second}
