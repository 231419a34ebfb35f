"""Re-use of groups (max_reuse > 1) and replay with priorities: bounds, restarts, checkpoints; fresh ones go first."""

from __future__ import annotations

import doctest
from collections import Counter
from typing import Any

import pytest
from groups_run import Run

import buffers.groups.schedule
from asyncrl.wire import SampleHead, Samples
from buffers.client.offline_ledger import grown_ledger
from buffers.groups.group_table import ledger_counts, reasons
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Record, State, ledger_of
from buffers.groups.schedule import draw_weighted


def reuse(**changes: Any) -> Run:
    base: dict[str, Any] = {"max_reuse": 2, "max_staleness": 3, "batch_groups": 2, "total_groups": 40}
    return Run(**{**base, **changes})


def train(run: Run, step: int) -> list[int]:
    batch = run.claim(step)
    assert batch is not None, run.g.diagnosis(run.now)
    run.commit(step)
    return batch


def events(run: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in run.g.take().events if isinstance(event, dict) and event["e"] == name]


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(buffers.groups.schedule).failed == 0


def test_used_groups_fill_what_fresh_ones_leave_and_never_more_often_than_allowed() -> None:
    run = reuse()
    run.finish(*run.lease(0, 2))
    assert [event.get("uses") for event in events(run, "issue")] == [2, 2]
    assert train(run, 1) == [0, 1]
    run.finish(*run.lease(1))
    assert train(run, 2) == [2, 0]  # the fresh one first, then the used one with the earliest deadline
    assert train(run, 3) == [1, 2]
    assert run.claim(4) is None and "waits" in run.g.diagnosis(run.now)  # everything was used twice
    run.finish(*run.lease(3, 2))
    assert train(run, 4) == [3, 4]
    assert ledger_counts(run.g.table)["trained"] == 5
    run.g.check()


def test_a_group_that_is_due_is_not_used_again() -> None:
    run = reuse(max_staleness=1)
    run.finish(*run.lease(0, 2))
    assert train(run, 1) == [0, 1]
    run.finish(*run.lease(1, 2))
    assert train(run, 2) == [2, 3]  # fresh first, though 0 and 1 are due now
    assert [number for _, _, number in run.g.schedule.usable(2)] == [2, 3]
    assert train(run, 3) == [2, 3]  # 0 and 1 were due at version 1
    assert run.claim(4) is None


def test_used_groups_never_take_the_place_of_one_that_is_due() -> None:
    """Fresh group 2 is due at 1 and not ready: the used ones would do, but r(1) = 1 asks for it."""
    run = reuse(max_staleness=1, max_reuse=4, batch_groups=2)
    run.finish(*run.lease(0, 2))
    assert run.lease(0) == [2]
    assert train(run, 1) == [0, 1]
    assert run.g.table.indexes.due == {1: 1} and len(run.g.schedule.usable(1)) == 2
    assert run.claim(2) is None and "late: group 2" in run.g.diagnosis(run.now)
    run.finish(2)
    assert train(run, 2) == [2, 0]


def test_used_groups_do_not_compete() -> None:
    run = reuse(max_reuse=3)
    run.finish(*run.lease(0, 2))
    train(run, 1)
    assert run.g.table.indexes.due == {} and run.g.table.outstanding == 0 and len(run.lease(1, 99)) == 8
    run.g.check()


def test_fresh_first_off_puts_both_in_one_order_but_holds_what_is_required() -> None:
    run = reuse(fresh_first=False, max_staleness=2)
    run.finish(*run.lease(0, 2))
    train(run, 1)
    run.finish(*run.lease(1, 2))
    assert train(run, 2) == [0, 1]  # due at 2, before the fresh ones
    assert train(run, 3) == [2, 3]


def test_reuse_is_fixed_when_a_group_is_issued() -> None:
    run = reuse(max_reuse=1)
    run.finish(*run.lease(0, 2))
    run.g.tune({"max_reuse": 3}, author="me", now=0.0)
    train(run, 1)
    assert run.claim(2) is None
    run.finish(*run.lease(1, 2))
    assert [train(run, step) for step in (2, 3, 4)] == [[2, 3]] * 3
    assert run.claim(5) is None


def test_the_run_keeps_its_length_in_steps_and_what_is_left_over_is_dropped() -> None:
    run = reuse(max_staleness=1, total_groups=8)
    for step in range(1, 5):
        if step % 2:
            run.finish(*run.lease(step - 1, 2))
        train(run, step)
    assert run.g.schedule.unclaimed == 0 and run.claim(5) is None and run.lease(4) == []
    assert run.g.table.meta.cursor == 4
    left = reuse(max_staleness=3, total_groups=4)
    left.finish(*left.lease(0, 2))
    train(left, 1)
    assert left.lease(1, 9) == [2, 3]
    train(left, 2)  # with used ones
    left.g.batches.checkpointed(epoch=left.epoch, step=2)
    left.g.batches.goodbye(epoch=left.epoch, done=True, reason="")
    counts = ledger_counts(left.g.table)
    assert (counts["retired"], counts["dropped"], counts["leased"]) == (2, 2, 0)
    assert reasons(left.g.table, State.DROPPED) == {"surplus": 2}


# ---------------------------------------------------------------- checkpoints and restarts


def test_payloads_stay_until_the_checkpoint_of_the_last_use() -> None:
    run = reuse()
    run.finish(*run.lease(0, 2))
    train(run, 1)
    run.g.take()
    run.g.batches.checkpointed(epoch=run.epoch, step=1)
    assert run.g.take().freed == [] and ledger_counts(run.g.table)["trained"] == 2  # one more step may train them
    run.reload()
    assert [run.g.table.groups[number].uses for number in (0, 1)] == [[1], [1]]
    run.register(1, run.g.batches.ledger(epoch=run.epoch, step=1))
    assert train(run, 2) == [0, 1]
    run.g.batches.checkpointed(epoch=run.epoch, step=2)
    assert len(run.g.take().freed) == 2 and ledger_counts(run.g.table)["retired"] == 2
    run.g.check()


def test_a_group_that_lapsed_is_retired_by_the_next_checkpoint() -> None:
    run = reuse(max_staleness=1)
    run.finish(*run.lease(0, 2))
    train(run, 1)
    run.g.batches.checkpointed(epoch=run.epoch, step=1)
    assert ledger_counts(run.g.table)["retired"] == 0
    for step in (2, 3):
        run.finish(*run.lease(step - 1, 2))
        train(run, step)
    run.g.batches.checkpointed(epoch=run.epoch, step=3)
    assert run.state(0) == run.state(1) == "RETIRED" and run.state(4) == "TRAINED"


def used_run() -> tuple[Run, dict[int, Any], list[list[int]]]:
    """Steps 1 to 5 of a run with re-use, and the ledger after each."""
    run = reuse(max_reuse=3, max_staleness=4)
    ledgers: dict[int, Any] = {}
    batches = []
    for step in range(1, 6):
        if step in (1, 4):
            run.finish(*run.lease(step - 1, 3 if step == 1 else 2))
        batches.append(train(run, step))
        ledgers[step] = ledger_of(run.g.batches.ledger(epoch=run.epoch, step=step).to_json())
    return run, ledgers, batches


@pytest.mark.parametrize("through_rows", [False, True])
def test_a_restart_from_an_older_checkpoint_replays_the_recorded_batches(through_rows: bool) -> None:
    for back in range(1, 6):
        run, ledgers, batches = used_run()
        if through_rows:
            run.reload()
        run.register(back, ledgers[back])
        run.g.check()
        for step in range(back + 1, 6):
            again = run.g.claim(epoch=run.epoch, step=step, version=step - 1, now=0.0)
            assert again is not None and again.replayed and again.batch.groups == batches[step - 1]
            run.commit(step)
            run.g.check()
        uses = Counter(number for batch in batches for number in batch)
        assert {number: len(group.uses) for number, group in run.g.table.groups.items() if group.uses} == uses


def test_uses_after_the_checkpoint_are_given_back_where_their_batches_are_gone() -> None:
    run, ledgers, batches = used_run()
    run.g.batches.checkpointed(epoch=run.epoch, step=5)
    run.register(2, ledgers[2])  # the newer checkpoints were damaged; batches 3 to 5 are gone
    run.g.check()
    for number, group in run.g.table.groups.items():
        kept = [step for step in (1, 2) if number in batches[step - 1]]
        assert group.uses == kept  # what came from weights that are gone is generated again
        assert State(group.state) == (State.TRAINED if kept else State.LEASED)
    seen = Counter(number for batch in batches[:2] for number in batch)
    run.finish(*run.lease(2, 9))
    for step in range(3, 6):
        seen += Counter(train(run, step))
    assert max(seen.values()) <= 3


def test_a_store_that_is_gone_leaves_the_uses_to_the_ledger() -> None:
    run, ledgers, _ = used_run()
    fresh = GroupMachine(run.g.live.base, epoch=9)
    run.g = fresh
    run.register(3, ledgers[3])
    assert {run.state(number) for number in range(run.g.table.meta.cursor) if number not in run.g.table.groups} == {
        "RETIRED"
    }
    run.g.check()


def test_a_ledger_that_grew_without_the_buffer_knows_the_uses() -> None:
    run = reuse(max_reuse=3)
    run.finish(*run.lease(0, 2))
    train(run, 1)
    text = run.g.batches.ledger(epoch=run.epoch, step=1).to_json()
    assert train(run, 2) == [0, 1]
    grown = ledger_of(grown_ledger(text, epoch=run.epoch, step=2, trained={2: [0, 1]}, dead={}))
    assert grown.uses == {0: (1, 2), 1: (1, 2)}
    run.reload()
    run.register(2, grown)
    assert train(run, 3) == [0, 1] and run.claim(4) is None


def test_quarantine_of_a_used_group_ends_its_uses_but_not_what_was_trained() -> None:
    run = reuse(max_reuse=3)
    run.finish(*run.lease(0, 2))
    train(run, 1)
    assert run.claim(2) == [0, 1]
    run.g.take()
    run.g.batches.quarantine(epoch=run.epoch, step=2, groups=(1,), reason="loss: inf")
    assert [(event["g"], event["reason"]) for event in events(run, "drop")] == [(1, "poison:loss")]
    assert run.state(1) == "TRAINED" and run.g.table.groups[1].uses == [1] and run.g.table.batches[2].groups == [0]
    run.commit(2)
    assert [number for _, _, number in run.g.schedule.usable(2)] == [0]
    run.g.batches.lose_payloads([0])
    run.reload()
    assert run.state(1) == "TRAINED" and [number for _, _, number in run.g.schedule.usable(2)] == [0]


def test_a_damaged_payload_of_a_claimed_used_group() -> None:
    run = reuse(max_reuse=2)
    run.finish(*run.lease(0, 2))
    train(run, 1)
    assert run.claim(2) == [0, 1]
    run.g.batches.lose_payloads([0])
    assert run.state(0) == "TRAINED" and run.claim(2) == [1]
    run.commit(2)
    run.g.check()


# ---------------------------------------------------------------- priorities


def scored(run: Run, number: int, *rewards: float) -> None:
    """All samples of a leased group, with these rewards."""
    group = run.g.table.groups[number]
    heads = tuple(SampleHead(index, 1, "stop", ((0, 1),)) for index in range(len(rewards)))
    head = Samples("p", number, group.token, heads, {}, (), "", 1, rewards=dict(enumerate(rewards)))
    run.g.samples(head, checksum=number, invalid=str, keep=lambda: Record(1, number, 1, 1, number), now=0.0)


def test_priority_draws_by_the_spread_of_the_rewards() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(200):
        run = reuse(max_reuse=2, max_staleness=4, batch_groups=4, replay_order="priority", seed=seed)
        assert len(run.lease(0, 4)) == 4
        for number, high in enumerate((0.0, 0.1, 0.3, 0.6)):
            scored(run, number, 0.0, high)
        train(run, 1)
        run.finish(*run.lease(1, 3))
        [used] = [number for number in train(run, 2) if number < 4]
        drawn[used] += 1
    assert drawn[0] <= 1 and drawn[1] < drawn[2] < drawn[3] and drawn[1] > 5


def test_a_draw_is_the_same_for_the_same_seed_and_without_replacement() -> None:
    entries = [(1, number, number) for number in range(20)]
    one = draw_weighted(entries, lambda number: 1.0 + number, 8, "seed/3")
    assert one == draw_weighted(entries, lambda number: 1.0 + number, 8, "seed/3") and len(set(one)) == 8
    assert one != draw_weighted(entries, lambda number: 1.0 + number, 8, "seed/4")


def test_priority_over_everything_keeps_the_bound() -> None:
    """fresh_first off: the draw may leave fresh groups, but never one that is due."""
    for seed in range(40):
        run = reuse(
            max_reuse=5,
            max_staleness=1,
            replay_order="priority",
            fresh_first=False,
            seed=seed,
            priority_exponent=2.0,
            total_groups=60,
        )
        for step in range(1, 12):
            for number in run.lease(step - 1, 4):
                run.finish(number)
            for number in train(run, step):
                assert (run.g.table.groups[number].deadline or 0) >= step - 1
        run.g.check()
