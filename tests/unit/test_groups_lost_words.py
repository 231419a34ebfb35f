"""Words that are lost, doubled or late, and stores that went back: the cases that the simulator found, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from groups_run import Run

from asyncrl.errors import AsyncRLError, Fenced, StateLost
from asyncrl.wire import SampleHead, Samples, Score, Scores, encode_header
from buffers.groups.machine import GroupMachine, finish_group
from buffers.groups.records import Ledger, Record, Settings, State
from buffers.service.replies import reward_reply

LEARNER: dict[str, Any] = {"name": "l", "pid": 1, "host": "h", "step": 0, "ledger": Ledger(), "takeover": False}


def started(**changes: Any) -> tuple[GroupMachine, int]:
    settings: dict[str, Any] = {
        "group_size": 2,
        "batch_groups": 1,
        "max_staleness": 2,
        "depth": 2,
        "total_groups": 9,
        "lease_timeout_s": 10.0,
    }
    groups = GroupMachine(Settings(**settings | changes))
    return groups, groups.register(**LEARNER, now=0.0)


def leased(groups: GroupMachine, count: int = 1, request: int = 1) -> list[tuple[int, int]]:
    found = groups.lease("p", engine_version=groups.table.meta.version, max_groups=count, request=request, now=0.0)
    return [(lease.group, lease.token) for lease in found]


def beat(groups: GroupMachine, now: float, *holds: tuple[int, int], role: str = "producer") -> None:
    groups.heartbeat(role, "p", pid=0, host="h", now=now, holds=holds)


def test_a_late_copy_of_a_registration_does_not_fence_its_own_learner() -> None:
    groups, _ = started()
    epoch = groups.register(**LEARNER | {"name": "m"}, once=77, now=0.0)
    leased(groups)
    finish_group(groups, 0, now=0.0)
    assert groups.claim(epoch=epoch, step=1, version=0, now=0.0) is not None
    assert groups.register(**LEARNER | {"name": "m"}, once=77, now=1.0) == epoch
    groups.commit(epoch=epoch, step=1, version=1, digest="", now=2.0)
    assert groups.register(**LEARNER | {"name": "m", "step": 1}, once=78, now=3.0) == epoch + 1
    with pytest.raises(Fenced):
        groups.register(**LEARNER | {"name": "m"}, once=77, now=4.0)


def test_a_lease_that_its_living_holder_never_got_is_leased_again() -> None:
    groups, _ = started()
    known, lost = leased(groups, 2)
    for now in (1.0, 6.0, 11.0):
        beat(groups, now, known)
    assert groups.table.groups[lost[0]].holder == "p"  # the grant may still be under way
    beat(groups, 11.5, known)
    assert groups.table.groups[known[0]].holder == "p" and groups.table.groups[lost[0]].holder == ""
    assert groups.table.groups[lost[0]].attempt == 0  # no fault of the prompt
    groups.check()


def test_a_producer_that_does_not_say_what_it_holds_keeps_its_leases() -> None:
    groups, _ = started()
    leased(groups)
    for now in (1.0, 20.0, 40.0):
        groups.heartbeat("producer", "p", pid=0, host="h", now=now)
    assert groups.table.groups[0].holder == "p"


def test_a_sample_that_its_reward_worker_never_got_is_scored_again() -> None:
    groups, _ = started()
    (number, token), *_ = leased(groups)
    heads = tuple(SampleHead(index, 1, "stop", ((0, 1),)) for index in range(2))
    groups.samples(
        Samples("p", number, token, heads, {}, (), "", 1),
        checksum=1,
        invalid=str,
        keep=lambda: Record(0, 0, 0, 0, 1),
        now=0.0,
    )
    work = groups.reward_lease("p", max_samples=2, request=1, now=0.0)
    for now in (1.0, 12.0):
        beat(groups, now, (number, work[0].token), role="reward")
    again = groups.reward_lease("r", max_samples=2, request=1, now=12.0)
    assert [item.index for item in again] == [1]
    assert groups.scores(Scores("r", (Score(number, 1, again[0].token, 1.0),)), now=12.0).accepted == 1


def trained(groups: GroupMachine, epoch: int) -> None:
    leased(groups)
    finish_group(groups, 0, now=0.0)
    groups.claim(epoch=epoch, step=1, version=0, now=0.0)
    groups.commit(epoch=epoch, step=1, version=1, digest="", now=0.0)


def test_a_group_in_the_weights_does_not_die_with_its_payload() -> None:
    groups, epoch = started()
    trained(groups, epoch)
    groups.batches.lose_payloads([0])
    assert groups.table.groups[0].state == State.TRAINED
    assert groups.batches.ledger(epoch=epoch, step=1).trained == ((0, 1),)


def test_word_from_a_learner_that_is_ahead_of_the_store_is_a_lost_state() -> None:
    groups, epoch = started()
    trained(groups, epoch)
    with pytest.raises(StateLost):
        groups.batches.checkpointed(epoch=epoch, step=2)
    with pytest.raises(StateLost):
        groups.batches.goodbye(epoch=epoch, done=True, reason="", step=2)
    assert not groups.table.meta.done
    groups.batches.goodbye(epoch=epoch, done=True, reason="", step=1)
    assert groups.table.meta.done


def test_a_commit_of_other_groups_than_recorded_is_a_lost_state() -> None:
    groups, epoch = started()
    leased(groups)
    finish_group(groups, 0, now=0.0)
    groups.claim(epoch=epoch, step=1, version=0, now=0.0)
    with pytest.raises(StateLost):  # its quarantine of group 0 was lost
        groups.commit(epoch=epoch, step=1, version=1, digest="", now=1.0, groups=())
    assert groups.table.meta.version == 0
    groups.commit(epoch=epoch, step=1, version=1, digest="", now=1.0, groups=(0,))


def test_a_complete_run_is_not_opened_again_by_a_learner_that_waited() -> None:
    groups, epoch = started()
    trained(groups, epoch)
    groups.batches.goodbye(epoch=epoch, done=True, reason="", step=1)
    with pytest.raises(AsyncRLError, match="complete"):
        groups.register(**LEARNER | {"name": "m", "pid": 2}, now=2.0)
    assert groups.register(**LEARNER | {"name": "m", "pid": 2, "takeover": True}, now=2.0) == epoch + 1


def test_a_batch_of_another_past_is_not_handed_out_with_what_is_left_of_it() -> None:
    groups, epoch = started(batch_groups=2, total_groups=18)
    leased(groups, 4)
    for number in range(4):
        finish_group(groups, number, now=0.0)
    groups.claim(epoch=epoch, step=1, version=0, now=0.0)  # 0 and 1
    groups.commit(epoch=epoch, step=1, version=1, digest="", now=0.0)
    groups.claim(epoch=epoch, step=2, version=1, now=0.0)  # 2 and 3
    other = Ledger(step=1, cursor=4, epoch=epoch, trained=((2, 4),))  # the store went back behind a checkpoint
    epoch = groups.register(**LEARNER | {"pid": 2, "step": 1, "ledger": other, "takeover": True}, now=1.0)
    claimed = groups.claim(epoch=epoch, step=2, version=1, now=2.0)
    assert claimed is not None and claimed.batch.groups == [0, 1]
    groups.check()


class Damaged:
    """Segments of which one record cannot be read."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def read(self, record: Record) -> tuple[bytes, bytes]:
        raise AsyncRLError("store.corrupt", "a damaged record")


def test_a_damaged_record_to_score_does_not_end_the_service() -> None:
    groups, _ = started(group_size=1)
    (number, token), *_ = leased(groups)
    head = Samples("p", number, token, (SampleHead(0, 1, "stop", ((0, 1),)),), {}, (), "", 1)
    groups.samples(head, checksum=1, invalid=str, keep=lambda: Record(0, 0, 0, 0, 1), now=0.0)
    items = groups.reward_lease("r", max_samples=1, request=1, now=0.0)
    work, payloads, damaged = reward_reply(items, groups.table.groups, Damaged(encode_header(head)))  # type: ignore[arg-type]
    assert (work, payloads, damaged) == ((), [], [number])
    groups.batches.lose_payloads(damaged)
    assert groups.table.groups[number].attempt == 1 and not groups.table.groups[number].samples


def test_a_restored_store_obeys_no_learner_and_issues_nothing_before_one_has_registered_again() -> None:
    """The store came back as it was at step 1. Its learner is registered there, and knows more than the store."""
    run = Run(max_staleness=4)
    run.step(1)
    run.register(1, run.g.batches.ledger(epoch=run.epoch, step=1))
    ledger = run.g.batches.ledger(epoch=run.epoch, step=1)
    run.reload()
    run.g.recovery.note_state_lost()
    assert leased(run.g) == []
    for ask in (
        lambda: run.g.claim(epoch=run.epoch, step=2, version=1, now=run.now),
        lambda: run.g.commit(epoch=run.epoch, step=2, version=2, digest="d", now=run.now, groups=()),
        lambda: run.g.batches.ledger(epoch=run.epoch, step=1),
        lambda: run.g.batches.checkpointed(epoch=run.epoch, step=1),
        lambda: run.g.batches.goodbye(epoch=run.epoch, done=True, reason=""),
    ):
        with pytest.raises(StateLost, match="no learner has registered since"):
            ask()
    before = run.epoch
    run.register(1, ledger)  # the same process, the same step: a registration of its own, not the old one repeated
    assert run.epoch == before + 1
    assert leased(run.g)


def test_an_emptied_store_issues_nothing_before_a_learner_has_said_what_is_trained() -> None:
    """The store and the service were lost together; an engine starts anew at version 0 before the learner is back."""
    groups = GroupMachine(Settings(group_size=2, batch_groups=1, max_staleness=2, depth=2, total_groups=9))
    groups.recovery.note_state_lost()
    fresh = GroupMachine(groups.settings, epoch=1)  # and the service is killed once more
    fresh.load([(change.key, change.value) for change in groups.rows() if change.value is not None])
    groups = fresh
    assert leased(groups) == [] and groups.table.meta.cursor == 0
    assert "no learner has registered" in groups.lease_blocked(0)
    groups.register(**LEARNER | {"step": 3, "ledger": Ledger(step=3, cursor=4, epoch=1, trained=((0, 3),))}, now=0.0)
    assert {group for group, _ in leased(groups, 9, 2)} == {3, 4, 5}  # depth 2; 0, 1 and 2 are in the weights


def test_a_sample_with_any_token_of_weights_that_are_gone_is_generated_again() -> None:
    """The learner comes back from step 1: version 3 will be made again, of other weights. That the sample began with
    version 1, which is there, does not help the tokens that version 3 added."""
    run = Run(max_staleness=4)
    run.step(1)
    ledger = run.g.batches.ledger(epoch=run.epoch, step=1)
    run.step(2)
    run.step(3)
    run.g.batches.checkpointed(epoch=run.epoch, step=3)
    kept, mixed = run.lease(3, 2)
    for number, runs in ((kept, ((0, 1), (1, 1))), (mixed, ((1, 1), (3, 1)))):
        group = run.g.table.groups[number]
        heads = tuple(SampleHead(index, 2, "stop", runs) for index in range(2))
        head = Samples("p", number, group.token, heads, {}, (), "", 1, rewards={0: 0.0, 1: 1.0})
        run.g.samples(head, checksum=1, invalid=str, keep=lambda: Record(1, 0, 1, 1, 1), now=run.now)
    run.reload()  # the row of the sample says it
    assert (run.state(kept), run.state(mixed)) == ("READY", "READY")
    run.register(1, ledger)
    assert (run.state(kept), run.state(mixed)) == ("READY", "LEASED")
    assert not run.g.table.groups[mixed].samples
