"""A process group is kept while its members stay: transport `collective`, members in processes of their own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked import Child, Forks
from transport_children import SMALL
from transport_rigs import CollectiveRig

from weightsync.transports.base import TransportError
from weightsync.transports.kept_groups import Group, Groups


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(["transport_children"], paths=[Path(__file__).parent])
    yield forks
    forks.close()


class Members:
    """A publisher, and members that stay for many rounds."""

    def __init__(self, folder: Path, start: Callable[..., Child]) -> None:
        self.rig = CollectiveRig(folder, plan=SMALL, deadline_s=8.0)
        self.start = start
        self.generation = 0

    @property
    def formed(self) -> int:
        return self.rig.outbox.formed  # type: ignore[union-attr]

    def join(self, *gates: int) -> Child:
        child: Child = self.start("stay", gates)
        assert child.next() == ("up",)
        return child

    def begin(self, members: Sequence[Child]) -> threading.Thread:
        """A round of a new version under way."""
        self.rig.publish()
        self.generation += 1
        for rank, child in enumerate(members, start=1):
            told = self.rig.instruction(rank, len(members) + 1, self.generation)
            child.say(msgspec.msgpack.encode(told))
        sender = threading.Thread(target=self.send, args=(len(members), self.generation))
        sender.start()
        return sender

    def send(self, ranks: int, generation: int) -> None:
        try:
            self.rig.send(ranks, generation)
        except TransportError:
            return

    def round(self, *members: Child) -> None:
        """A version comes to all."""
        sender = self.begin(members)
        found = [child.next(20) for child in members]
        sender.join(30)
        assert found == [self.rig.expected()] * len(members)


@pytest.fixture
def members(tmp_path: Path, forks: Forks) -> Iterator[Members]:
    made = Members(tmp_path, lambda name, *args: forks.start("transport_children", name, *args))
    yield made
    forks.end_children()
    made.rig.close()


def test_versions_use_one_group_while_the_members_stay(members: Members) -> None:
    a, b = members.join(), members.join()
    members.round(a, b)
    members.round(a, b)
    members.round(b, a)
    assert members.formed == 1
    c = members.join()
    members.round(a, b, c)
    members.round(a, b, c)
    assert members.formed == 2, "a joiner costs one"
    members.round(a, c)
    members.round(a, b)
    members.round(a, b, c)
    assert members.formed == 3, "who is not free for a version finds the old group again"


def test_a_member_killed_between_versions_costs_one_group(members: Members) -> None:
    a, b, c = members.join(), members.join(), members.join()
    members.round(a, b, c)
    c.signal(signal.SIGKILL)
    members.round(a, b)
    members.round(a, b)
    assert members.formed == 2
    d = members.join()  # in its place: as many members, another process
    members.round(a, b, d)
    members.round(a, b, d)
    assert members.formed == 3


@pytest.mark.parametrize("blob", range(len(SMALL.bucket_bytes)))
def test_a_member_killed_in_a_transfer_costs_one_group(members: Members, blob: int) -> None:
    a, b, victim = members.join(), members.join(), members.join(blob)
    sender = members.begin([a, b, victim])
    assert victim.next(20) == ("at", blob)
    victim.say("go")
    assert [child.next(20) for child in (a, b, victim)] == [members.rig.expected()] * 3
    sender.join(30)
    sender = members.begin([a, b, victim])
    assert victim.next(20) == ("at", blob)
    victim.signal(signal.SIGKILL)
    found: list[Any] = [a.next(20), b.next(20)]
    sender.join(30)
    assert all(isinstance(one, str) or one == members.rig.expected() for one in found)
    assert members.formed == 1
    members.round(a, b)
    members.round(a, b)
    assert members.formed == 2


def test_a_member_that_failed_does_not_hold_its_group(members: Members) -> None:
    """It left the transfer of its own accord: the publisher may not have seen it."""
    a, gated = members.join(), members.join(1)
    sender = members.begin([a, gated])
    assert gated.next(20) == ("at", 1)
    gated.end()
    sender.join(30)
    a.next(20)
    b = members.join()
    members.round(a, b)
    assert members.formed == 2


@pytest.mark.parametrize("junk", [b"junk", b"\xff", b'{"held": 1}', b'{"held": [], "processes": 1000000000}', b"[]"])
def test_junk_at_the_store_is_an_error_of_the_round(tmp_path: Path, junk: bytes) -> None:
    """The store has no authentication."""
    rig = CollectiveRig(tmp_path, plan=SMALL, deadline_s=4.0)
    outbox: Any = rig.outbox
    outbox._store.set("ws/1/here/1", junk)
    with pytest.raises(TransportError, match="cannot be read"):
        rig.send(1, 1)
    rig.close()


def test_the_oldest_groups_are_ended_and_a_group_is_chosen_by_all() -> None:
    groups = Groups()
    for number in range(6):
        group = Group(str(number), address="x" if number < 5 else "y")
        group.others = 2
        groups.give(group)
    assert groups.names("x") == ["2", "3", "4"] and groups.names("y") == ["5"]
    assert groups.choose("9", {1: ["3", "4"], 2: ["2", "3"]}).name == "3"
    for present in ({1: ["3"], 2: ["4"]}, {1: ["3"]}, {1: ["3"], 2: ["3"], 4: ["3"]}, {1: ["-"], 2: ["3"]}):
        choice = groups.choose("9", present)
        assert (choice.name, choice.built, choice.ranks) == ("9", False, tuple(present))
    groups.keep_only(["3", "5", "7"], address="x")
    assert (groups.names("x"), groups.names("y")) == (["3"], [])
    groups.close()
    assert groups.names("x") == []
