"""What must hold in every state and at every transition of the search; each check is written from docs/staleness.md.

They read rows (groups, batches), not the indexes that decisions use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.errors import AsyncRLError
from asyncrl.wire import Lease, Samples
from buffers.groups.group_table import reasons
from buffers.groups.machine import GroupMachine
from buffers.groups.records import COMPETING, Batch, Group, State

if TYPE_CHECKING:
    from model_world import Node, World


class Violation(Exception):
    """A promise is broken."""


def check_state(world: World, node: Node, book: GroupMachine) -> None:
    """Conservation, (F), the depth, bounds that stay, for a state that was just reached."""
    try:
        book.check()
    except AsyncRLError as error:
        raise Violation(f"conservation: {error}") from None
    if world.only:
        return
    case, size, v = world.case, world.case.batch, book.table.frontier
    due = []
    for number, group in book.table.groups.items():
        if group.bound != node.bounds.get(number, group.bound):
            raise Violation(f"group {number} was leased with bound {node.bounds[number]}, now it has {group.bound}")
        if group.partial:
            check_partial(world, group)
        if group.state in COMPETING and group.deadline is not None:
            due.append(group.deadline)
            if group.samples and group.deadline > min(s.oldest for s in group.samples.values()) + group.bound:
                raise Violation(f"group {number} has older tokens than its deadline {group.deadline} says")
    if world.exact and not case.late and "late" in reasons(book.table, State.DROPPED):
        raise Violation("a group was dropped as late though everybody was waited for")
    if world.exact:
        for u in set(due):
            count = sum(deadline <= u for deadline in due)
            if count > max(0, u - v + 1) * size:
                raise Violation(f"(F): {count} groups are due up to version {u}, the next claim starts from {v}")
    outstanding = outstanding_of(book)
    plain = not case.tunes and not case.restarts and case.reuse == 1
    if plain and outstanding > (case.depth + 1) * size:
        raise Violation(f"(D): {outstanding} groups are outstanding with depth {case.depth} and B {size}")


def check_partial(world: World, group: Group) -> None:
    """Checkpoints are of missing samples; a leased group is due when the oldest of their tokens says."""
    if group.state != State.LEASED or group.samples.keys() & group.partial.keys():
        raise Violation(f"group {group.id} keeps checkpoints that nobody needs")
    if not world.exact or not group.token or group.deadline is None:
        return
    if any(group.deadline > one.oldest + group.bound for one in group.partial.values()):
        raise Violation(f"group {group.id} is due at {group.deadline}, later than its checkpoints allow")


def outstanding_of(book: GroupMachine, *, waiting: bool = True) -> int:
    """Groups that compete, and those of the newest batch that is not committed; without `waiting` only those that hold
    a sample or a lease.
    """
    competing = [group for group in book.table.groups.values() if group.state in COMPETING]
    newest = max(book.table.batches, default=0)
    training = len(book.table.batches[newest].groups) if newest > book.table.meta.version else 0
    return training + sum(waiting or group.deadline is not None for group in competing)


def check_grant(
    world: World, node: Node, book: GroupMachine, lease: Lease, *, version: int, outstanding: int, fresh: bool
) -> None:
    """A lease that was just granted. `outstanding` is of before, without groups that wait to be leased at all."""
    if world.only:
        return
    group = book.table.groups[lease.group]
    bound = book.settings.max_staleness if fresh else node.bounds[lease.group]
    if lease.deadline_version > version + bound:
        raise Violation(f"group {group.id} gets deadline {lease.deadline_version} at version {version}, bound {bound}")
    training = max(book.table.meta.version, book.table.frontier - 1)
    lag = max(0, training - version)
    limit = (book.settings.depth + 1 - lag) * world.case.batch
    if len(lease.missing) == world.case.size and outstanding >= limit:
        raise Violation(
            f"(D): group {group.id} is leased at lag {lag} beside {outstanding} others, {limit} is the limit"
        )
    if group.token <= node.epoch << 24 or any(
        other.token == group.token for other in book.table.groups.values() if other.id != group.id
    ):
        raise Violation(f"the token of group {group.id} was in use before")
    if any(index in group.samples for index in lease.missing):
        raise Violation(f"group {group.id}: samples that are there are asked for again")


def check_loss(before: GroupMachine, after: GroupMachine, numbers: list[int]) -> None:
    """These leases were lost: what had arrived stays, and an answer under the old token is refused."""
    for number in numbers:
        old, new = before.table.groups[number], after.table.groups.get(number)
        if new is None:
            continue
        if new.samples.keys() != old.samples.keys():
            raise Violation(f"group {number} lost its samples with its lease")
        if new.token == old.token or new.holder:
            raise Violation(f"group {number}: the lost lease is still in force")
        if (new.deadline is None) != (not new.samples):
            raise Violation(f"group {number} has deadline {new.deadline} and {len(new.samples)} samples")


def check_tokens(book: GroupMachine, message: Samples, number: int) -> None:
    """Answers under another token than that of the lease change nothing."""
    for token in (message.token - 1, 0):
        other = Samples(message.producer, number, token, message.samples, {}, (), "", 1, rewards=message.rewards)
        if book.samples(other, checksum=8, invalid=str, keep=_never, now=0.0).accepted:
            raise Violation(f"a sample of group {number} was taken under token {token}, leased is {message.token}")


def _never() -> None:  # type: ignore[return]
    raise Violation("bytes of a refused sample were kept")


def check_batch(world: World, node: Node, book: GroupMachine, batch: Batch) -> int:
    """A batch that was just claimed; the largest lag in it."""
    version, largest = batch.version, 0
    left = (world.case.total or 1 << 30) - version * world.case.batch
    if len(batch.groups) != min(world.case.batch, left) or len(set(batch.groups)) != len(batch.groups):
        raise Violation(f"the batch of step {batch.step} is {batch.groups}")
    elsewhere = [number for step, other in book.table.batches.items() if step != batch.step for number in other.groups]
    for number in batch.groups:
        group, bound = book.table.groups[number], node.bounds[number]
        oldest = min(sample.oldest for sample in group.samples.values())
        largest = max(largest, version - oldest)
        if version - oldest > bound and world.case.on_late != "train":
            raise Violation(f"group {number} is trained at lag {version - oldest}, its bound is {bound}")
        if len(group.samples) != world.case.size or any(s.reward is None for s in group.samples.values()):
            raise Violation(f"group {number} is trained and not complete")
        if world.case.judges > 1 and any(s.reward != 3.0 for s in group.samples.values()):
            raise Violation(f"group {number} is trained without the sum of its judges")
        if group.state != State.CLAIMED or number in book.table.retired or number in book.table.archive:
            raise Violation(f"group {number} is in a batch as {State(group.state).name}")
        if world.case.reuse == 1 and number in elsewhere:
            raise Violation(f"group {number} is in two batches")
        if len(group.uses) > world.case.reuse or len(set(group.uses)) != len(group.uses):
            raise Violation(f"group {number} is trained by the steps {group.uses}")
    return largest
