"""Which waiting requests a drain of the buffer looks at."""

from __future__ import annotations

from typing import Any

from buffers.service.polls import Poll, Polls


class Ask:
    """Stands for a call with its message."""

    def __init__(self, kind: int) -> None:
        self.message, self.kind = self, kind


def poll(kind: int, *, until: float = 10.0) -> Poll:
    call: Any = Ask(kind)
    return Poll(call, until)


def looked_at(polls: Polls, now: float = 0.0, *, work: tuple[int, ...] = (), everyone: bool = False) -> list[str]:
    found = polls.to_look_at(now, has_work=lambda kind: kind in work, everyone=everyone)
    return [name for name, _ in found]


def test_new_ones_are_looked_at_once_and_all_where_there_is_work_or_the_time_of_one_is_over() -> None:
    polls = Polls(lambda message: message.kind)
    for name, kind in (("a", 1), ("b", 2)):
        polls.add(name, poll(kind))
    assert looked_at(polls) == ["a", "b"]
    assert looked_at(polls) == []
    polls.add("c", poll(2, until=5.0))
    assert looked_at(polls) == ["c"]
    assert looked_at(polls, work=(3,)) == []
    assert looked_at(polls, work=(2,)) == looked_at(polls, everyone=True) == ["a", "b", "c"]
    assert looked_at(polls, now=4.9) == []
    assert looked_at(polls, now=5.0) == ["a", "b", "c"]


def test_what_waits_no_longer_is_not_looked_at_and_its_kind_and_time_are_forgotten() -> None:
    polls = Polls(lambda message: message.kind)
    polls.add("a", poll(1, until=5.0))
    polls.add("b", poll(2))
    polls.remove("a")
    polls.remove("unknown")
    assert len(polls) == 1 and polls.get("a") is None
    assert looked_at(polls, now=6.0) == ["b"]
    assert looked_at(polls, now=6.0, work=(1,)) == []
    newer = poll(3)
    polls.add("b", newer)
    assert looked_at(polls) == ["b"] and polls.get("b") is newer
