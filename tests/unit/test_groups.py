"""The state machine of the buffer, transition by transition (staleness.md)."""

from __future__ import annotations

import doctest
import math
from typing import Any

import msgspec
import pytest

import buffers.admission
import buffers.groups
import buffers.ledger
from asyncrl.errors import AsyncRLError, Fenced, StateLost
from asyncrl.wire import LeaseReturn, RewardFailure, SampleHead, Samples, Score, Scores
from buffers.carry import grown_ledger
from buffers.groups import Groups
from buffers.ledger import IdSet, Ledger, Record, Settings, State, ledger_of


def settings(**changes: Any) -> Settings:
    base: dict[str, Any] = {"group_size": 2, "batch_groups": 1, "max_staleness": 2, "depth": 2, "total_groups": 50}
    base.update(changes)
    if "max_staleness" in changes and "depth" not in changes:
        base["depth"] = changes["max_staleness"]
    return Settings(**base)


class Run:
    """A book with a clock, a learner and producers that ask anew each time."""

    def __init__(self, **changes: Any) -> None:
        self.g = Groups(settings(**changes))
        self.now = 0.0
        self.requests = 0
        self.epoch = self.register(0)

    def register(self, step: int, ledger: Ledger | None = None, **changes: Any) -> int:
        who: dict[str, Any] = {"name": "l", "pid": step, "host": "h", "takeover": True}
        self.epoch = self.g.register(step=step, ledger=ledger or Ledger(), now=self.now, **{**who, **changes})
        return self.epoch

    def lease(self, version: int = 0, count: int = 1, name: str = "p") -> list[int]:
        self.requests += 1
        self.g.saw("producer", name, self.now)
        return [
            lease.group
            for lease in self.g.lease(
                name, engine_version=version, max_groups=count, request=self.requests, now=self.now
            )
        ]

    def finish(self, *numbers: int, version: int | None = None) -> None:
        for number in numbers:
            self.g.finish(number, now=self.now, version=version)

    def send(
        self,
        group: int,
        *indices: int,
        token: int | None = None,
        version: int = 0,
        checksum: int = 1,
        rewards: bool = True,
        digests: dict[int, str] | None = None,
        invalid: str = "",
        name: str = "p",
    ) -> Any:
        heads = tuple(SampleHead(index, 1, "stop", ((version, 1),)) for index in indices)
        token = self.g.groups[group].token if token is None else token
        head = Samples(
            name, group, token, heads, digests or {}, (), "", 1, rewards=dict.fromkeys(indices, 0.5) if rewards else {}
        )
        return self.g.samples(
            head, checksum=checksum, invalid=lambda: invalid, keep=lambda: Record(1, 0, 1, 1, checksum), now=self.now
        )

    def claim(self, step: int) -> list[int] | None:
        claimed = self.g.claim(epoch=self.epoch, step=step, version=step - 1, now=self.now)
        return None if claimed is None else list(claimed.batch.groups)

    def commit(self, step: int, digest: str = "") -> None:
        self.g.commit(epoch=self.epoch, step=step, version=step, digest=digest, now=self.now)

    def step(self, step: int, version: int | None = None) -> list[int]:
        """Lease, finish, claim and commit one batch."""
        at = step - 1 if version is None else version
        while self.g.counts[State.READY] < self.g.batch_size(step):
            got = self.lease(at)
            assert got, self.g.lease_blocked(at)
            self.finish(*got)
        batch = self.claim(step)
        assert batch is not None
        self.commit(step)
        return batch

    def state(self, number: int) -> str:
        group = self.g.groups.get(number)
        if group is not None:
            return State(group.state).name
        return "RETIRED" if number in self.g.retired else State(self.g.ended[number].state).name

    def reload(self) -> None:
        """Through the rows, as a restart of the service."""
        rows = [(change.key, change.value) for change in self.g.rows()]
        fresh = Groups(self.g.settings, epoch=self.g.service_epoch + 1)
        fresh.load([(key, value) for key, value in rows if value is not None])
        fresh.note_start(self.now)
        fresh.check()
        assert fresh.ledger_counts() == self.g.ledger_counts()
        assert fresh.due == self.g.due and fresh.ready_order == self.g.ready_order
        self.g = fresh


@pytest.mark.parametrize("module", [buffers.groups, buffers.admission, buffers.ledger])
def test_examples_of_the_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0


# ---------------------------------------------------------------- admission


def test_counter_example_of_the_naive_cap() -> None:
    """B = 1, eta = 2 (staleness.md, 4): two quick groups must not overtake so far that two are due at once."""
    run = Run()
    assert run.lease(0, 9) == [0, 1, 2]
    run.finish(1, 2)
    assert run.claim(1) == [1]
    run.commit(1)
    assert run.lease(1, 9) == [3]  # due at 3
    run.finish(3)
    assert run.claim(2) == [2]  # the earliest deadline, and r(2) = 1 asks for it
    run.commit(2)
    assert run.claim(3) is None  # 3 is READY, but 0 is due now
    run.finish(0)
    assert run.claim(3) == [0]


def test_synchronous() -> None:
    """eta = 0: a batch is generated by the version that it trains, and nothing while it trains."""
    run = Run(max_staleness=0, batch_groups=2)
    assert run.lease(0, 9) == [0, 1]
    run.finish(0, 1)
    assert run.claim(1) == [0, 1] and run.lease(0, 9) == []
    run.commit(1)
    assert run.lease(0, 9) == [] and "must sync" in run.g.lease_blocked(0)
    assert run.lease(1, 9) == [2, 3]


def test_one_step_off() -> None:
    """eta = 1: the next batch is generated while this one trains."""
    run = Run(max_staleness=1, batch_groups=2)
    assert run.lease(0, 9) == [0, 1, 2, 3]
    run.finish(0, 1, 2, 3)
    assert run.claim(1) == [0, 1] and run.lease(0, 9) == []
    run.commit(1)
    assert run.lease(0, 9) == [] and run.lease(1, 9) == [4, 5]
    assert run.claim(2) == [2, 3]


def test_depth_below_the_bound() -> None:
    """pipeline_depth = 1 with eta = 4: two batches under way, whatever the bound would allow."""
    run = Run(max_staleness=4, depth=1, batch_groups=2)
    assert run.lease(0, 9) == [0, 1, 2, 3] and "pipeline_depth" in run.g.lease_blocked(0)
    run.finish(0, 1)
    assert run.claim(1) == [0, 1] and run.lease(0, 9) == []  # the batch in training counts
    run.commit(1)
    assert run.lease(0) == []  # one version behind: one batch less
    assert run.lease(1, 9) == [4, 5]


def test_engines_without_weights_or_from_the_future_get_nothing() -> None:
    run = Run()
    assert run.lease(-1) == [] and "no weights" in run.g.lease_blocked(-1)
    assert run.lease(2) == [] and "newest published" in run.g.lease_blocked(2)
    assert run.lease(1) == [0]  # published, its commit on the way


def test_the_total_is_not_exceeded_and_drops_are_refilled() -> None:
    run = Run(total_groups=2, max_staleness=5)
    assert run.lease(0, 9) == [0, 1] and "every prompt" in run.g.lease_blocked(0)
    run.send(0, 0, invalid="length: x")
    assert run.state(0) == "DEAD" and run.lease(0, 9) == [2]
    run.finish(1, 2)
    assert [run.claim(1), run.commit(1), run.claim(2), run.commit(2)][::2] == [[1], [2]]
    assert run.lease(2, 9) == [] and run.claim(3) is None
    assert "all 2 groups" in run.g.diagnosis(run.now)


def test_the_last_batch_is_what_is_left() -> None:
    run = Run(total_groups=3, batch_groups=2, max_staleness=4)
    assert run.lease(0, 9) == [0, 1, 2]
    run.finish(0, 1, 2)
    assert run.claim(1) == [0, 1]
    run.commit(1)
    assert run.claim(2) == [2]


def test_a_group_keeps_the_bound_of_its_lease() -> None:
    run = Run(max_staleness=4)
    run.lease(0)
    run.g.settings = settings(max_staleness=1)
    run.lease(0)
    assert [(run.g.groups[n].bound, run.g.groups[n].deadline) for n in (0, 1)] == [(4, 4), (1, 1)]


# ---------------------------------------------------------------- leases


def test_lease_expiry_keeps_what_arrived() -> None:
    run = Run()
    run.lease()
    token = run.g.groups[0].token
    run.send(0, 1)
    run.now = 29.0
    run.g.tick(run.now)
    assert run.g.groups[0].holder == "p"
    run.g.heartbeat("producer", "p", pid=1, host="h", now=run.now)
    run.now = 58.0
    run.g.tick(run.now)
    assert run.g.groups[0].holder == "p"
    run.now = 60.0
    run.g.tick(run.now)
    group = run.g.groups[0]
    assert (group.holder, group.attempt, list(group.samples), group.deadline) == ("", 1, [1], 2)
    assert run.send(0, 0, token=token).refused == {0: "token: the lease was lost"}
    assert run.lease(1, name="q") == [0]
    assert group.deadline == 2  # it holds a sample of version 0
    assert run.g._granted(group).missing == (0,)
    assert run.send(0, 0, version=1, checksum=2, name="q").accepted == (0,) and run.state(0) == "READY"


def test_lost_without_samples_gets_a_new_deadline() -> None:
    run = Run()
    assert run.lease(0, 3) == [0, 1, 2]
    run.finish(1, 2)
    run.claim(1)
    run.commit(1)
    run.g.hello("producer", "p", pid=2, host="h", now=1.0)  # the producer was started again
    assert run.g.groups[0].deadline is None
    assert run.lease(1) == [0] and run.g.groups[0].deadline == 3


def test_max_reissue_then_dead() -> None:
    run = Run(max_reissue=2)
    run.lease()
    for attempt in range(3):
        assert run.g.groups[0].attempt == attempt
        run.g.give_back(LeaseReturn("p", ((0, run.g.groups[0].token),), "broken"), now=0.0)
        if attempt < 2:
            assert run.lease() == [0]
    assert run.state(0) == "DEAD" and run.g.reasons(State.DEAD) == {"max_reissue": 1}


def test_a_stop_is_no_attempt_and_an_impossible_prompt_is_dead_at_once() -> None:
    run = Run()
    run.lease(0, 2)
    run.g.give_back(LeaseReturn("p", ((0, run.g.groups[0].token),), "stop"), now=0.0)
    assert run.g.groups[0].attempt == 0
    run.g.give_back(LeaseReturn("p", ((1, 999),), "stop"), now=0.0)  # an old token: nothing
    assert run.g.groups[1].holder == "p"
    run.g.give_back(LeaseReturn("p", ((1, run.g.groups[1].token),), "too long", True), now=0.0)
    assert run.g.ended[1].reason == "prompt" and run.g.ended[1].detail == "too long"


def test_the_same_request_gets_the_same_leases() -> None:
    run = Run()
    run.g.saw("producer", "p", 0.0)
    first = run.g.lease("p", engine_version=0, max_groups=2, request=7, now=0.0)
    assert run.g.lease("p", engine_version=0, max_groups=2, request=7, now=0.0) == first and run.g.meta.cursor == 2
    run.reload()
    assert run.g.lease("p", engine_version=0, max_groups=2, request=7, now=0.0) == first


def test_tokens_grow_over_restarts() -> None:
    run = Run()
    run.lease()
    old = run.g.groups[0].token
    run.reload()
    run.g.hello("producer", "p", pid=9, host="h", now=0.0)
    run.lease()
    assert run.g.groups[0].token > old


# ---------------------------------------------------------------- samples


def test_duplicates_and_conflicts() -> None:
    run = Run()
    run.lease()
    token = run.g.groups[0].token
    assert run.send(0, 0, checksum=5).accepted == (0,)
    assert run.send(0, 0, checksum=5).duplicate == (0,)
    assert run.send(0, 0, checksum=6).refused == {0: "already there with other content"}
    assert run.send(0, 1, checksum=7).accepted == (1,)
    assert run.send(0, 1, checksum=7, token=token).duplicate == (1,)  # READY by now
    assert run.send(5, 0, token=1).refused == {0: "unknown group"}


def test_old_tokens_tighten_and_new_ones_do_not_relax() -> None:
    run = Run(max_staleness=4, batch_groups=2)
    run.step(1)
    run.step(2)
    run.lease(2, 2)
    first, second = sorted(run.g.held["p"])
    assert run.g.groups[first].deadline == 6
    run.send(first, 0, version=1)
    assert run.g.groups[first].deadline == 5
    run.send(second, 0, version=3)
    assert run.g.groups[second].deadline == 6
    run.g.check()


def test_poison_reasons_and_budget() -> None:
    run = Run(max_staleness=90, total_groups=500, poison_window=8)
    run.g.note_digest(0, "aa")
    run.lease(0, 12)
    assert "poison: length" in run.send(0, 0, invalid="length: 1 of 2").refused[0]
    assert "digest" in run.send(1, 0, digests={0: "bb"}).refused[0]
    run.send(2, 0, digests={0: "aa"})
    assert run.g.reasons(State.DEAD) == {"poison:length": 1, "poison:digest": 1} and run.g.fault is None
    for number in (3, 4, 5):
        run.send(number, 0, invalid="logprobs: not finite")
    assert run.g.fault is not None and run.g.fault[0] == "poison.budget" and "logprobs (3)" in run.g.fault[1]
    with pytest.raises(AsyncRLError, match="logprobs"):
        run.claim(1)


def test_inline_rewards_must_be_finite() -> None:
    run = Run()
    run.lease()
    heads = (SampleHead(0, 1, "stop", ((0, 1),)),)
    head = Samples("p", 0, run.g.groups[0].token, heads, {}, (), "", 1, rewards={0: math.nan})
    run.g.samples(head, checksum=1, invalid=str, keep=lambda: Record(0, 0, 0, 0, 1), now=0.0)
    assert run.g.ended[0].reason == "poison:reward"


# ---------------------------------------------------------------- rewards


def unscored(run: Run) -> None:
    run.lease()
    run.send(0, 0, 1, rewards=False)
    assert run.state(0) == "UNSCORED"


def work(run: Run, name: str = "r", count: int = 9) -> dict[int, int]:
    run.requests += 1
    run.g.saw("reward", name, run.now)
    return {
        item.index: item.token
        for item in run.g.reward_lease(name, max_samples=count, request=run.requests, now=run.now)
    }


def test_scores_make_ready_and_old_tokens_are_refused() -> None:
    run = Run()
    unscored(run)
    first = work(run)
    assert set(first) == {0, 1} and work(run, "s") == {}
    run.now = 40.0
    run.g.tick(run.now)
    second = work(run, "s")
    late = run.g.scores(Scores("r", (Score(0, 0, first[0], 1.0),)), now=run.now)
    assert late.accepted == 0 and "token" in late.refused["0:0"]
    reply = run.g.scores(Scores("s", tuple(Score(0, i, second[i], 1.0) for i in second)), now=run.now)
    assert reply.accepted == 2 and run.state(0) == "READY"
    run.g.check()


def test_samples_are_scored_before_their_group_is_complete() -> None:
    run = Run()
    run.lease()
    run.send(0, 0, rewards=False)
    token = work(run)[0]
    assert run.g.scores(Scores("r", (Score(0, 0, token, 1.0),)), now=0.0).accepted == 1 and run.state(0) == "LEASED"
    run.send(0, 1, checksum=2)
    assert run.state(0) == "READY"


def test_scores_after_a_restart_of_the_service_count() -> None:
    run = Run()
    unscored(run)
    tokens = work(run)
    run.reload()
    assert run.g.scores(Scores("r", (Score(0, 0, tokens[0], 1.0),)), now=0.0).accepted == 1
    assert set(work(run)) == {1}


def test_a_score_of_given_up_content_is_refused() -> None:
    run = Run()
    unscored(run)
    tokens = work(run)
    run.g.lose_payloads([0], now=0.0)
    run.lease()
    run.send(0, 0, 1, rewards=False, checksum=2)
    assert "token" in run.g.scores(Scores("r", (Score(0, 0, tokens[0], 1.0),)), now=0.0).refused["0:0"]


def test_failures_are_tried_elsewhere_then_dead_never_zero() -> None:
    run = Run(reward_retries=1, max_failed_groups=0)
    unscored(run)
    run.g.saw("reward", "s", 0.0)
    tokens = work(run)
    run.g.scores(Scores("r", (), (RewardFailure(0, 0, tokens[0], "raised", "boom"),)), now=0.0)
    assert work(run) == {}  # s lives: it gets it
    token = work(run, "s")[0]
    run.g.scores(Scores("s", (), (RewardFailure(0, 0, token, "raised", "boom in f"),)), now=0.0)
    assert run.g.ended[0].reason == "reward_failed" and "boom in f" in run.g.ended[0].detail
    assert run.g.fault == (
        "reward.budget",
        "1 groups failed in their reward, 0 are allowed; the last: raised: boom in f",
    )
    run.g.check()


def test_a_reward_that_is_not_finite_is_a_failure() -> None:
    run = Run(reward_retries=0)
    unscored(run)
    run.g.scores(Scores("r", (Score(0, 0, work(run)[0], math.inf),)), now=0.0)
    assert run.g.ended[0].reason == "reward_failed" and "not_finite" in run.g.ended[0].detail


# ---------------------------------------------------------------- claims


def test_wait_then_drop_late() -> None:
    run = Run(late_timeout_s=10.0)
    assert run.lease(0, 3) == [0, 1, 2]
    run.finish(1, 2)
    for step in (1, 2):
        run.claim(step)
        run.commit(step)
    assert run.claim(3) is None
    run.now = 9.0
    assert run.claim(3) is None and "late: group 0" in run.g.diagnosis(run.now)
    run.now = 10.0
    assert run.claim(3) is None and run.state(0) == "DROPPED" and run.g.ended[0].reason == "late"
    assert run.lease(2) == [3]  # the place is filled again


def test_drop_reissues_the_prompt() -> None:
    run = Run(on_late="drop", max_reissue=1)
    run.lease(0, 3)
    run.finish(1, 2)
    token = run.g.groups[0].token
    run.claim(1)
    run.commit(1)
    assert run.lease(1) == [3]
    run.finish(3)
    run.claim(2)
    run.commit(2)
    assert run.claim(3) == [3]  # 0 was due: cancelled, to be made again
    group = run.g.groups[0]
    assert (group.state, group.attempt, group.deadline, group.samples) == (State.LEASED, 1, None, {})
    assert run.send(0, 0, token=token).refused == {0: "token: the lease was lost"}
    assert run.lease(2) == [0] and group.deadline == 4


def test_train_may_exceed_the_bound() -> None:
    run = Run(on_late="train", max_staleness=1)
    run.lease(0, 2)
    run.finish(1)
    run.claim(1)
    run.commit(1)
    assert run.lease(1) == [2]
    run.finish(2)
    assert run.claim(2) == [2]  # 0 is due, and not waited for
    run.commit(2)
    run.finish(0)
    assert run.claim(3) == [0]  # lag 2, bound 1


def test_claim_is_idempotent_and_fenced() -> None:
    run = Run(batch_groups=2, max_staleness=1)
    run.lease(0, 4)
    run.finish(3, 1, 0, 2)
    batch = run.claim(1)
    assert batch == [3, 1]  # first come first served among equal deadlines
    assert run.claim(1) == batch
    with pytest.raises(AsyncRLError, match="claim of step 2"):
        run.claim(2)
    with pytest.raises(Fenced):
        run.g.claim(epoch=run.epoch - 1, step=1, version=0, now=0.0)
    run.reload()
    assert run.claim(1) == batch
    run.commit(1)
    run.commit(1)
    with pytest.raises(AsyncRLError, match="not recorded"):
        run.commit(2)
    assert run.g.ledger_counts() == {
        "issued": 4,
        "leased": 0,
        "unscored": 0,
        "ready": 2,
        "claimed": 0,
        "trained": 2,
        "retired": 0,
        "dropped": 0,
        "dead": 0,
    }


def test_quarantine_leaves_the_batch_and_counts_as_taken() -> None:
    run = Run(batch_groups=2, total_groups=4, max_staleness=1)
    run.lease(0, 4)
    run.finish(0, 1, 2, 3)
    run.claim(1)
    run.g.quarantine(epoch=run.epoch, step=1, groups=(1,), reason="packer: too long", now=0.0)
    assert run.g.ended[1].reason == "poison:packer"
    run.commit(1)
    assert run.claim(2) == [2, 3] and run.lease(1, 9) == []  # no ninth group that nobody would train


def test_retire_frees_payloads() -> None:
    run = Run()
    run.step(1)
    run.g.take()
    run.g.checkpointed(epoch=run.epoch, step=1, now=0.0)
    taken = run.g.take()
    assert run.state(0) == "RETIRED" and len(taken.freed) == 1
    assert {change.key: change.value is None for change in taken.changes} == {"g0": True, "b1": True, "retired": False}


# ---------------------------------------------------------------- registration and reconcile


def test_resume_replays_recorded_batches_in_order() -> None:
    run = Run(batch_groups=2, max_staleness=2)
    batches = [run.step(step) for step in (1, 2, 3)]
    ledger = run.g.ledger(epoch=run.epoch, step=1)
    run.g.checkpointed(epoch=run.epoch, step=1, now=0.0)
    run.lease(3, 2)
    open_before = set(run.g.held["p"])
    run.reload()
    run.register(1, ledger)
    assert run.g.replay_to == 3
    for step in (2, 3):
        claimed = run.g.claim(epoch=run.epoch, step=step, version=step - 1, now=0.0)
        assert claimed is not None and claimed.replayed and claimed.batch.groups == batches[step - 1]
        run.commit(step)
    assert set(run.g.held["p"]) == open_before
    run.finish(*open_before)
    assert run.claim(4) == sorted(open_before)


def test_checkpoint_ahead_of_an_empty_store() -> None:
    run = Run(batch_groups=2, max_staleness=1)
    for step in (1, 2):
        run.step(step)
    run.lease(2, 3)
    run.send(4, 0, invalid="length: x")
    ledger = ledger_of(run.g.ledger(epoch=run.epoch, step=2).to_json())
    empty = Run(batch_groups=2, max_staleness=1)
    epoch = empty.register(2, ledger)
    assert epoch > run.epoch  # a zombie of the old one stays fenced
    assert [empty.state(n) for n in range(5)] == ["RETIRED"] * 4 + ["DEAD"]
    assert empty.lease(2, 9) == [5, 6, 7, 8]  # 5 and 6 were issued: made again under their ids
    assert [empty.g.groups[n].attempt for n in (5, 6, 7)] == [1, 1, 0]


def test_ledger_wins_over_a_rolled_back_store() -> None:
    """The store still holds as LEASED and CLAIMED what the checkpoint trained."""
    run = Run(batch_groups=2, max_staleness=1)
    run.lease(0, 4)
    run.finish(0, 1)
    run.claim(1)
    rows = [(change.key, change.value) for change in run.g.rows()]
    run.commit(1)
    run.finish(2, 3)
    run.claim(2)
    run.commit(2)
    ledger = run.g.ledger(epoch=run.epoch, step=2)
    run.g = Groups(run.g.settings, epoch=9)
    run.g.load([(key, value) for key, value in rows if value is not None])
    run.register(2, ledger)
    assert [run.state(n) for n in range(4)] == ["RETIRED"] * 4 and not run.g.batches
    assert run.g.meta.version == 2 and run.lease(2, 1) == [4]


def test_older_checkpoint_than_the_store_retired() -> None:
    run = Run(batch_groups=1, max_staleness=1, total_groups=3)
    run.step(1)
    old = run.g.ledger(epoch=run.epoch, step=1)
    run.step(2)
    run.step(3)
    run.g.checkpointed(epoch=run.epoch, step=2, now=0.0)
    run.register(1, old)  # step 2's batch is gone, step 3's cannot be replayed without it
    assert [run.state(n) for n in range(3)] == ["RETIRED", "DROPPED", "LEASED"]  # 2: by a version that is gone
    assert run.g.ended[1].reason == "rolled_back"
    assert run.lease(1) == [2]
    run.finish(2)
    assert run.claim(2) == [2] and run.lease(1) == [3]


def test_samples_of_a_version_that_is_gone_are_not_claimed() -> None:
    run = Run(batch_groups=1, max_staleness=2, total_groups=6)
    run.step(1)
    old = run.g.ledger(epoch=run.epoch, step=1)
    run.step(2)
    held = run.lease(2)  # at work while the learner goes back
    run.g.checkpointed(epoch=run.epoch, step=2, now=0.0)
    run.register(1, old)
    run.finish(*held, version=2)
    assert run.claim(2) is None and run.state(held[0]) == "LEASED"
    assert run.lease(1) == held
    run.finish(*held, version=1)
    assert run.claim(2) == held


def test_a_store_that_went_back_is_told_from_another_learner() -> None:
    run = Run(batch_groups=1, max_staleness=2, total_groups=6)
    run.step(1)
    with pytest.raises(StateLost):
        run.g.claim(epoch=run.epoch + 1, step=2, version=1, now=0.0)  # registered with a state that is gone
    with pytest.raises(StateLost):
        run.claim(4)  # the learner has done step 3
    with pytest.raises(StateLost):
        run.commit(2)  # it was claimed here once
    with pytest.raises(StateLost):
        run.g.ledger(epoch=run.epoch, step=2)
    with pytest.raises(Fenced):
        run.g.commit(epoch=run.epoch - 1, step=2, version=2, digest="", now=0.0)


def test_commits_that_never_arrived_are_told_to_the_history() -> None:
    run = Run(batch_groups=1, max_staleness=2, total_groups=6)
    run.step(1)
    run.lease(1)
    run.finish(1)
    assert run.claim(2) == [1]
    text = grown_ledger(run.g.ledger(epoch=run.epoch, step=1).to_json(), epoch=1, step=2, trained={2: [1]}, dead={})
    run.g.take()
    run.register(2, ledger_of(text))
    events = [(event["e"], event.get("step")) for event in run.g.take().events if isinstance(event, dict)]
    assert ("commit", 2) in events and events.index(("commit", 2)) < events.index(("register", 2))
    assert [run.state(n) for n in range(2)] == ["RETIRED", "RETIRED"]
    run.register(2, ledger_of(text), pid=9)  # known by now
    assert not [event for event in run.g.take().events if isinstance(event, dict) and event["e"] == "commit"]


def test_second_learner() -> None:
    run = Run()
    base: dict[str, Any] = {"name": "m", "pid": 77, "host": "x", "step": 0, "ledger": Ledger(), "takeover": False}
    with pytest.raises(AsyncRLError, match=r"pid 0 on h\) was heard of 10.0 s ago"):
        run.g.register(**base, now=10.0)
    assert run.g.register(**base, now=10.1) == 2
    assert run.g.register(**base, now=10.2) == 2  # sent again
    with pytest.raises(Fenced):
        run.claim(1)
    assert run.g.register(**{**base, "pid": 78, "takeover": True}, now=10.3) == 3
    assert run.g.register(**{**base, "pid": 79}, process_gone=True, now=10.4) == 4
    run.reload()
    with pytest.raises(AsyncRLError, match=r"heard of 0\.0 s ago"):
        run.g.register(**{**base, "pid": 80}, now=run.now)


def test_rows_of_a_drain_rebuild_the_book() -> None:
    """What `take` hands out, applied as a store does, is the whole state."""
    run = Run(batch_groups=2, max_staleness=2)
    rows: dict[str, bytes] = {}

    def apply() -> None:
        for change in run.g.take().changes:
            if change.value is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.value

    for step in (1, 2, 3):
        run.step(step)
        apply()
    run.g.checkpointed(epoch=run.epoch, step=2, now=0.0)
    run.lease(3, 2)
    run.send(max(run.g.groups), 0, version=3)
    apply()
    fresh = Groups(run.g.settings)
    fresh.load(rows.items())
    fresh.check()
    assert fresh.ledger_counts() == run.g.ledger_counts()
    assert msgspec.to_builtins(fresh.groups) == msgspec.to_builtins(run.g.groups)


def test_the_batch_row_says_that_its_groups_are_claimed_or_trained() -> None:
    """Claim and commit write the batch and the version, not the rows of the groups; a load derives the rest."""
    run = Run(batch_groups=2, max_staleness=2)
    rows: dict[str, bytes] = {}

    def keys() -> set[str]:
        changes = run.g.take().changes
        rows.update({change.key: change.value for change in changes if change.value is not None})
        return {change.key for change in changes}

    run.lease(0, 4)
    run.finish(0, 1, 2, 3)
    keys()
    run.claim(1)
    assert "b1" in keys() <= {"b1", "meta"}
    run.commit(1)
    run.claim(2)
    assert not {key for key in keys() if key[0] == "g"}
    fresh = Groups(run.g.settings)
    fresh.load(reversed(rows.items()))  # whatever the order
    fresh.check()
    assert [(group.state, group.step) for _, group in sorted(fresh.groups.items())] == [
        (State.TRAINED, 1), (State.TRAINED, 1), (State.CLAIMED, 2), (State.CLAIMED, 2)
    ]  # fmt: skip
    assert msgspec.to_builtins(fresh.groups) == msgspec.to_builtins(run.g.groups)


def test_the_book_is_proved_on_the_first_commit_and_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    proofs: list[int] = []
    monkeypatch.setattr(run.g, "check", lambda: proofs.append(1))
    for now in (10.0, 10.5, 10.99, 11.0, 11.5, 3.0):
        run.g.settle(now)
    assert len(proofs) == 3
    run.g.meta.cursor += 1  # a prompt that is in no state
    with pytest.raises(AsyncRLError, match="does not add up"):
        run.g.settle(3.5)


def test_a_prompt_in_two_states_is_found() -> None:
    run = Run()
    run.step(1)
    run.g.check()
    run.g.retired.add(0)
    run.g.meta.cursor += 1
    with pytest.raises(AsyncRLError, match="two states"):
        run.g.check()


def test_id_set_against_a_plain_set() -> None:
    import random

    chooser = random.Random(1)
    ids, plain = IdSet(), set()
    for _ in range(2000):
        number = chooser.randrange(60)
        if chooser.random() < 0.6:
            ids.add(number)
            plain.add(number)
        else:
            ids.discard(number)
            plain.discard(number)
        assert len(ids) == len(plain) and (number in ids) == (number in plain)
    assert set(ids) == plain == set(IdSet(ids.ranges()))
