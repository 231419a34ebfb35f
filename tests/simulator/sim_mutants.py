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
from buffers.groups import leasing, scoring
from buffers.groups.judgements import said_by
from buffers.groups.machine import Groups
from buffers.groups.records import State
from buffers.groups.scoring import Found
from buffers.service import service

Patch = tuple[Any, str, Any]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _any_token(self: Any, group: Any, head: Any, checksum: int) -> Any:
    return real_sort(self, group, msgspec.structs.replace(head, token=group.token), checksum)


def _everything_is_new(self: Any, group: Any, head: Any, checksum: int) -> Any:
    return [item.index for item in head.samples], [], {}


def _answers_first(self: Any) -> None:
    self.segments.flush()
    replies, self._replies = self._replies, []
    for call, message, payloads in replies:
        call.reply(message, payloads)
    real_flush(self)


def _record_in_memory(self: Any, step: int, chosen: Any, now: float) -> Any:
    claimed = real_record(self, step, chosen, now)
    self._dirty.pop(f"b{step}", None)
    return claimed


def _retires_all(self: Any, *, epoch: int, step: int, now: float) -> None:
    real_checkpointed(self, epoch=epoch, step=step, now=now)
    for number in sorted(self.batches):
        for group in self.batches.pop(number).groups:
            if group in self.groups:
                self._retire(self.groups[group])
        self._touch(f"b{number}")


def _ready_and_recorded(self: Any, *args: Any) -> None:
    real_restore(self, *args)
    for batch in self.batches.values():
        for number in batch.groups:
            group = self.groups[number]
            self._out(group)
            group.state = State.READY
            self._in(group)


def _loses_but_counts(self: Any, group: Any, why: str, now: float, *, counts: bool = True) -> None:
    kept = len(group.samples)
    real_lose(self, group, why, now, counts=counts)
    if kept and group.id in self.groups:
        self._out(group)
        self._forget_samples(group)
        self.__dict__.setdefault("ghosts", {})[group.id] = kept
        self._in(group)


def _counts_ghosts(self: Any, group: Any, *rest: Any) -> None:
    real_accept(self, group, *rest)
    now = rest[-1]
    ghosts = self.__dict__.get("ghosts", {}).get(group.id, 0)
    if ghosts and group.state == State.LEASED and len(group.samples) + ghosts >= self.settings.group_size:
        self._out(group)
        self._complete(group, now)
        self._in(group)


def _keeps_deadline(self: Any, group: Any, *rest: Any) -> None:
    before = group.deadline
    real_accept(self, group, *rest)
    self._out(group)
    group.deadline = before
    self._in(group)


def _not_written_again(self: Any, rows: Any) -> None:
    self._sequence = self._medium.sequence
    self._medium.epoch = self._epoch
    if not self._medium.log:
        self._medium.write(self._epoch, self._sequence, [])


def _reward_check(*, lease: bool, sample: bool) -> Callable[..., Any]:
    """`_sample_for` with or without its two checks of the token."""

    def check(self: Any, item: Any, judge: str) -> Any:
        group = self.groups.get(item.group)
        found = group.samples.get(item.index) if group else None
        if group is None or found is None:
            return self._ended_reason(item.group) if group is None else "unknown sample"
        if found.reward is not None or said_by(found, judge).reward is not None:
            return "already scored"
        held = self.scores_due.leases.get((item.group, item.index, judge))
        if (lease and held is not None and held.token != item.token) or (sample and item.token <= found.token):
            return "token: the reward lease was lost"
        return Found(group, found, False)

    return check


def _first_answer_decides(sample: Any, judges: Any, judge: str, said: Any) -> bool:
    sample.reward, sample.parts = said.reward, said.parts
    return True


def _cursor_only(self: Any, cursor: int, *rest: Any) -> None:
    self.meta.cursor = max(self.meta.cursor, cursor, *(end for _, end in self.retired.ranges()[-1:]))


def _register_again(self: Any, **named: Any) -> int:
    named["once"] = 0
    return int(real_register(self, **named))


def _trained_die(self: Any, numbers: Any, *, now: float) -> None:
    for number in numbers:
        group = self.groups[number]
        if group.state in (State.CLAIMED, State.TRAINED):
            if group.state == State.TRAINED:
                self._forget_batches(group)
                self._end(group, State.DEAD, "payload_lost", now)
            else:
                real_lose_payloads(self, [number], now=now)
        else:
            real_lose_payloads(self, [number], now=now)


def _any_goodbye(self: Any, **named: Any) -> None:
    named["step"] = 0
    real_goodbye(self, **named)


def _rolled_back_ready(self: Any, number: int, now: float) -> None:
    """A group that an older checkpoint does not hold is forgotten instead of dropped: nobody accounts for it."""
    self.retired.discard(number)
    self._touch("retired")
    self.meta.cursor = max(self.meta.cursor, number + 1)


def _any_order(self: Any, step: int, size: int, now: float) -> bool:
    return True


def _fits_always(*_: Any, **__: Any) -> bool:
    return True


def _replay_recorded_anew(self: Any, batch: Any, now: float) -> Any:
    if self.meta.version < batch.step:
        batch.groups.reverse()
    return real_again(self, batch, now)


def _every_piece_is_next(self: Any, group: Any, head: Any, item: Any, keep: Any) -> Any:
    found = group.underway.get(item.index)
    start = item.start if found is None else found.length
    return real_take_piece(self, group, head, msgspec.structs.replace(item, start=start), keep)


def _commit_anything(self: Any, **named: Any) -> None:
    with contextlib.suppress(StateLost):
        real_commit(self, **named)


real_sort = Groups._sort_samples
real_take_piece = Groups._take_piece
real_commit = Groups.commit
real_flush = service.BufferService.flush
real_record = Groups._record
real_checkpointed = Groups.checkpointed
real_goodbye = Groups.goodbye
real_again = Groups._again
real_restore = Groups._restore_batches
real_register = Groups.register
real_lose = Groups._lose
real_accept = Groups._accept
real_lose_payloads = Groups.lose_payloads

NO_FENCE: Patch = (Groups, "fence", _nothing)
NAIVE_CLAIM: Patch = (Groups, "_settle_late", _any_order)

MUTANTS: dict[str, list[Patch]] = {
    "samples under an old token are taken": [(Groups, "_sort_samples", _any_token)],
    "duplicates are taken as new": [(Groups, "_sort_samples", _everything_is_new)],
    "an older learner epoch is obeyed": [NO_FENCE],
    "the store does not fence an older service": [(SimStore, "_check", _nothing)],
    "answers leave before they are persisted": [(service.BufferService, "flush", _answers_first)],
    "the first judge to answer decides": [(scoring, "take_answer", _first_answer_decides)],
    "a batch is handed out and not recorded": [(Groups, "_record", _record_in_memory)],
    "a recorded batch comes back in another order": [(Groups, "_again", _replay_recorded_anew)],
    "registration does not adopt the ledger": [(Groups, "_adopt_trained", _nothing)],
    "a checkpoint retires steps it does not hold": [(Groups, "checkpointed", _retires_all)],
    "recorded groups are ready once more": [(Groups, "_restore_batches", _ready_and_recorded)],
    "what was rolled back is forgotten": [(Groups, "_roll_back", _rolled_back_ready),
                                          (Groups, "_adopt_unknown", _cursor_only)],
    "the naive late rule: take what is ready": [NAIVE_CLAIM],
    "older tokens do not lower the deadline": [(Groups, "_accept", _keeps_deadline)],
    "a lost lease drops its samples and counts them": [(Groups, "_lose", _loses_but_counts),
                                                       (Groups, "_accept", _counts_ghosts)],
    "a second learner is taken in": [(Groups, "_refuse_second", _nothing)],
    "an emptied store is a new run": [(Groups, "note_emptied", _nothing)],
    "a lost store is not written again": [(SimStore, "reseed", _not_written_again)],
    "prompts that the store lost are not issued again": [(Groups, "_adopt_unknown", _cursor_only)],
    "silent producers keep their leases": [(Groups, "expire", _nothing)],
    "leases that nobody knows of are kept": [(Groups, "_lose_unnamed", _nothing)],
    "a late copy of a registration registers": [(Groups, "register", _register_again)],
    "a goodbye from ahead is taken": [(Groups, "goodbye", _any_goodbye)],
    "any commit is taken": [(Groups, "commit", _commit_anything)],
    "every piece of a sample is taken as the next one": [(Groups, "_take_piece", _every_piece_is_next)],
}  # fmt: skip


class _NoneIsClaimed:
    """The states as the opening service sees them when it forgets that a learner may hold a batch."""

    CLAIMED = 99


PAIRS: dict[str, list[Patch]] = {
    "claimed and trained groups die with their payload": [
        (server, "State", _NoneIsClaimed), (Groups, "lose_payloads", _trained_die),
    ],
    "no admission rule, naive late rule": [(leasing, "feasible", _fits_always), NAIVE_CLAIM],
    "neither the buffer nor the mark fences a learner": [NO_FENCE, (Learner, "check_mark", _nothing)],
    "neither epoch is checked": [NO_FENCE, (SimStore, "_check", _nothing)],
    "scores: neither the lease's nor the sample's token": [
        (Groups, "_sample_for", _reward_check(lease=False, sample=False)),
    ],
    "old tokens and duplicates": [(Groups, "_sort_samples", _everything_is_new),
                                  (Groups, "settle", _nothing)],
    "no ledger, nothing rolled back": [(Groups, "_adopt_trained", _nothing), (Groups, "_roll_back", _nothing)],
}  # fmt: skip


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
