"""Requests that come late, twice or after a pause, at the service: what is granted, and to whom."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service_lab
from hypothesis import example, given, settings
from hypothesis import strategies as st
from service_lab import Asked, ServiceLab

from asyncrl import wire
from asyncrl.errors import AsyncRLError
from asyncrl.metrics import open_lines
from buffers import main as server
from buffers.evaluation.holders import LEFT_S
from buffers.groups import recovery


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceLab]:
    made = ServiceLab(tmp_path, monkeypatch)
    yield made
    made.close()


def granted(leases: wire.Leases) -> list[int]:
    return [lease.group for lease in leases.leases]


def test_late_copies_of_answered_requests_are_granted_nothing_new(lab: ServiceLab) -> None:
    """Copies of requests 1 and 2 arrive after request 3 was answered, in that order."""
    lab.hello("producer", "p")
    first, second, third = (granted(lab.lease("p", number).answer) for number in (1, 2, 3))
    assert len({*first, *second, *third}) == 3
    returned = tuple((number, lab.groups.table.groups[number].token) for number in (*first, *second))
    lab.groups.give_back(wire.LeaseReturn("p", returned, "stop"), now=lab.now)
    assert granted(lab.lease("p", 1).answer) == []
    assert granted(lab.lease("p", 2).answer) == []
    assert granted(lab.lease("p", 3).answer) == third
    assert lab.groups.table.indexes.held["p"] == set(third)


def test_a_late_copy_does_not_take_the_version_of_its_producer_back(lab: ServiceLab) -> None:
    """Else an evaluation of version 1 would end because nobody has its weights any more."""
    lab.hello("producer", "p")
    holders = lab.service.evaluations.prompt_leases.holders
    holders.begin(1)
    for request, version in ((1, 0), (2, 1), (1, 0)):
        lab.ask(wire.LeaseRequest("p", version, 1, 0.0), request=request)
        lab.tick()
    assert not holders.all_gone(1, lab.now, 30.0)


def test_held_out_prompts_that_a_producer_cannot_keep_are_not_granted_to_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hold has expired and no newer weights have come: it would give them back without end, until it is paused."""
    monkeypatch.setattr(service_lab, "TOML", service_lab.TOML + "[evaluation]\npath = 'h.jsonl'\nevery = 1\n")
    lab = ServiceLab(tmp_path, monkeypatch)
    evaluations, request = lab.service.evaluations, 0

    def ask(name: str, version: int = 0) -> list[wire.Lease]:
        nonlocal request
        request += 1
        asked = lab.ask(wire.LeaseRequest(name, version, 0, 0.0), request=request)
        lab.tick()
        return list(asked.answer.leases)

    def give_back(name: str, leases: list[wire.Lease]) -> None:
        named = tuple((lease.group, lease.token) for lease in leases)
        lab.ask(wire.LeaseReturn(name, named, "swapped"), request=0)

    for name in ("p", "q"):
        lab.hello("producer", name)
    evaluations.greet("p", 3)
    evaluations.due(0, "d0")
    leases = ask("p")
    assert leases
    give_back("p", [])
    give_back("p", leases)
    assert ask("p") == []
    again = ask("q")
    assert [lease.group for lease in again] == [lease.group for lease in leases], "no prompt is lost"
    assert not any(lease.attempt for lease in again)
    give_back("q", again)
    for _ in range(int(LEFT_S)):  # a longer step counts as a service that stood still
        lab.tick(1.0)
    again = ask("q")
    assert again, "a swap may have broken off"
    give_back("q", again)
    assert ask("q") == []
    lab.hello("producer", "p", pid=8)
    assert ask("p"), "another process has another hold"
    evaluations.finish()
    evaluations.due(1, "d1")
    lab.groups.table.meta.newest = 1
    assert ask("q", 1), "another step"
    lab.close()


def test_a_full_disk_of_metrics_ends_no_service(lab: ServiceLab) -> None:
    lab.hello("producer", "p")
    for log in (lab.service.session._roles_log, lab.service.session._buffer_log):
        log._file = open_lines(Path("/dev/full"))
    assert isinstance(lab.beat("producer", "p", stats={"busy_share": 0.5}), wire.Ok)
    lab.service.write_metrics()
    assert (lab.service.session._roles_log.lost, lab.service.session._buffer_log.lost) == (1, 1)


def test_a_registration_that_breaks_the_table_later_persists_nothing(
    lab: ServiceLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the silence of the learner before it, and is looked at again by the clock."""

    def check(_table: object) -> None:
        raise AsyncRLError("internal", "a check failed")

    epoch = lab.groups.table.meta.epoch
    asked = lab.ask(wire.Register("learner", 2, "h2", 0, "", False, "", {0: "d0"}), request=1)
    with monkeypatch.context() as patched:
        patched.setattr(recovery, "check_table", check)
        with pytest.raises(AsyncRLError, match="a check failed"):
            for _ in range(100):
                lab.tick()
    assert not asked.answers
    died = lab.service
    lab.service = server.open_service(lab.config, server.open_store(lab.config, lambda: False))
    assert lab.groups.table.meta.epoch == epoch and lab.groups.table.meta.learner[1] == 1
    died.segments.close()


class ForgetfulNetwork:
    """A producer with up to two lease requests under way; answers may be lost, and then the request is sent again."""

    def __init__(self, lab: ServiceLab) -> None:
        self.lab = lab
        self.sent = 0
        self.waiting: dict[int, list[tuple[Asked, bool]]] = {}  # request -> copies, and whether their answers arrive
        self.held: set[tuple[int, int]] = set()

    def ask(self, *numbers: int, arrives: bool) -> None:
        asked = self.lab.ask_together(*((number, wire.LeaseRequest("p", 0, 1, 1.0)) for number in numbers))
        for number, one in zip(numbers, asked, strict=True):
            self.waiting.setdefault(number, []).append((one, arrives))
        self.receive()

    def receive(self) -> None:
        for number, copies in list(self.waiting.items()):
            arrived = [one.answers[0] for one, arrives in copies if arrives and one.answers]
            if arrived:
                del self.waiting[number]
                self.held |= {(lease.group, lease.token) for lease in arrived[0].leases}

    def do(self, action: str, arrives: bool) -> None:
        if action == "ask" and len(self.waiting) < 2:
            self.sent += 1
            self.ask(self.sent, arrives=arrives)
        elif action == "again" and self.waiting:
            self.ask(*sorted(self.waiting), arrives=arrives)
        elif action == "kill":
            self.lab.restart()
        elif action == "return" and self.held:
            given = tuple(self.held)
            self.lab.ask(wire.LeaseReturn("p", given, "stop"), request=0)
            self.held.clear()
        else:
            self.lab.tick()
            self.receive()


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["ask", "again", "kill", "return", "tick"]), st.booleans()), max_size=14)
)
@example(steps=[("ask", False), ("ask", False), ("kill", False)])
def test_every_grant_reaches_its_producer(steps: list[tuple[str, bool]]) -> None:
    """Whatever answers were lost, and whenever the service was killed: once its requests are answered, it knows all."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        lab = ServiceLab(Path(folder), patch)
        lab.hello("producer", "p")
        network = ForgetfulNetwork(lab)
        for action, arrives in steps:
            network.do(action, arrives)
        network.do("again", True)
        lab.tick(1.1)  # the requests wait for 1 s
        network.receive()
        assert not network.waiting
        table = lab.groups.table
        assert network.held == {(number, table.groups[number].token) for number in table.indexes.held.get("p", ())}
        lab.close()


def test_a_copy_of_an_answered_reward_request_is_answered_at_once(lab: ServiceLab) -> None:
    """Its answer, which held nothing, was lost: waiting with it would keep the worker from the work that came since."""
    lab.hello("reward", "r")
    asked = lab.ask(wire.RewardRequest("r", 4, 1.0), request=1)
    assert not asked.answers
    lab.tick(0.9)
    lab.tick(0.2)
    assert asked.answer.items == ()
    assert lab.ask(wire.RewardRequest("r", 4, 20.0), request=1).answer.items == ()
    newer = lab.ask(wire.RewardRequest("r", 4, 20.0), request=2)
    assert not newer.answers
    assert not lab.ask(wire.RewardRequest("r", 4, 20.0), request=1).answers  # its asker waits for the newer one
    assert not newer.answers


def test_a_copy_does_not_end_a_producer_of_a_run_that_goes_on(lab: ServiceLab) -> None:
    """A complete run was started again with more steps, and no learner has registered yet."""
    lab.hello("producer", "p")
    lab.lease("p", 1)
    lab.groups.table.meta.done, lab.service.context.continues = True, True
    assert not lab.lease("p", 1).answer.done
    assert not lab.lease("p", 2).answer.done


def test_a_service_that_stood_still_counts_nobody_as_silent(lab: ServiceLab) -> None:
    """It was stopped, or its store did not answer, for longer than a lease lives: nobody could be heard meanwhile."""
    lab.hello("producer", "p")
    held = granted(lab.lease("p", 1, groups=2).answer)
    wall = lab.groups.tx.wall_offset + lab.now
    lab.tick(120.0)
    assert lab.groups.table.indexes.held["p"] == set(held)
    assert lab.groups.tx.wall_offset + lab.service._clock() == pytest.approx(wall + 120.0)  # the history tells the time
    for _ in range(152):  # silence that was listened to counts
        lab.tick(0.2)
    assert not lab.groups.table.indexes.held.get("p")


def test_a_slow_service_still_ends_leases_of_the_silent(lab: ServiceLab) -> None:
    """Every look at the clock comes two seconds after the last one: time passes nevertheless."""
    lab.hello("producer", "p")
    lab.lease("p", 1)
    for _ in range(40):
        lab.tick(2.0)
    assert not lab.groups.table.indexes.held.get("p")


# ---------------------------------------------------------------- names that peers invent


def sizes(lab: ServiceLab) -> dict[str, int]:
    """How many entries the tables have that are keyed by what peers say."""
    groups, held_out = lab.groups, lab.service.evaluations
    tables = {
        "workers": groups.workers.known,
        "held": groups.table.indexes.held,
        "scoring": groups.scoring.queue.held,
        "barred": groups.workers.barred,
        "judges": groups.scoring.counts,
        "evaluation held": held_out.table.indexes.held,
        "evaluation scoring": held_out.table.queue.held,
        "rows": held_out._rows_by_producer,
        "polls": lab.service.producers.polls,
        "reward polls": lab.service.rewards.polls,
        "counters": lab.service.context.counters,
        "sources": groups.judges._by_source,
    }
    return {name: len(table) for name, table in tables.items()}


def test_invented_names_fill_no_table(lab: ServiceLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffers.groups.workers.MOST_WORKERS", 8)
    lab.hello("producer", "real")
    held = granted(lab.lease("real", 1).answer)
    lab.groups.workers.barred["real"] = (5, lab.now + 1e9)
    for number in range(40):
        for role in ("producer", "reward"):
            lab.hello(role, f"x{number}")
            lab.beat(role, f"y{number}")
        lab.lease(f"z{number}", 1)
        lab.ask(wire.RewardRequest(f"z{number}", 1, 0.0), request=1)
        lab.ask(wire.Samples(f"s{number}", 10**6 + number, 1, (), {}, (), "", 1), request=1)
        lab.ask(wire.Scores(f"t{number}", ()), request=1)
        lab.tick()
    assert all(size <= 10 for size in sizes(lab).values()), sizes(lab)
    assert lab.groups.table.indexes.held["real"] == set(held)  # who holds something is not forgotten
    assert "real" in lab.groups.workers.barred


def test_names_of_metrics_and_roles_are_those_that_are_known(lab: ServiceLab) -> None:
    lab.hello("reward", "r")
    seen = lab.groups.workers.known["reward", "r"].seen
    lab.now += 0.5
    for role, stats in (("reward", {"invented": 1.0}), ("reward", {"reward/invented": 1.0}), ("king", {})):
        answer = lab.beat(role, "r", stats=stats)
        assert isinstance(answer, wire.Refused) and answer.code == "wire.unexpected", stats
    assert lab.groups.workers.known["reward", "r"].seen == seen  # a refusal changes nothing
    assert ("king", "r") not in lab.groups.workers.known


def test_parts_of_rewards_are_a_limited_number_of_names(lab: ServiceLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffers.groups.failure_budget.MOST_PARTS", 3)
    named = [lab.groups.budget.accept_parts({f"part{number}": 1.0}) for number in range(5)]
    assert named == [True, True, True, False, False]
    assert lab.groups.budget.accept_parts({"part0": 0.0, "part2": 0.0}) and not lab.groups.budget.accept_parts(
        {"part0": 0.0, "x": 0.0}
    )
    assert len(lab.groups.budget.part_names) == 3


def test_requests_that_wait_are_looked_at_when_there_is_something_for_them(
    lab: ServiceLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One producer holds all four groups that may be in flight; seven wait. A change without room asks for no look."""
    names = [f"p{number}" for number in range(8)]
    for name in names:
        lab.hello("producer", name)
    held = lab.lease("p0", 1, groups=4).answer.leases
    assert len(held) == 4
    waiting = [lab.lease(name, 1, wait_s=20.0) for name in names[1:]]
    looks: list[str] = []
    lease = lab.groups.group_leases.lease
    monkeypatch.setattr(
        lab.groups.group_leases, "lease", lambda producer, **more: (looks.append(producer), lease(producer, **more))[1]
    )
    lab.ask(wire.Tune('{"late_timeout_s": 7.0}', "me"), request=1)
    assert lab.groups.settings.late_timeout_s == 7.0 and looks == []
    returned = tuple((one.group, one.token) for one in held[:2])
    lab.ask(wire.LeaseReturn("p0", returned, "stop"), request=2)
    answered = [asked.answer for asked in waiting if asked.answers]
    assert sorted(number for answer in answered for number in granted(answer)) == sorted(
        number for number, _ in returned
    )
    assert looks == ["p1", "p2"]
    lab.tick(1.0)
    for _ in range(25):
        lab.tick(0.9)
    assert all(asked.answer for asked in waiting) and looks == ["p1", "p2"]


def submit(lab: ServiceLab, lease: wire.Lease) -> None:
    """Both samples of a group, without rewards."""
    arrays = {"prompt": np.ones(2, np.int32), "response": np.ones(6, np.int32), "logprobs": -np.ones(6, np.float32)}
    fields, payload = wire.pack_arrays(arrays)
    heads = tuple(wire.SampleHead(index, 3, "stop", ((0, 3),)) for index in range(2))
    message = wire.Samples("p", lease.group, lease.token, heads, {0: "d0"}, fields, "", 2)
    assert lab.ask(message, payload, request=9).answer.accepted == (0, 1)


def test_reward_requests_that_wait_are_looked_at_when_a_sample_waits(
    lab: ServiceLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("r0", "r1", "r2"):
        lab.hello("reward", name)
    waiting = [lab.ask(wire.RewardRequest(name, 1, 20.0), request=1) for name in ("r0", "r1", "r2")]
    looks: list[str] = []
    lease = lab.groups.scoring.lease
    monkeypatch.setattr(
        lab.groups.scoring, "lease", lambda worker, **more: (looks.append(worker), lease(worker, **more))[1]
    )
    lab.hello("producer", "p")
    [given] = lab.lease("p", 1).answer.leases
    assert looks == []
    submit(lab, given)
    assert [len(asked.answer.items) for asked in waiting if asked.answers] == [1, 1]
    assert looks == ["r0", "r1"]


def test_scores_that_are_no_numbers_pause_a_guest_like_failures(
    lab: ServiceLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffers.service.reward_requests.is_guest", lambda _: True)
    lab.hello("producer", "p")
    lab.hello("reward", "r")
    [given] = lab.lease("p", 1).answer.leases
    submit(lab, given)
    first, second = lab.ask(wire.RewardRequest("r", 2, 0.0), request=1).answer.items
    paused = lab.service.context.peers.paused_s

    def score(item: Any, reward: float) -> None:
        lab.ask(wire.Scores("r", (wire.Score(item.group, item.index, item.token, reward),)), request=2)

    score(first, 0.5)
    assert not paused("reward", "r", lab.now)
    score(second, float("nan"))
    assert paused("reward", "r", lab.now) > 0
