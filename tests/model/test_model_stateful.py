"""Stateful property tests of the state machine on larger systems than can be searched: hypothesis picks the schedule.

Producers lag, die, fall silent, come back, answer twice, late and out of order; rewards fail; the learner comes back
from its newest or an older checkpoint; the service is restarted from its rows; the system is tuned while it runs; time
passes. At every claim the theorem, at every step conservation, at the end of every schedule healthy parties complete
the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_mutants import BoundOfTheMoment, OlderTokensIgnored, RequiredIgnored

from asyncrl.errors import AsyncRLError, Fenced
from asyncrl.wire import Lease, LeaseReturn, Piece, Pieces, RewardFailure, SampleHead, Samples, Score, Scores
from buffers.groups.group_table import GroupTable, ledger_counts
from buffers.groups.judgements import JudgeRule
from buffers.groups.machine import GroupMachine, Parts
from buffers.groups.records import COMPETING, Group, Ledger, PartialSample, Record, Settings, State

PRODUCERS = ("p0", "p1", "p2", "p3")
WHO = st.sampled_from(PRODUCERS)
SMALL = st.integers(0, 3)
SEEN: Counter[str] = Counter()


def no_sevens(*, rewards: list[float], **_: Any) -> str:
    """The filter: a reward of 7 is not trained on."""
    return "seven" if 7.0 in rewards else ""


class SmallChunks(GroupTable):
    """Prompts at their end move to the archive early."""

    chunk = 3


class System(RuleBasedStateMachine):
    """A run of 24 groups or so."""

    parts = Parts(table=SmallChunks)

    @initialize(
        eta=st.integers(0, 4),
        depth=st.integers(0, 4),
        batch=st.integers(1, 4),
        size=st.integers(1, 3),
        on_late=st.sampled_from(["wait", "drop"]),
        reissue=st.integers(0, 3),
        reuse=st.sampled_from([1, 1, 2]),
        more=st.sampled_from([0, 0, 1, 2]),
        total=st.integers(5, 24),
    )
    def begin(  # noqa: PLR0917
        self, eta: int, depth: int, batch: int, size: int, on_late: Any, reissue: int, reuse: int, more: int, total: int
    ) -> None:
        self.base = Settings(
            group_size=size,
            batch_groups=batch,
            max_staleness=eta,
            depth=min(depth, eta),
            total_groups=total,
            on_late=on_late,
            late_timeout_s=20.0,
            max_reissue=reissue,
            lease_timeout_s=6.0,
            reward_retries=1,
            max_failed_groups=9999,
            max_poison_rate=1.0,
            max_filtered_rate=1.1,
            max_reuse=reuse,
            over_issue=more,
            judges=(JudgeRule("", 1), JudgeRule("deep", 2)) if total % 2 else (),
        )
        self.book = self.fresh(1)
        self.now, self.numbers, self.rows = 0.0, 0, {}
        self.engines = dict.fromkeys(PRODUCERS, 0)
        self.held: dict[str, list[Lease]] = {name: [] for name in PRODUCERS}
        self.zombies: list[tuple[str, Lease]] = []
        self.sent: list[tuple[Samples, int]] = []
        self.made: dict[tuple[int, int, int], int] = {}  # group, index, token -> version
        self.bounds: dict[int, int] = {}
        self.saves: list[tuple[int, Ledger]] = [(0, Ledger())]
        self.trained: dict[int, list[int]] = {}  # step -> groups, of the model that is alive
        self.epoch = 0
        self.register(0)

    def fresh(self, epoch: int) -> GroupMachine:
        return GroupMachine(self.base, epoch=epoch, filters=(("sevens", no_sevens),), parts=self.parts)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def persist(self) -> None:
        for change in self.book.take().rows:
            if change.value is None:
                self.rows.pop(change.key, None)
            else:
                self.rows[change.key] = change.value

    def register(self, which: int) -> None:
        step, ledger = self.saves[-1 - min(which, len(self.saves) - 1)]
        self.epoch = self.book.register(
            name="l", pid=self.number(), host="h", step=step, ledger=ledger, takeover=True, now=self.now
        )
        self.saves = [save for save in self.saves if save[0] <= step]
        self.trained = {number: groups for number, groups in self.trained.items() if number <= step}

    # ------------------------------------------------------------ producers

    @rule(name=WHO)
    def sync(self, name: str) -> None:
        self.engines[name] = self.book.table.meta.version

    @rule(name=WHO, count=st.integers(1, 5))
    def lease(self, name: str, count: int) -> None:
        self.book.workers.see("producer", name, self.now)
        request, before = self.number(), set(self.book.table.groups)
        version = self.engines[name]
        leases = self.book.lease(name, engine_version=version, max_groups=count, request=request, now=self.now)
        assert leases or self.book.lease_blocked(version, name)
        again = self.book.lease(name, engine_version=version, max_groups=count, request=request, now=self.now)
        assert {lease.token for lease in again} == {lease.token for lease in leases}
        for lease in leases:
            if lease.group not in before:
                self.bounds[lease.group] = self.book.settings.max_staleness
            assert lease.deadline_version <= version + self.bounds[lease.group]
            begun = self.book.table.groups[lease.group].partial
            assert all(lease.deadline_version <= one.oldest + self.bounds[lease.group] for one in begun.values())
            assert begun.keys() <= set(lease.missing)
            SEEN["continued"] += len(begun)
        self.held[name] += leases
        SEEN["lease"] += len(leases)

    @precondition(lambda self: any(self.held.values()))
    @rule(
        data=st.data(),
        count=st.integers(1, 5),
        age=st.sampled_from([0, 0, 0, 1, 2]),
        reward=st.sampled_from([None, 1.0, 1.0, 7.0]),
    )
    def send(self, data: st.DataObject, count: int, age: int, reward: float | None) -> None:
        name = data.draw(st.sampled_from([name for name in PRODUCERS if self.held[name]]))
        lease = data.draw(st.sampled_from(self.held[name]))
        order = data.draw(st.permutations(lease.missing))[:count]
        begun = self.begun(lease).get(order[0])
        if begun is not None:  # it goes on from there: the sample is as old as that
            self.submit(name, lease, (order[0],), begun.oldest, reward)
        else:
            self.submit(name, lease, tuple(order), max(0, self.engines[name] - age), reward)

    def begun(self, lease: Lease) -> dict[int, PartialSample]:
        group = self.book.table.groups.get(lease.group)
        return group.partial if group is not None and group.token == lease.token else {}

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), age=st.sampled_from([0, 0, 1]), gap=st.sampled_from([0, 0, 0, 1]))
    def checkpoint(self, data: st.DataObject, age: int, gap: int) -> None:
        """A piece of a sample: the next one, one that leaves some out, under a lease that may be lost."""
        name = data.draw(st.sampled_from([name for name in PRODUCERS if self.held[name]]))
        lease = data.draw(st.sampled_from(self.held[name]))
        index, version = data.draw(st.sampled_from(lease.missing)), max(0, self.engines[name] - age)
        found = self.begun(lease).get(index)
        known = found.length if found else 0
        piece = Piece(index, known + gap, 1, ((version, 1),))
        record = Record(2, self.number(), 1, 1, 0)
        message = Pieces(name, lease.group, lease.token, (piece,), {}, ())
        group = self.book.table.groups.get(lease.group)
        before = None if group is None else dict(group.partial)
        reply = self.book.pieces(message, invalid=str, keep=lambda _: record, now=self.now)
        if gap or not reply.kept:
            assert group is None or dict(group.partial) == before
        else:
            assert reply.kept == {index: known + 1}
            again = self.book.pieces(message, invalid=str, keep=lambda _: record, now=self.now)
            assert again.kept == reply.kept and not again.refused
            SEEN["piece"] += 1

    @rule(name=WHO, slow=st.integers(0, 2), fresh=st.booleans(), age=st.sampled_from([0, 0, 1]))
    def a_round(self, name: str, slow: int, fresh: bool, age: int) -> None:
        """The rest overtakes the slow ones: this producer finishes all groups but the oldest, a step is trained."""
        if fresh:
            self.sync(name)
        self.lease(name, 5)
        for lease in sorted(self.held[name], key=lambda lease: lease.group)[slow:]:
            self.submit(name, lease, lease.missing, max(0, self.engines[name] - age), 1.0)
        self.claim(0.0)
        if self.book.table.meta.version + 1 in self.book.table.batches:
            self.commit(False)

    def submit(self, name: str, lease: Lease, order: tuple[int, ...], version: int, reward: float | None) -> None:
        heads = tuple(SampleHead(index, 1, "stop", ((version, 1),)) for index in order)
        rewards = {} if reward is None else dict.fromkeys(order, reward)
        message, checksum = (
            Samples(name, lease.group, lease.token, heads, {}, (), "", 1, rewards=rewards),
            self.number(),
        )
        record = Record(1, checksum, 1, 1, checksum)
        reply = self.book.samples(message, checksum=checksum, invalid=str, keep=lambda: record, now=self.now)
        for index in reply.accepted:
            self.made[lease.group, index, lease.token] = version
        self.sent = [*self.sent[-20:], (message, checksum)]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """Twice, late, out of order: it changes nothing, unless the group was begun anew since."""
        message, checksum = data.draw(st.sampled_from(self.sent))
        group = self.book.table.groups.get(message.group)
        known = group is not None and group.token == message.token and bool(group.token)
        taken = self.book.samples(
            message, checksum=checksum, invalid=str, keep=lambda: Record(1, checksum, 1, 1, checksum), now=self.now
        )
        assert known or not taken.accepted
        for index in taken.accepted:  # the first time it found the group in another state
            self.made[message.group, index, message.token] = message.samples[0].runs[0][0]
        SEEN["again"] += len(taken.duplicate)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def answer_under_a_lost_lease(self, data: st.DataObject) -> None:
        name, lease = data.draw(st.sampled_from(self.zombies[-10:]))
        group = self.book.table.groups.get(lease.group)
        if group is None or group.token != lease.token:
            before = len(self.made)
            self.submit(name, lease, lease.missing[:1], max(0, self.engines[name]), 1.0)
            assert len(self.made) == before
            SEEN["zombie"] += 1

    @rule(name=WHO)
    def die(self, name: str) -> None:
        self.zombies += [(name, lease) for lease in self.held[name]]
        self.held[name] = []
        self.book.hello("producer", name, pid=self.number(), host="h", now=self.now)
        SEEN["die"] += 1

    @rule(name=WHO)
    def fall_silent(self, name: str) -> None:
        self.now += 7.0
        for other in PRODUCERS:
            if other != name:
                self.book.heartbeat("producer", other, pid=0, host="h", now=self.now)
        self.book.tick(self.now)
        self.zombies += [(name, lease) for lease in self.held[name]]
        self.held[name] = []

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), reason=st.sampled_from(["stop", "crash"]))
    def give_back(self, data: st.DataObject, reason: str) -> None:
        name = data.draw(st.sampled_from([name for name in PRODUCERS if self.held[name]]))
        lease = data.draw(st.sampled_from(self.held[name]))
        self.held[name].remove(lease)
        self.zombies.append((name, lease))
        self.book.give_back(LeaseReturn(name, ((lease.group, lease.token),), reason), now=self.now)

    # ------------------------------------------------------------ rewards

    @rule(
        name=st.sampled_from(["r0", "r1"]), reward=st.sampled_from([0.0, 1.0, 1.0, 7.0, None]), count=st.integers(1, 6)
    )
    def score(self, name: str, reward: float | None, count: int) -> None:
        self.book.workers.see("reward", name, self.now)
        judge = "deep" if name == "r1" and self.base.judges else ""
        items = self.book.reward_lease(name, max_samples=count, request=self.number(), now=self.now, judge=judge)
        SEEN["judged"] += len(items) * bool(judge)
        scores = tuple(Score(item.group, item.index, item.token, reward or 0.0, {}) for item in items)
        if reward is None:
            failures = tuple(RewardFailure(item.group, item.index, item.token, "raised", "x") for item in items)
            self.book.scores(Scores(name, (), failures, judge=judge), now=self.now)
        else:
            self.book.scores(Scores(name, scores, (), judge=judge), now=self.now)
            assert self.book.scores(Scores(name, scores, (), judge=judge), now=self.now).accepted == 0

    # ------------------------------------------------------------ the learner

    @rule(wait=st.sampled_from([0.0, 0.0, 25.0]))
    def claim(self, wait: float) -> None:
        version = self.book.table.meta.version
        step = version + 1
        recorded = self.book.table.batches.get(step)
        known = None if recorded is None else list(recorded.groups)
        found = self.book.claim(epoch=self.epoch, step=step, version=version, now=self.now)
        if found is None and wait and self.book.batches.late_since is not None:
            self.now += wait
            for name in PRODUCERS:
                self.book.heartbeat("producer", name, pid=0, host="h", now=self.now)
            found = self.book.claim(epoch=self.epoch, step=step, version=version, now=self.now)
        if found is None:
            assert self.book.diagnosis(self.now)
            return
        assert known is None or known == found.batch.groups
        again = self.book.claim(epoch=self.epoch, step=step, version=version, now=self.now)
        assert again is not None and again.batch.groups == found.batch.groups
        for number in found.batch.groups:
            self.judge(self.book.table.groups[number], version)
        SEEN["claim"] += 1

    def judge(self, group: Group, version: int) -> None:
        """The theorem, by what the producers know."""
        oldest = min(self.made[group.id, index, sample.token] for index, sample in group.samples.items())
        assert version - oldest <= self.bounds[group.id], f"group {group.id}: lag {version - oldest}"
        assert len(group.samples) == self.base.group_size and group.bound == self.bounds[group.id]
        SEEN[f"lag {version - oldest}"] += 1

    @precondition(lambda self: self.book.table.meta.version + 1 in self.book.table.batches)
    @rule(save=st.booleans())
    def commit(self, save: bool) -> None:
        step = self.book.table.meta.version + 1
        groups = list(self.book.table.batches[step].groups)
        for _ in range(2):
            self.book.commit(epoch=self.epoch, step=step, version=step, digest="", now=self.now, groups=groups)
        self.trained[step] = groups
        if save:
            self.save()

    @rule()
    def save(self) -> None:
        step = self.book.table.meta.version
        self.saves.append((step, self.book.batches.ledger(epoch=self.epoch, step=step)))
        self.book.batches.checkpointed(epoch=self.epoch, step=step)

    @rule(which=st.sampled_from([0, 0, 0, 1, 2]))
    def learner_returns(self, which: int) -> None:
        old, version = self.epoch, self.book.table.meta.version
        self.register(which)
        for name in PRODUCERS:  # engines follow the version that is published now
            self.engines[name] = min(self.engines[name], self.book.table.meta.version)
        with pytest.raises(Fenced):
            self.book.claim(epoch=old, step=version + 1, version=version, now=self.now)
        SEEN["register"] += 1

    # ------------------------------------------------------------ the service

    @rule()
    def service_returns(self) -> None:
        """Rows at any point give the same book."""
        self.persist()
        before, other = self.book, self.fresh(self.book.service_epoch + 1)
        other.load(self.rows.items())
        assert (
            +other.table.indexes.counts == +before.table.indexes.counts
            and +other.table.indexes.due == +before.table.indexes.due
            and other.live.plan == before.live.plan
        )
        assert (other.table.indexes.ready, other.table.indexes.used) == (
            before.table.indexes.ready,
            before.table.indexes.used,
        )
        assert ledger_counts(other.table) == ledger_counts(before.table) and other.settings == before.settings
        assert {change.key: change.value for change in other.rows()} == {
            change.key: change.value for change in before.rows()
        }
        other.note_start(self.now)
        self.book = other
        SEEN["service"] += 1

    @rule(eta=st.integers(0, 4), less=SMALL, on_late=st.sampled_from(["wait", "drop"]))
    def tune_staleness(self, eta: int, less: int, on_late: str) -> None:
        changes = {"max_staleness": eta, "pipeline_depth": max(0, eta - less), "on_late": on_late}
        self.book.tune(changes, author="t", now=self.now)
        SEEN["tune"] += 1

    @rule(size=st.integers(1, 4))
    def tune_batch(self, size: int) -> None:
        self.book.tune({"batch_groups": size}, author="t", now=self.now)

    @rule(quota=st.sampled_from([0, 1, 3]), undo=st.booleans())
    def tune_quota(self, quota: int, undo: bool) -> None:
        self.book.tune({"max_groups_in_flight": quota}, author="t", now=self.now)
        if undo:
            self.book.undo_tune(0, author="t", now=self.now)

    # ------------------------------------------------------------ always, and at the end

    @invariant()
    def conservation(self) -> None:
        if hasattr(self, "book"):
            self.book.check()
            self.persist()
            uses = Counter(number for groups in self.trained.values() for number in groups)
            for number, count in uses.items():
                group = self.book.table.groups.get(number)
                assert count <= (group.max_uses if group else 2), f"group {number} was trained {count} times"
                assert self.base.max_reuse > 1 or count == 1

    def teardown(self) -> None:
        if hasattr(self, "book"):
            self.complete()

    def complete(self) -> None:
        """Liveness: from wherever the schedule ended, healthy parties complete the run."""
        for _ in range(400):
            book = self.book
            if book.schedule.unclaimed <= 0 and book.table.frontier == book.table.meta.version:
                SEEN["completed"] += 1
                return
            self.now += 1.0
            book.tick(self.now)
            for name in PRODUCERS:
                self.sync(name)
                holds = tuple((lease.group, lease.token) for lease in self.held[name])
                self.book.heartbeat("producer", name, pid=0, host="h", now=self.now, holds=holds)
                self.lease(name, 3)
                for lease in self.held[name]:
                    group = book.table.groups.get(lease.group)
                    if group is not None and group.token == lease.token and group.state == State.LEASED:
                        left = tuple(index for index in lease.missing if index not in group.samples)
                        self.submit(name, lease, left, self.engines[name], None if self.base.judges else 1.0)
                self.held[name] = []
            for name in ("r0", "r1"):
                self.score(name, 1.0, 99)
            self.claim(0.0)
            if book.table.meta.version + 1 in book.table.batches:
                self.commit(True)
        left = [group for group in self.book.table.groups.values() if group.state in COMPETING]
        raise AssertionError(f"no end: {self.book.diagnosis(self.now)} {ledger_counts(self.book.table)} {left}")


def profile(examples: int, steps: int, *, fixed: bool) -> settings:
    """Fixed: the same schedules in every run."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=fixed,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=(Phase.generate, Phase.shrink) if not fixed else (Phase.generate,),
    )


def test_larger_systems_under_any_schedule(figure: Callable[[str], None]) -> None:
    SEEN.clear()
    run_state_machine_as_test(System, settings=profile(300, 50, fixed=True))
    figure(f"{SEEN['completed']} schedules completed; {dict(sorted(SEEN.items()))}")
    assert SEEN["completed"] >= 250
    for what in ("claim", "again", "zombie", "die", "register", "service", "tune", "lag 1", "lag 2", "piece"):
        assert SEEN[what] > 10, what  # the paths were really taken


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_larger_systems_for_longer(figure: Callable[[str], None]) -> None:
    SEEN.clear()
    run_state_machine_as_test(System, settings=profile(3000, 120, fixed=False))
    figure(f"{SEEN['completed']} schedules completed; {dict(sorted(SEEN.items()))}")


@pytest.mark.chaos
@pytest.mark.parametrize(
    "wrong",
    [{"batches": RequiredIgnored}, {"samples": OlderTokensIgnored}, {"group_leases": BoundOfTheMoment}],
    ids=str,
)
def test_the_properties_can_fail(wrong: dict[str, type]) -> None:
    """With a wrong rule the same machine finds a group above its bound."""
    system = type("Wrong", (System,), {"parts": Parts(table=SmallChunks, **wrong)})
    with pytest.raises((AssertionError, AsyncRLError)):
        run_state_machine_as_test(system, settings=profile(900, 30, fixed=True))
