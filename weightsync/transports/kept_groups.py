"""Process groups that are kept from version to version while their members stay.

Building a group costs each member up to seconds and device memory, so a group is built once for each set of members.
Guarantees:
1. a group is used again only if rank 0 and every other present member still hold it, and it has no further member;
2. an end that fails, or leaves a transfer before its last blob, drops the group: it can never be chosen again;
3. a member ends the groups that rank 0 no longer holds, and those of another store;
4. a group is made, used and ended on one thread; at most `MOST_GROUPS` are held, the one used last stays;
5. with several senders (transport `direct`) a group is one process group for each, its lanes: bucket b takes lane
   b modulo their number. They are kept and end together.

Example: a and b take versions 1 and 2 in one group. c joins: a second group. c is killed in version 4, which fails:
version 4 is sent again in the first group.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from asyncrl.config.capabilities import MOST_SENDERS
from weightsync.transports.process_groups import abort, leave
from weightsync.transports.worker_thread import Worker

T = TypeVar("T")
MOST_MEMBERS = 1 << 16
MOST_PROCESSES = 1 << 10  # of a member
MOST_GROUPS = 4  # two members that are rarely free together need three
END_S = 0.5  # a healthy group ends at once


class Choice(msgspec.Struct, frozen=True):
    """Rank 0's word to the processes that came: the group of this generation. `built`: they hold it; else they build
    it, in the order of `ranks`. `held`: the groups that rank 0 holds. `senders`: the lanes of the group."""

    name: str
    ranks: tuple[int, ...]
    built: bool
    held: tuple[str, ...]
    senders: Annotated[int, msgspec.Meta(ge=1, le=MOST_SENDERS)] = 1


class Group:
    """A process group and its thread. `group` is None until it is built. With several `senders` a process that receives
    has the `further` lanes here, too; a sender is in its own lane alone."""

    def __init__(self, name: str, *, address: str = "", senders: int = 1) -> None:
        self.name = name
        self.address = address
        self.senders = senders
        self.further: list[Group] = []
        self.others = 0  # members without rank 0
        self.group: Any = None
        self.store: Any = None  # it was built with it, and uses it
        self.worker = Worker(f"group-{name}")

    def lane(self, bucket: int) -> Group:
        """The lane of a bucket, for a process that is in all of them."""
        return self if bucket % self.senders == 0 else self.further[bucket % self.senders - 1]

    def end(self, *, failed: bool = False) -> None:
        """Leave it; a hanging operation ends by its own limit."""
        for one in self.further:
            one.end(failed=failed)
        if failed:
            abort(self.group)
        self.worker.close(self._leave, within_s=END_S)

    def _leave(self) -> None:
        leave(self.group)
        self.group = self.store = None


class Groups:
    """The groups that a process holds and does not use now. Any thread."""

    def __init__(self) -> None:
        self._held: dict[str, Group] = {}  # used last: at the end
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._held)  # also at the end of the process: a destructor alone may hang

    def names(self, address: str = "") -> list[str]:
        """The names of those of this address."""
        with self._lock:
            return [name for name, one in self._held.items() if one.address == address]

    def take(self, name: str) -> Group | None:
        """Use a group; it is held again after `give`."""
        with self._lock:
            return self._held.pop(name, None)

    def give(self, group: Group) -> None:
        """Hold a group whose last transfer was complete."""
        with self._lock:
            self._held[group.name] = group
        while len(self._held) > MOST_GROUPS:
            self._end(next(iter(self._held)))

    def keep_only(self, names: Collection[str], *, address: str) -> None:
        """End all others, and those of other addresses."""
        keep = set(names) & set(self.names(address))
        for name in [name for name in list(self._held) if name not in keep]:
            self._end(name)

    def choose(self, name: str, present: Mapping[int, Collection[str]], senders: int = 1) -> Choice:
        """At rank 0: the group of the ranks that came, by the names of the groups that each holds; a new one called
        `name` if there is none."""
        with self._lock:
            fit = [one for one in self._held.values() if (one.others, one.senders) == (len(present), senders)]
            common = [one.name for one in fit if all(one.name in held for held in present.values())]
            return Choice(common[-1] if common else name, tuple(present), bool(common), tuple(self._held), senders)

    def _end(self, name: str) -> None:
        if (group := self.take(name)) is not None:
            group.end()

    def close(self) -> None:
        """End all."""
        _end_all(self._held)


def _end_all(held: dict[str, Group]) -> None:
    while held:
        held.popitem()[1].end()


class Report(msgspec.Struct, frozen=True):
    """What a process sets at the store when it comes: the groups that it holds, and the number of processes of its
    member, which come one by one."""

    held: list[str]
    processes: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROCESSES)] = 1


def process_id(rank: int, process: int) -> int:
    """The number of a process of the member with this rank, as in `Choice.ranks`."""
    return rank + process * MOST_MEMBERS


def come(store: Any, ranks: Sequence[int]) -> dict[int, list[str]]:
    """The processes of the members that came whole, with the groups that each holds. Raises ValueError for a report
    that cannot be read: any process that reaches the store can write there."""
    found: dict[int, list[str]] = {}
    for rank in ranks:
        if not store.check([f"here/{rank}"]):
            continue
        first = msgspec.json.decode(store.get(f"here/{rank}"), type=Report)
        numbers = [process_id(rank, process) for process in range(first.processes)]
        if store.check([f"here/{number}" for number in numbers]):
            found |= {one: msgspec.json.decode(store.get(f"here/{one}"), type=Report).held for one in numbers}
    return found
