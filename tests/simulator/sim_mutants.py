"""Mutants of the real code: each takes one guard away (a pair takes two that back each other up); the simulator must
catch every one of them: `python tests/simulator/sim_mutants.py`.

`MUTANTS` and `PAIRS` map a name to the patches (object, attribute, new value); `hunt` runs
schedules under one of them until a promise is seen broken, and says after how many and by which check.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from sim_check import Violation
from sim_disk import SimStore
from sim_learner import Learner
from sim_run import schedule

from asyncrl.errors import StateLost
from buffers import main as server
from buffers.groups import schedule as schedules
from buffers.groups import scoring
from buffers.groups.batches import Batches
from buffers.groups.group_table import GroupTable
from buffers.groups.judgements import judgement
from buffers.groups.leases import Leases
from buffers.groups.partial_samples import PartialSamples
from buffers.groups.records import State
from buffers.groups.recovery import Recovery
from buffers.groups.sample_intake import GroupSamples, SampleIntake
from buffers.groups.scoring import Found
from buffers.service.service import BufferService
from buffers.values.archive import Archive

Patch = tuple[Any, str, Any]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _any_token(self: Any, item: Any, head: Any, checksum: int) -> Any:
    return real_sort(self, item, msgspec.structs.replace(head, token=item.token), checksum)


def _everything_is_new(self: Any, item: Any, head: Any, checksum: int) -> Any:
    return [sample.index for sample in head.samples], [], {}


def _answers_first(self: Any) -> None:
    self.segments.flush()
    self.context.send_answers()
    real_flush(self)


def _record_in_memory(self: Any, step: int, chosen: Any) -> Any:
    claimed = real_record(self, step, chosen)
    self.tx._rows.pop(f"b{step}", None)
    return claimed


def _retires_all(self: Any, *, epoch: int, step: int) -> None:
    real_checkpointed(self, epoch=epoch, step=step)
    for number in sorted(self.table.batches):
        for group in self.table.batches.pop(number).groups:
            if group in self.table.groups:
                self.table.retire(self.table.groups[group])
        self.table.put(f"b{number}")


def _ready_and_recorded(self: Any, *args: Any) -> None:
    real_restore(self, *args)
    for batch in self.table.batches.values():
        for number in batch.groups:
            group = self.table.groups[number]
            with self.table.edit(group):
                group.state = State.READY


def _loses_but_counts(self: Any, item: Any, why: str, *, counts: bool = True) -> None:
    kept = len(item.samples)
    real_lose(self, item, why, counts=counts)
    if kept and self.table.get(item.id) is not None and isinstance(self.table, GroupTable):
        with self.table.edit(item):
            self.table.drop_samples(item)
            self.table.__dict__.setdefault("ghosts", {})[item.id] = kept


def _counts_ghosts(self: Any, group: Any, *rest: Any) -> None:
    real_store(self, group, *rest)
    ghosts = self.table.__dict__.get("ghosts", {}).get(group.id, 0)
    if ghosts and group.state == State.LEASED and len(group.samples) + ghosts >= self.size:
        with self.table.edit(group):
            self.complete(group)


def _keeps_deadline(self: Any, group: Any, *rest: Any) -> None:
    before = group.deadline
    real_store(self, group, *rest)
    with self.table.edit(group):
        group.deadline = before


def _not_written_again(self: Any, rows: Any) -> None:
    self._sequence = self._medium.sequence
    self._medium.epoch = self._epoch
    if not self._medium.log:
        self._medium.write(self._epoch, self._sequence, [])


def _reward_check(*, lease: bool, sample: bool) -> Callable[..., Any]:
    """`find_sample` with or without its two checks of the token."""

    def check(self: Any, answer: Any, judge: str) -> Any:
        item = self.target.get(answer.group)
        found = item.samples.get(answer.index) if item else None
        if item is None or found is None:
            return self.target.gone_reason(answer.group) if item is None else "unknown sample"
        if found.reward is not None or judgement(found, judge).reward is not None:
            return "already scored"
        held = self.queue.leases.get((answer.group, answer.index, judge))
        if (lease and held is not None and held.token != answer.token) or (sample and answer.token <= found.token):
            return "token: the reward lease was lost"
        return Found(item, found, False)

    return check


def _first_answer_decides(sample: Any, judges: Any, judge: str, answer: Any) -> bool:
    sample.reward, sample.parts = answer.reward, answer.parts
    return True


def _cursor_only(self: Any, cursor: int) -> None:
    meta, retired = self.table.meta, self.table.retired
    meta.cursor = max(meta.cursor, cursor, *(end for _, end in retired.ranges()[-1:]))


def _register_again(self: Any, **named: Any) -> int:
    named["once"] = 0
    return int(real_register(self, **named))


def _trained_die(self: Any, numbers: Any) -> None:
    for number in numbers:
        group = self.table.groups[number]
        if group.state == State.TRAINED:
            for step in [step for step in group.uses if step in self.table.batches]:
                if group.id in self.table.batches[step].groups:
                    self.table.batches[step].groups.remove(group.id)
                    self.table.put(f"b{step}")
            self.table.end(group, State.DEAD, "payload_lost")
        else:
            real_lose_payloads(self, [number])


def _any_goodbye(self: Any, **named: Any) -> None:
    named["step"] = 0
    real_goodbye(self, **named)


def _fences_epochs_only(self: Any, epoch: int) -> None:
    """A learner that registered before the store lost state goes on as if nothing had happened."""
    meta = self.table.meta
    meta.emptied, lost = False, meta.emptied
    try:
        real_fence(self, epoch)
    finally:
        meta.emptied = lost


def _rolled_back_ready(self: Any, number: int) -> None:
    """A group that an older checkpoint does not hold is forgotten instead of dropped: the ledger lacks it."""
    self.table.retired.discard(number)
    self.table.put("retired")
    self.table.meta.cursor = max(self.table.meta.cursor, number + 1)


def _no_chunks(self: Any, ids: Any) -> list[int]:
    return []


def _any_order(self: Any, step: int, size: int) -> bool:
    return True


def _fits_always(*_: Any, **__: Any) -> bool:
    return True


def _replay_recorded_anew(self: Any, batch: Any) -> Any:
    if self.table.meta.version < batch.step:
        batch.groups.reverse()
    return real_hand_out(self, batch)


def _every_piece_is_next(self: Any, group: Any, head: Any, item: Any, keep: Any) -> Any:
    found = group.partial.get(item.index)
    start = item.start if found is None else found.length
    return real_take_piece(self, group, head, msgspec.structs.replace(item, start=start), keep)


def _commit_anything(self: Any, **named: Any) -> None:
    with contextlib.suppress(StateLost):
        real_commit(self, **named)


def _renews_all(self: Any, producer: str, pid: int, holds: Any) -> None:
    real_renew(self, producer, pid, None)


real_sort = SampleIntake.sort
real_take_piece = PartialSamples._take_piece
real_commit = Batches.commit
real_fence = Batches.fence
real_flush = BufferService.flush
real_record = Batches.record
real_checkpointed = Batches.checkpointed
real_goodbye = Batches.goodbye
real_hand_out = Batches._hand_out
real_restore = Recovery.restore_batches
real_register = Recovery.register
real_lose = Leases.lose
real_renew = Leases.renew
real_store = GroupSamples.store
real_lose_payloads = Batches.lose_payloads

NO_FENCE: Patch = (Batches, "fence", _nothing)
EPOCHS_ONLY: Patch = (Batches, "fence", _fences_epochs_only)
NAIVE_CLAIM: Patch = (Batches, "settle_late", _any_order)

MUTANTS: dict[str, list[Patch]] = {
    "samples under an old token are taken": [(SampleIntake, "sort", _any_token)],
    "duplicates are taken as new": [(SampleIntake, "sort", _everything_is_new)],
    "an older learner epoch is obeyed": [NO_FENCE],
    "the store does not fence an older service": [(SimStore, "_check", _nothing)],
    "answers leave before they are persisted": [(BufferService, "flush", _answers_first)],
    "the first judge to answer decides": [(scoring, "take_answer", _first_answer_decides)],
    "a batch is handed out and not recorded": [(Batches, "record", _record_in_memory)],
    "a recorded batch comes back in another order": [(Batches, "_hand_out", _replay_recorded_anew)],
    "registration does not adopt what the ledger archived": [(Recovery, "_adopt_archive", _nothing)],
    "archived prompts outlive the return to an older checkpoint": [(Archive, "outside", _no_chunks)],
    "registration does not adopt the ledger": [(Recovery, "_adopt_trained", _nothing)],
    "a checkpoint retires steps it does not hold": [(Batches, "checkpointed", _retires_all)],
    "recorded groups are ready once more": [(Recovery, "restore_batches", _ready_and_recorded)],
    "what was rolled back is forgotten": [
        (Recovery, "_roll_back", _rolled_back_ready),
        (Recovery, "_issue_unknown", _cursor_only),
    ],
    "the naive late rule: take what is ready": [NAIVE_CLAIM],
    "older tokens do not lower the deadline": [(GroupSamples, "store", _keeps_deadline)],
    "a lost lease drops its samples and counts them": [
        (Leases, "lose", _loses_but_counts),
        (GroupSamples, "store", _counts_ghosts),
    ],
    "a second learner is taken in": [(Recovery, "_refuse_second", _nothing)],
    "an emptied store is a new run": [(Recovery, "note_state_lost", _nothing)],
    "a lost store is not written again": [(SimStore, "reseed", _not_written_again)],
    "prompts that the store lost are not issued again": [(Recovery, "_issue_unknown", _cursor_only)],
    "silent producers keep their leases": [(Leases, "expire", _nothing)],
    "leases that their holder does not name are kept": [(Leases, "renew", _renews_all)],
    "a late copy of a registration registers": [(Recovery, "register", _register_again)],
    "a learner need not register again after a loss": [EPOCHS_ONLY],
    "any commit is taken": [(Batches, "commit", _commit_anything)],
    "every piece of a sample is taken as the next one": [(PartialSamples, "_take_piece", _every_piece_is_next)],
}


class _NoneIsClaimed:
    """The states as the opening service sees them when it forgets that a learner may hold a batch."""

    CLAIMED = 99


PAIRS: dict[str, list[Patch]] = {
    "claimed and trained groups die with their payload": [
        (server, "State", _NoneIsClaimed),
        (Batches, "lose_payloads", _trained_die),
    ],
    "no admission rule, naive late rule": [(schedules, "feasible", _fits_always), NAIVE_CLAIM],
    "neither the buffer nor the mark fences a learner": [NO_FENCE, (Learner, "check_mark", _nothing)],
    "a goodbye from ahead is taken after a loss": [EPOCHS_ONLY, (Batches, "goodbye", _any_goodbye)],
    "neither epoch is checked": [NO_FENCE, (SimStore, "_check", _nothing)],
    "scores: neither the lease's nor the sample's token": [
        (scoring.Scoring, "find_sample", _reward_check(lease=False, sample=False)),
    ],
    "old tokens and duplicates": [(SampleIntake, "sort", _everything_is_new), (GroupTable, "verify", _nothing)],
    "no ledger, nothing rolled back": [(Recovery, "_adopt_trained", _nothing), (Recovery, "_roll_back", _nothing)],
}


@contextmanager
def mutated(patches: list[Patch]) -> Iterator[None]:
    """The real code with these parts replaced."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        getattr(owner, name)  # a guard that is gone is no mutant
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, was in before:
            if was is None:
                delattr(owner, name)
            else:
                setattr(owner, name, was)


def _broken(seed: int) -> str:
    """What is wrong with this schedule; empty where nothing is."""
    try:
        schedule(seed).run()
    except Violation as violation:
        return str(violation)
    except Exception as error:  # the service itself broke: that is seen, too
        return f"crash: {type(error).__name__}: {error}"
    return ""


def hunt(name: str, *, limit: int = 2000, first: int = 500_000) -> tuple[str, int, str]:
    """(name, schedules until it was caught or 0, by what). The schedule that catches it is clean without it."""
    with contextlib.redirect_stdout(io.StringIO()):
        for count in range(1, limit + 1):
            with mutated((MUTANTS | PAIRS)[name]):
                found = _broken(first + count)
            if found and not _broken(first + count):
                return name, count, found
    return name, 0, "survived"


def hunt_all(*, processes: int = 2, limit: int = 2000) -> list[tuple[str, int, str]]:
    """Every mutant."""
    # Not fork: what this process has (threads, sockets of other tests) hangs a child that collects it.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(_hunt, [(name, limit) for name in MUTANTS | PAIRS], chunksize=1)


def _hunt(job: tuple[str, int]) -> tuple[str, int, str]:
    return hunt(job[0], limit=job[1])


def told(found: list[tuple[str, int, str]]) -> str:
    """One line for each."""
    return "\n".join(
        f"{'SURVIVED' if not count else f'caught after {count:4d}'}  {name}: {why[:110]}" for name, count, why in found
    )


if __name__ == "__main__":
    results = hunt_all()
    print(told(results))
    sys.exit(any(not count for _, count, _ in results))
