"""Filters, over-issue, cancelled leases, and the budgets that end a run: what the state machine does not train on."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from groups_run import Run, settings

import buffers.groups.failure_budget
from asyncrl.errors import AsyncRLError
from asyncrl.wire import LeaseReturn, RewardFailure, SampleHead, Samples, Score, Scores
from buffers.groups.failure_budget import load_filters, zero_variance
from buffers.groups.group_table import reasons
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Record, State


class Filtered(Run):
    """A run with filters."""

    def __init__(self, *filters: Any, **changes: Any) -> None:
        super().__init__(**changes)
        self.filters = filters
        self.g = GroupMachine(settings(**changes), filters=filters)
        self.register(0)

    def reload_with_filters(self) -> None:
        """Through the rows, as a restart of the service."""
        rows = [(change.key, change.value) for change in self.g.rows()]
        self.g = GroupMachine(self.g.live.base, epoch=self.g.service_epoch + 1, filters=self.filters)
        self.g.load([(key, value) for key, value in rows if value is not None])

    def complete(self, number: int, *rewards: float, version: int = 0) -> str:
        """Send all samples of a leased group with these rewards."""
        for index, reward in enumerate(rewards):
            token = self.g.table.groups[number].token
            head = Samples(
                "p",
                number,
                token,
                (SampleHead(index, 3 + index, "stop", ((version, 3 + index),)),),
                {},
                (),
                "",
                1,
                rewards={index: reward},
            )
            checksum = 100 * number + index
            self.g.samples(
                head, checksum=checksum, invalid=str, keep=lambda at=checksum: Record(1, at, 1, 1, at), now=self.now
            )
        return self.state(number)


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.g.take().events if isinstance(event, dict) and event["e"] == name]


# ---------------------------------------------------------------- filters


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(buffers.groups.failure_budget).failed == 0


def test_zero_variance_is_dropped_and_gives_its_capacity_back() -> None:
    run = Filtered(("zero_variance", zero_variance), max_staleness=0, batch_groups=2, total_groups=4)
    assert run.lease(0, 9) == [0, 1] and run.lease(0) == []
    assert run.complete(0, 1.0, 1.0) == "DROPPED" and run.complete(1, 0.0, 1.0) == "READY"
    assert reasons(run.g.table, State.DROPPED) == {"zero_variance": 1}
    assert len(run.g.take().freed) == 2
    assert run.lease(0, 9) == [2]  # its place, and not more
    assert run.complete(2, 0.25, 1.0) == "READY" and run.claim(1) == [1, 2]
    run.commit(1)
    run.g.check()


def test_a_filter_of_the_user_sees_the_group_and_names_its_reason() -> None:
    seen: list[dict[str, Any]] = []

    def short(**group: Any) -> str:
        seen.append(group)
        return "too short" if max(group["lengths"]) < 5 else ""

    run = Filtered(("zero_variance", zero_variance), ("m:short", short), max_staleness=2)
    run.lease(0, 3)
    assert run.complete(0, 0.5, 1.0) == "DROPPED"
    assert seen == [{"rewards": [0.5, 1.0], "lengths": [3, 4], "parts": [{}, {}], "group": 0}]
    assert run.g.table.ended[0].reason == "filtered" and run.g.table.ended[0].detail == "m:short: too short"
    assert run.complete(1, 1.0, 1.0) == "DROPPED" and len(seen) == 1  # the first filter had its say
    assert {event["reason"] for event in events(run, "drop")} == {"filtered", "zero_variance"}


def test_filters_are_asked_when_the_last_score_comes() -> None:
    run = Filtered(("zero_variance", zero_variance))
    run.lease(0)
    run.send(0, 0, 1, rewards=False)
    items = run.g.reward_lease("r", max_samples=9, request=1, now=0.0)
    first, second = (Score(item.group, item.index, item.token, 0.5, {"f": 0.5}) for item in items)
    run.g.scores(Scores("r", (first,)), now=0.0)
    assert run.state(0) == "UNSCORED"
    assert run.g.scores(Scores("r", (second,)), now=0.0).accepted == 1
    assert run.state(0) == "DROPPED"
    assert run.g.scores(Scores("r", (second,)), now=0.0).refused == {"0:1": "gone: dropped (zero_variance)"}
    run.g.check()


def test_a_filter_that_fails_is_a_dead_group_and_has_a_budget() -> None:
    def broken(**_: Any) -> str:
        raise KeyError("x")

    run = Filtered(("m:broken", broken), batch_groups=8, max_failed_groups=1, max_staleness=0)
    assert run.lease(0, 3) == [0, 1, 2]
    assert run.complete(0, 0.0, 1.0) == "DEAD" and run.g.table.ended[0].reason == "filter_failed"
    assert run.g.table.ended[0].detail == "m:broken: KeyError: 'x'" and run.g.budget.fault is None
    run.complete(1, 0.0, 1.0)
    assert (
        run.g.budget.fault is not None
        and run.g.budget.fault[0] == "filter.budget"
        and "1 are allowed" in run.g.budget.fault[1]
    )
    with pytest.raises(AsyncRLError) as ended:
        run.claim(1)
    assert ended.value.code == "filter.budget"
    silent = Filtered(("m:none", lambda **_: None))
    silent.lease(0)
    assert silent.complete(0, 0.0, 1.0) == "DEAD" and "returned NoneType" in silent.g.table.ended[0].detail


def test_a_run_that_filters_everything_ends_by_name() -> None:
    run = Filtered(
        ("zero_variance", zero_variance), batch_groups=4, max_staleness=0, filter_window=8, max_filtered_rate=0.75
    )
    dropped = 0
    while run.g.budget.fault is None:
        [number] = run.lease(0)
        run.complete(number, 1.0, 1.0)
        dropped += 1
        assert dropped <= 8
        if dropped == 4:
            run.reload_with_filters()
    assert dropped == 8 and run.g.budget.fault[0] == "filter.rate"
    assert run.g.budget.fault[1].startswith("8 of the last 8 groups were filtered, most by zero_variance (8)")


def test_filters_below_the_rate_let_the_run_go_on() -> None:
    run = Filtered(
        ("zero_variance", zero_variance),
        batch_groups=1,
        max_staleness=0,
        filter_window=8,
        max_filtered_rate=0.8,
        total_groups=40,
    )
    for step in range(1, 20):
        for _ in range(2):  # 2 of 3 are dropped
            [number] = run.lease(step - 1)
            run.complete(number, 1.0, 1.0)
        [number] = run.lease(step - 1)
        assert run.complete(number, 0.0, 1.0, version=step - 1) == "READY" and run.claim(step) == [number]
        run.commit(step)
    assert run.g.budget.fault is None and reasons(run.g.table, State.DROPPED) == {"zero_variance": 38}


def test_filters_are_loaded_by_name() -> None:
    assert load_filters(["zero_variance", "math:gcd"])[0][1] is zero_variance
    for name in ("math:nothing", "no_such_module:f"):
        with pytest.raises(AsyncRLError) as caught:
            load_filters([name])
        assert caught.value.code == "config.filter"


# ---------------------------------------------------------------- over-issue


def test_over_issue_takes_the_first_samples_and_cancels_the_rest() -> None:
    run = Run(over_issue=2)
    run.requests += 1
    run.g.workers.see("producer", "p", 0.0)
    [lease] = run.g.lease("p", engine_version=0, max_groups=1, request=run.requests, now=0.0)
    assert lease.missing == (0, 1, 2, 3)
    assert run.send(0, 3, checksum=1).accepted == (3,)
    assert run.state(0) == "LEASED"
    reply = run.send(0, 1, checksum=2)
    assert reply.accepted == (1,) and reply.cancelled == ((0, lease.token),)
    assert run.state(0) == "READY" and sorted(run.g.table.groups[0].samples) == [1, 3]
    assert [(event["g"], event["token"], event["why"]) for event in events(run, "cancel")] == [
        (0, lease.token, "complete")
    ]
    late = run.send(0, 0, checksum=3)  # told already, so it is not repeated; the heartbeat repeats it
    assert late.refused == {0: "cancelled: the group is complete"} and late.cancelled == ()
    assert run.send(0, 1, checksum=2).duplicate == (1,)  # the answer of the accepted one was lost
    assert run.g.workers.take_cancelled("p", again=True) == ((0, lease.token),)
    assert run.claim(1) == [0]


def test_more_samples_than_fit_in_one_message() -> None:
    run = Run(over_issue=2)
    run.lease(0)
    reply = run.send(0, 2, 0, 3, 1, checksum=5)
    assert reply.accepted == (2, 0) and set(reply.refused) == {3, 1}
    assert reply.refused[3] == "cancelled: the group is complete"
    assert sorted(run.g.table.groups[0].samples) == [0, 2]


def test_a_second_attempt_asks_for_what_is_missing_and_the_extras() -> None:
    run = Run(over_issue=1, group_size=3)
    run.lease(0)
    run.send(0, 3)
    run.g.give_back(LeaseReturn("p", ((0, run.g.table.groups[0].token),), "stop"), now=0.0)
    run.requests += 1
    [lease] = run.g.lease("q", engine_version=0, max_groups=1, request=run.requests, now=0.0)
    assert lease.missing == (0, 1, 2)
    assert run.send(0, 0, checksum=2, name="q").accepted == (0,)
    assert run.send(0, 2, checksum=3, name="q").accepted == (2,)
    assert run.state(0) == "READY"


# ---------------------------------------------------------------- cancelled leases


def test_a_group_dropped_as_late_is_cancelled_at_its_producer() -> None:
    run = Run(max_staleness=0, batch_groups=1, late_timeout_s=5.0)
    run.lease(0)
    token = run.g.table.groups[0].token
    assert run.claim(1) is None
    run.now = 6.0
    run.g.heartbeat("producer", "p", pid=1, host="h", now=run.now)
    run.g.take()
    assert run.claim(1) is None and run.state(0) == "DROPPED"
    assert [(event["g"], event["token"], event["why"]) for event in events(run, "cancel")] == [(0, token, "late")]
    assert (
        run.g.workers.take_cancelled("p", again=True) == ((0, token),) == run.g.workers.take_cancelled("p", again=True)
    )
    assert run.g.workers.take_cancelled("q", again=True) == ()
    run.now += run.g.settings.lease_timeout_s + 1
    run.g.tick(run.now)
    assert run.g.workers.take_cancelled("p", again=True) == ()


def test_a_producer_that_was_silent_is_told_what_it_lost_and_a_new_one_is_not() -> None:
    run = Run()
    run.lease(0)
    token = run.g.table.groups[0].token
    run.now = run.g.settings.lease_timeout_s + 1
    run.g.tick(run.now)
    assert run.state(0) == "LEASED" and not run.g.table.groups[0].holder
    assert run.g.workers.take_cancelled("p", again=True) == ((0, token),)
    run.g.hello("producer", "p", pid=2, host="h", now=run.now)
    assert run.g.workers.take_cancelled("p", again=True) == ()


def test_a_lease_that_was_given_back_is_not_cancelled() -> None:
    run = Run()
    run.lease(0, 2)
    tokens = {number: run.g.table.groups[number].token for number in (0, 1)}
    run.g.give_back(LeaseReturn("p", ((0, tokens[0]),), "too long", dead=True), now=0.0)
    run.g.give_back(LeaseReturn("p", ((1, tokens[1]),), "stop"), now=0.0)
    assert events(run, "cancel") == [] and run.g.workers.take_cancelled("p", again=True) == ()


# ---------------------------------------------------------------- budgets over restarts


def test_the_poison_window_survives_a_restart() -> None:
    run = Run(batch_groups=8, max_staleness=4, max_poison_rate=0.5, poison_window=8)
    for number in range(4):
        run.lease(0)
        run.send(number, 0, invalid="length: x")
    run.reload()
    assert run.g.budget.fault is None
    run.lease(0)
    run.send(4, 0, invalid="nan: y")
    assert run.g.budget.fault is not None and run.g.budget.fault[0] == "poison.budget"
    assert "5 of the last 5 groups were poisoned, most by length (4); the last: length: x" in run.g.budget.fault[1]


def test_good_groups_push_poison_out_of_the_window() -> None:
    run = Run(batch_groups=8, max_staleness=8, max_poison_rate=0.5, poison_window=4)
    for number in range(0, 24, 3):
        assert run.lease(0, 3) == [number, number + 1, number + 2]
        run.send(number, 0, invalid="length: x")
        run.finish(number + 1, number + 2)
    assert run.g.budget.fault is None and len(run.g.budget.counts.poison) <= 4


def failed_reward(run: Run) -> None:
    [number] = run.lease(0)
    run.send(number, 0, 1, rewards=False)
    for _ in range(run.g.settings.reward_retries + 1):
        run.requests += 1
        item = next(i for i in run.g.reward_lease("r", max_samples=9, request=run.requests, now=0.0) if i.index == 0)
        run.g.scores(Scores("r", (), (RewardFailure(item.group, 0, item.token, "raised", "boom"),)), now=0.0)
        if number in run.g.table.groups:
            run.g.hello("reward", "r", pid=1, host="h", now=0.0)
    assert run.state(number) == "DEAD"


def test_a_restart_grants_no_new_reward_budget_but_a_run_that_ended_by_it_may_start_again() -> None:
    run = Run(batch_groups=8, max_failed_groups=2, reward_retries=1)
    failed_reward(run)
    failed_reward(run)
    run.reload()
    assert run.g.budget.fault is None
    failed_reward(run)
    assert (
        run.g.budget.fault is not None and run.g.budget.fault[0] == "reward.budget" and "boom" in run.g.budget.fault[1]
    )
    run.reload()  # somebody has mended the function
    assert run.g.budget.fault is None
    failed_reward(run)
    failed_reward(run)
    run.reload()
    assert run.g.budget.fault is None
    failed_reward(run)
    assert run.g.budget.fault is not None


def test_retries_of_a_reward_survive_a_restart() -> None:
    run = Run(reward_retries=1)
    run.lease(0)
    run.send(0, 0, 1, rewards=False)
    [item, _] = run.g.reward_lease("r", max_samples=2, request=1, now=0.0)
    run.g.scores(Scores("r", (), (RewardFailure(0, 0, item.token, "raised", "one"),)), now=0.0)
    run.reload()
    [item, *_] = run.g.reward_lease("r", max_samples=2, request=1, now=0.0)
    assert (item.index, item.attempt) == (0, 1)
    run.g.scores(Scores("r", (), (RewardFailure(0, 0, item.token, "raised", "two"),)), now=0.0)
    assert run.state(0) == "DEAD"
