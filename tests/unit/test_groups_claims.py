"""The state machine of the buffer (staleness.md): claims, registration and reconcile, the book itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from groups_run import Run

from asyncrl.errors import AsyncRLError, Fenced, StateLost
from buffers.client.offline_ledger import grown_ledger
from buffers.groups import group_table
from buffers.groups.group_table import ledger_counts
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Ledger, State, ledger_of
from buffers.values.id_set import IdSet

# ---------------------------------------------------------------- claims


@pytest.mark.parametrize("on_late", ["wait", "drop"])
def test_where_waiting_cannot_help_the_prompt_is_issued_again(on_late: str) -> None:
    """Tokens that are older than the lease: two groups are due where one has a place. It is no fault of the prompt, so
    it is generated anew, `max_reissue` times; then it is late."""
    run = Run(on_late=on_late, max_staleness=1, max_reissue=1)
    run.step(1)
    run.step(2)
    late, kept = run.lease(2, 2)
    for number in (kept, late):
        run.send(number, 0, 1, version=1)  # due at 2, both
    assert run.claim(3) == [kept] and run.state(late) == "LEASED"
    group = run.g.table.groups[late]
    assert (group.attempt, group.samples, group.deadline) == (1, {}, None)
    run.commit(3)
    assert run.lease(3, 1) == [late]
    run.send(late, 0, 1, version=1)  # due at 2, and the step starts from 3
    assert run.claim(4) is None and run.g.table.ended[late].reason == "late"


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
    assert run.claim(3) is None and run.state(0) == "DROPPED" and run.g.table.ended[0].reason == "late"
    assert run.lease(2) == [3]  # the place is filled again


def test_a_late_group_of_a_silent_producer_goes_to_another_before_its_lease_ends() -> None:
    run = Run(late_timeout_s=120.0, lease_timeout_s=30.0)
    assert run.lease(0, 3) == [0, 1, 2]
    token = run.g.table.groups[0].token
    run.finish(1, 2)
    for step in (1, 2):
        run.claim(step)
        run.commit(step)
    run.now = 9.0
    assert run.claim(3) is None and run.g.table.groups[0].holder == "p"
    run.now = 10.1
    assert run.claim(3) is None and run.g.table.groups[0].holder == ""
    assert run.lease(2, 1, "other") == [0] and run.g.table.groups[0].attempt == 1
    assert run.send(0, 0, token=token).refused == {0: "token: the lease was lost"}
    run.finish(0)
    assert run.claim(3) == [0]


def test_drop_reissues_the_prompt() -> None:
    run = Run(on_late="drop", max_reissue=1)
    run.lease(0, 3)
    run.finish(1, 2)
    token = run.g.table.groups[0].token
    run.claim(1)
    run.commit(1)
    assert run.lease(1) == [3]
    run.finish(3)
    run.claim(2)
    run.commit(2)
    assert run.claim(3) == [3]  # 0 was due: cancelled, to be made again
    group = run.g.table.groups[0]
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
    assert ledger_counts(run.g.table) == {
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
    run.g.batches.quarantine(epoch=run.epoch, step=1, groups=(1,), reason="packer: too long")
    assert run.g.table.ended[1].reason == "poison:packer"
    run.commit(1)
    assert run.claim(2) == [2, 3] and run.lease(1, 9) == []  # no ninth group that nobody would train


def test_retire_frees_payloads() -> None:
    run = Run()
    run.step(1)
    run.g.take()
    run.g.batches.checkpointed(epoch=run.epoch, step=1)
    taken = run.g.take()
    assert run.state(0) == "RETIRED" and len(taken.freed) == 1
    assert {change.key: change.value is None for change in taken.rows} == {"g0": True, "b1": True, "retired": False}


# ---------------------------------------------------------------- registration and reconcile


def test_resume_replays_recorded_batches_in_order() -> None:
    run = Run(batch_groups=2, max_staleness=2)
    batches = [run.step(step) for step in (1, 2, 3)]
    ledger = run.g.batches.ledger(epoch=run.epoch, step=1)
    run.g.batches.checkpointed(epoch=run.epoch, step=1)
    run.lease(3, 2)
    open_before = set(run.g.table.indexes.held["p"])
    run.reload()
    run.register(1, ledger)
    assert run.g.table.frontier == 3
    for step in (2, 3):
        claimed = run.g.claim(epoch=run.epoch, step=step, version=step - 1, now=0.0)
        assert claimed is not None and claimed.replayed and claimed.batch.groups == batches[step - 1]
        run.commit(step)
    assert set(run.g.table.indexes.held["p"]) == open_before
    run.finish(*open_before)
    assert run.claim(4) == sorted(open_before)


def test_checkpoint_ahead_of_an_empty_store() -> None:
    run = Run(batch_groups=2, max_staleness=1)
    for step in (1, 2):
        run.step(step)
    run.lease(2, 3)
    run.send(4, 0, invalid="length: x")
    ledger = ledger_of(run.g.batches.ledger(epoch=run.epoch, step=2).to_json())
    empty = Run(batch_groups=2, max_staleness=1)
    epoch = empty.register(2, ledger)
    assert epoch > run.epoch  # a zombie of the old one stays fenced
    assert [empty.state(n) for n in range(5)] == ["RETIRED"] * 4 + ["DEAD"]
    assert empty.lease(2, 9) == [5, 6, 7, 8]  # 5 and 6 were issued: made again under their ids
    assert [empty.g.table.groups[n].attempt for n in (5, 6, 7)] == [1, 1, 0]


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
    ledger = run.g.batches.ledger(epoch=run.epoch, step=2)
    run.g = GroupMachine(run.g.settings, epoch=9)
    run.g.load([(key, value) for key, value in rows if value is not None])
    run.register(2, ledger)
    assert [run.state(n) for n in range(4)] == ["RETIRED"] * 4 and not run.g.table.batches
    assert run.g.table.meta.version == 2 and run.lease(2, 1) == [4]


def test_older_checkpoint_than_the_store_retired() -> None:
    run = Run(batch_groups=1, max_staleness=1, total_groups=3)
    run.step(1)
    old = run.g.batches.ledger(epoch=run.epoch, step=1)
    run.step(2)
    run.step(3)
    run.g.batches.checkpointed(epoch=run.epoch, step=2)
    run.register(1, old)  # step 2's batch is gone, step 3's cannot be replayed without it
    assert [run.state(n) for n in range(3)] == ["RETIRED", "DROPPED", "LEASED"]  # 2: by a version that is gone
    assert run.g.table.ended[1].reason == "rolled_back"
    assert run.lease(1) == [2]
    run.finish(2)
    assert run.claim(2) == [2] and run.lease(1) == [3]


def test_samples_of_a_version_that_is_gone_are_not_claimed() -> None:
    run = Run(batch_groups=1, max_staleness=2, total_groups=6)
    run.step(1)
    old = run.g.batches.ledger(epoch=run.epoch, step=1)
    run.step(2)
    held = run.lease(2)  # at work while the learner goes back
    run.g.batches.checkpointed(epoch=run.epoch, step=2)
    run.register(1, old)
    run.finish(*held, version=2)
    assert run.claim(2) is None and run.state(held[0]) == "LEASED"
    assert run.lease(1) == held
    run.finish(*held, version=1)
    assert run.claim(2) == held


def test_abandoned_weights_train_nothing_though_their_number_comes_again() -> None:
    run = Run(batch_groups=1, max_staleness=4, total_groups=9, max_reissue=5)
    run.step(1)
    old = run.g.batches.ledger(epoch=run.epoch, step=1)
    for step in (2, 3):
        run.step(step)
    (held, later) = run.lease(2, count=2, name="q")
    for step in (2, 3):
        run.g.table.add_digest(step, f"old{step}")
    run.g.batches.checkpointed(epoch=run.epoch, step=3)
    run.register(1, old)
    meta = run.g.table.meta
    assert (meta.newest, meta.abandoned, run.g.table.digests) == (1, ("old2", "old3"), {})
    assert run.lease(3) == [], "an engine at work with a version that does not exist"
    assert run.send(held, 0, version=2, digests={2: "old2"}, name="q").refused[0].startswith("not published")
    assert run.lease(2, name="q") == [], "it takes the new weights first"
    while run.g.table.meta.version < 2:
        (fresh,) = run.lease(1) or run.lease(1)
        run.finish(fresh, version=1)
        if run.claim(2):
            run.commit(2, "new2")
    assert run.send(later, 0, version=2, digests={2: "old2"}, name="q").refused[0].startswith("not published")
    run.g.table.add_digest(3, "old3")
    assert meta.abandoned == ("old2",), "the same weights were made again"


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
        run.g.batches.ledger(epoch=run.epoch, step=2)
    with pytest.raises(Fenced):
        run.g.commit(epoch=run.epoch - 1, step=2, version=2, digest="", now=0.0)


def test_commits_that_never_arrived_are_told_to_the_history() -> None:
    run = Run(batch_groups=1, max_staleness=2, total_groups=6)
    run.step(1)
    run.lease(1)
    run.finish(1)
    assert run.claim(2) == [1]
    text = grown_ledger(
        run.g.batches.ledger(epoch=run.epoch, step=1).to_json(), epoch=1, step=2, trained={2: [1]}, dead={}
    )
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
    with pytest.raises(AsyncRLError, match=r"pid 0 on h\) was heard from 10.0 s ago"):
        run.g.register(**base, now=10.0)
    assert run.g.register(**base, now=10.1) == 2
    assert run.g.register(**base, now=10.2) == 2  # sent again
    with pytest.raises(Fenced):
        run.claim(1)
    assert run.g.register(**{**base, "pid": 78, "takeover": True}, now=10.3) == 3
    assert run.g.register(**{**base, "pid": 79}, process_gone=True, now=10.4) == 4
    run.reload()
    with pytest.raises(AsyncRLError, match=r"heard from 0\.0 s ago"):
        run.g.register(**{**base, "pid": 80}, now=run.now)


def test_rows_of_a_drain_rebuild_the_book() -> None:
    """What `take` hands out, applied as a store does, is the whole state."""
    run = Run(batch_groups=2, max_staleness=2)
    rows: dict[str, bytes] = {}

    def apply() -> None:
        for change in run.g.take().rows:
            if change.value is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.value

    for step in (1, 2, 3):
        run.step(step)
        apply()
    run.g.batches.checkpointed(epoch=run.epoch, step=2)
    run.lease(3, 2)
    run.send(max(run.g.table.groups), 0, version=3)
    apply()
    fresh = GroupMachine(run.g.settings)
    fresh.load(rows.items())
    fresh.check()
    assert ledger_counts(fresh.table) == ledger_counts(run.g.table)
    assert msgspec.to_builtins(fresh.table.groups) == msgspec.to_builtins(run.g.table.groups)


def test_the_batch_row_says_that_its_groups_are_claimed_or_trained() -> None:
    """Claim and commit write the batch and the version, not the rows of the groups; a load derives the rest."""
    run = Run(batch_groups=2, max_staleness=2)
    rows: dict[str, bytes] = {}

    def keys() -> set[str]:
        changes = run.g.take().rows
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
    fresh = GroupMachine(run.g.settings)
    fresh.load(reversed(rows.items()))  # whatever the order
    fresh.check()
    assert [(group.state, group.step) for _, group in sorted(fresh.table.groups.items())] == [
        (State.TRAINED, 1),
        (State.TRAINED, 1),
        (State.CLAIMED, 2),
        (State.CLAIMED, 2),
    ]
    assert msgspec.to_builtins(fresh.table.groups) == msgspec.to_builtins(run.g.table.groups)


def test_the_book_is_proved_on_the_first_commit_and_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    proofs: list[int] = []
    monkeypatch.setattr(group_table, "check_table", lambda table: proofs.append(1))
    for now in (10.0, 10.5, 10.99, 11.0, 11.5, 3.0):
        run.g.begin(now)
        run.g.table.verify()
    assert len(proofs) == 3
    run.g.table.meta.cursor += 1  # a prompt that is in no state
    with pytest.raises(AsyncRLError, match="does not add up"):
        run.g.begin(3.5)
        run.g.table.verify()


def test_a_prompt_in_two_states_is_found() -> None:
    run = Run()
    run.step(1)
    run.g.check()
    run.g.table.retired.add(0)
    run.g.table.meta.cursor += 1
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
