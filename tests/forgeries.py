"""The kinds of forgeries of a history: order, time, unknown kinds, lines removed and added, fields, bytes and seals."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
from falsifier import KINDS, Book, Edit, Event, kind

from asyncrl.audit.records import TOKEN_SHIFT

__all__ = ["KINDS"]

# ---------------------------------------------------------------- the order within a group


def _order(name: str, blind: str, choose: Callable[[dict[str, list[Event]]], tuple[Event, Event]]) -> None:
    """A line of a group moves right behind another one."""

    def edit(book: Book) -> bool:
        story = book.story()
        return story is not None and book.move(*choose(story))

    kind(name, blind=blind)(edit)


def _score_of(story: dict[str, list[Event]], sample: Event) -> Event:
    return next(event for event in story["score"] if event["i"] == sample["i"])


_order("sample behind its score", "score", lambda s: (s["sample"][0], _score_of(s, s["sample"][0])))
_order("score before its sample", "score", lambda s: (_score_of(s, s["sample"][-1]), s["lease"][0]))
_order("score behind ready", "score", lambda s: (s["score"][-1], s["ready"][0]))
_order("sample behind ready", "sample", lambda s: (s["sample"][-1], s["ready"][0]))
_order("sample behind unscored", "sample", lambda s: (s["sample"][-1], s["unscored"][0]))
_order("ready before unscored", "ready", lambda s: (s["ready"][0], s["lease"][0]))
_order("ready before a score", "score ready", lambda s: (s["ready"][0], s["score"][-2]))
_order("lease behind a sample", "lease", lambda s: (s["lease"][0], s["sample"][0]))
_order("lease behind ready", "lease", lambda s: (s["lease"][0], s["ready"][0]))
_order("issue behind its lease", "unknown", lambda s: (s["issue"][0], s["lease"][0]))
_order("issue behind ready", "unknown", lambda s: (s["issue"][0], s["ready"][0]))
_order("ready behind its claim", "ready", lambda s: (s["ready"][0], s["claim"][0]))
_order("score behind its claim", "score", lambda s: (s["score"][-1], s["claim"][0]))
_order("unscored behind ready", "ready", lambda s: (s["unscored"][0], s["ready"][0]))
_order("commit before its claim", "unknown", lambda s: (s["claim"][0], s["commit"][0]))
_order("sample behind its commit", "sample", lambda s: (s["sample"][-1], s["commit"][0]))


@kind("two issues swapped", blind="issue unknown doubled")
def _(book: Book) -> bool:
    lives, places = book.lives(), book.places("issue")
    pairs = [
        (a, b)
        for a, b in itertools.pairwise(places)
        if lives[id(book.events[a])] == lives[id(book.events[b])] and book.events[a]["g"] + 1 == book.events[b]["g"]
    ]
    if not pairs:
        return False
    first, second = (book.events[place] for place in book.random.choice(pairs))
    first["g"], second["g"] = second["g"], first["g"]
    return True


@kind("two commits swapped", blind="version unknown steps")
def _(book: Book) -> bool:
    first = book.pick("commit")
    second = book.pick("commit", step=first["step"] + 1, epoch=first["epoch"]) if first is not None else None
    if first is None or second is None:
        return False
    mine = {key: first[key] for key in ("step", "version", "digest", "groups")}
    first.update({key: second[key] for key in mine})
    second.update(mine)
    return True


@kind("retire before its commit", blind="version")
def _(book: Book) -> bool:
    retire, first = book.pick("retire"), book.pick("register", epoch=1)
    return retire is not None and first is not None and book.move(retire, first)


def _registrations(book: Book) -> list[Event]:
    """Those whose epoch was given once: a store that lost everything gives it again."""
    found = [book.events[place] for place in book.places("register")]
    epochs = [event["epoch"] for event in found]
    return [event for event in found if epochs.count(event["epoch"]) == 1]


@kind("register behind a claim", blind="epoch")
def _(book: Book) -> bool:
    register = next(iter(_registrations(book)), None)
    claim = book.pick("claim", epoch=register["epoch"]) if register is not None else None
    return register is not None and claim is not None and book.move(register, claim)


# ---------------------------------------------------------------- time


def _inside(book: Book, count: int = 1) -> int | None:
    """A place whose next `count` events, and the one before, are of one service and of other times."""
    found = [
        place
        for place in range(1, book.limit - count)
        if all(event["e"] != "service" for event in book.events[place : place + count + 1])
        and book.events[place - 1]["t"] < book.events[place]["t"] < book.events[place + count]["t"]
    ]
    return book.random.choice(found) if found else None


@kind("a time before the one before it", blind="time")
def _(book: Book) -> bool:
    place = _inside(book)
    if place is None:
        return False
    book.events[place]["t"] = book.events[place - 1]["t"] - book.random.choice((0.000001, 0.5, 3600.0))
    return True


@kind("times of two lines swapped", blind="time")
def _(book: Book) -> bool:
    place = _inside(book)
    if place is None:
        return False
    first, second = book.events[place - 1], book.events[place]
    first["t"], second["t"] = second["t"], first["t"]
    return True


@kind("all times from here an hour earlier", blind="time")
def _(book: Book) -> bool:
    place = _inside(book)
    for event in book.events[place or 0 :]:
        event["t"] -= 3600
    return place is not None


@kind("times of a part reversed", blind="time")
def _(book: Book) -> bool:
    place = _inside(book, 6)
    if place is None:
        return False
    part = book.events[place : place + 6]
    for event, time in zip(part, [event["t"] for event in reversed(part)], strict=True):
        event["t"] = time
    return True


@kind("times of a service stretched")
def _(book: Book) -> bool:
    start = book.events[0]["t"]
    for event in book.events:
        event["t"] = start + 1.5 * (event["t"] - start)
    return True


@kind("a line without its time", blind="log")
def _(book: Book) -> bool:
    event = book.events[book.random.randrange(1, book.limit)]
    del event["t"]
    return True


# ---------------------------------------------------------------- kinds of events


@kind("event of an unknown kind", blind="log")
def _(book: Book) -> bool:
    event = book.pick("ready", "score", "commit")
    if event is not None:
        event["e"] = book.random.choice(("readied", "settle", "steps", "", "work"))
    return event is not None


@kind("unknown event added", blind="log")
def _(book: Book) -> bool:
    return book.add({"t": 0.0, "e": "pardon", "g": 1}, book.events[book.random.randrange(book.limit)])


@kind("unknown event of an evaluation added", blind="log")
def _(book: Book) -> bool:
    return book.add({"t": 0.0, "e": "evaluation_pardon"}, book.events[book.random.randrange(book.limit)])


# ---------------------------------------------------------------- lines removed and added


def _removed(name: str, blind: str) -> None:
    def edit(book: Book) -> bool:
        story = book.story()
        return story is not None and book.remove(book.random.choice(story[name]))

    kind(f"{name} removed", blind=blind)(edit)


for _name, _blind in {
    "issue": "unknown",
    "lease": "lease",
    "sample": "sample score",
    "score": "score",
    "unscored": "ready",
    "ready": "ready",
    "claim": "unknown steps",
    "commit": "steps version lost",
}.items():
    _removed(_name, _blind)


def _doubled(name: str, blind: str) -> None:
    def edit(book: Book) -> bool:
        story = book.story()
        if story is None:
            return False
        event = book.random.choice(story[name])
        return book.add(event, event)

    kind(f"{name} doubled", blind=blind)(edit)


for _name, _blind in {
    "issue": "doubled issue",
    "lease": "lease",
    "sample": "sample",
    "score": "score",
    "unscored": "sample",
    "ready": "ready",
    "claim": "",
    "commit": "",
}.items():
    _doubled(_name, _blind)


@kind("first line removed", blind="log")
def _(book: Book) -> bool:
    return book.events[1]["e"] != "service" and book.remove(book.events[0])


@kind("start of a service removed", blind="epoch")
def _(book: Book) -> bool:
    """Tokens of its epoch are in use."""
    used = {event["token"] >> TOKEN_SHIFT for event in book.events if event["e"] == "lease"}
    found = [place for place in book.places("service") if book.events[place]["service_epoch"] in used]
    return book.remove(book.events[book.random.choice(found)])


@kind("registration removed", blind="epoch")
def _(book: Book) -> bool:
    """Its learner claims something."""
    found = [event for event in _registrations(book) if book.places("claim", epoch=event["epoch"])]
    return book.remove(book.random.choice(found)) if found else False


@kind("lost lease removed", blind="lease")
def _(book: Book) -> bool:
    """One whose group the same service leases again."""
    lives = book.lives()
    for place in book.places("lost"):
        lost = book.events[place]
        again = next((e for e in book.events[place:] if e["e"] == "lease" and e["g"] == lost["g"]), None)
        held = [e for e in book.events[:place] if e["e"] == "lease" and e.get("token") == lost["token"]]
        if again is not None and held and lives[id(held[0])] == lives[id(again)]:
            return book.remove(lost)
    return False


@kind("a drain removed")
def _(book: Book) -> bool:
    ends = [place for place, event in enumerate(book.events[: book.limit]) if "chain" in event]
    at = book.random.randrange(len(ends) - 1)
    del book.events[ends[at] + 1 : ends[at + 1] + 1]
    return True


@kind("the end cut off", blind="")
def _(book: Book) -> bool:
    ends = [place for place, event in enumerate(book.events[: book.limit - 1]) if "chain" in event]
    del book.events[book.random.choice(ends) + 1 :]
    return True


@kind("a line copied to a later place")
def _(book: Book) -> bool:
    event = book.pick("score", "sample", "retire", "claim")
    return event is not None and book.add(event, book.events[book.random.randrange(book.at(event), book.limit)])


@kind("two drains swapped", raw=True)
def _(book: Book) -> bool:
    ends = [place for place, event in enumerate(book.events[: book.limit]) if "chain" in event]
    at = book.random.randrange(len(ends) - 2)
    first, middle, last = ends[at] + 1, ends[at + 1] + 1, ends[at + 2] + 1
    book.events[first:last] = [*book.events[middle:last], *book.events[first:middle]]
    return True


# ---------------------------------------------------------------- fields


def _field(name: str, events: str, key: str, change: Callable[[Any, Book], Any], *, blind: str = "") -> None:
    """One field of one event."""

    def edit(book: Book) -> bool:
        story = book.story() if blind else None  # what was taken back later says nothing
        mine = [event for name in events.split() for event in story[name]] if story is not None else []
        found = mine or [book.events[place] for place in book.places(*events.split())]
        found = [event for event in found if key in event]
        if not found or (blind and story is None):
            return False
        event = book.random.choice(found)
        before = event[key]
        event[key] = change(copy.deepcopy(before), book)
        return bool(event[key] != before)

    kind(name, blind=blind)(edit)


def _other_groups(groups: list[int], book: Book) -> list[int]:
    others = sorted({e["g"] for e in book.events if e["e"] == "issue"} - set(groups))
    return [*groups[:-1], book.random.choice(others)] if others else groups


_field("reward changed", "score", "reward", lambda value, book: value + 0.5)
_field("reward of another sign", "score", "reward", lambda value, book: -value - 1)
_field("worker of a score changed", "score", "worker", lambda value, book: "reward-9")
_field("producer of a lease changed", "lease", "producer", lambda value, book: "producer-9", blind="lease")
_field("producer of a sample changed", "sample", "producer", lambda value, book: "producer-9", blind="lease")
_field("attempt of a lease changed", "lease", "attempt", lambda value, book: value + 1)
_field("bound of a lease raised", "lease", "bound", lambda value, book: value + 3, blind="bound lag")
_field("deadline of a lease raised", "lease", "deadline", lambda value, book: value + 9, blind="bound")
_field("engine of a lease from the future", "lease", "w", lambda value, book: value + 1000, blind="version")
_field("token of a sample changed", "sample", "token", lambda value, book: value + 1, blind="lease")
_field("token of a service that never was", "lease", "token", lambda value, book: value + (1 << 40), blind="epoch")
_field("length of a sample changed", "sample", "length", lambda value, book: value + 1, blind="sample")
_field("index of a sample changed", "sample", "i", lambda value, book: value + 77, blind="score sample")
_field(
    "digest of a span changed",
    "sample",
    "digests",
    lambda value, book: dict.fromkeys(value, "0123456789abcdef" * 2),
    blind="digest",
)
_field(
    "tokens of a version from the future",
    "sample",
    "runs",
    lambda value, book: [[version + 1000, count] for version, count in value],
    blind="version",
)
_field("digest of a commit changed", "commit", "digest", lambda value, book: "0123456789abcdef" * 2)
_field("version of a commit changed", "commit", "version", lambda value, book: value + 1, blind="version")
_field("step of a commit changed", "commit", "step", lambda value, book: value + 1000, blind="steps unknown")
_field("group left out of a commit", "commit", "groups", lambda value, book: value[:-1], blind="steps doubled")
_field("other group in a commit", "commit", "groups", _other_groups, blind="unknown doubled steps")
_field("other group in a claim", "claim", "groups", _other_groups, blind="unknown steps claim ready")
_field("order of a batch changed", "claim", "groups", lambda value, book: value[::-1])
_field("version of a claim changed", "claim", "version", lambda value, book: value + 1, blind="version")
_field("epoch of a claim changed", "claim", "epoch", lambda value, book: value + 7, blind="epoch")
_field("epoch of a commit changed", "commit", "epoch", lambda value, book: value + 7, blind="epoch")
_field("max_staleness changed", "service", "max_staleness", lambda value, book: value + 5)
_field("pid of a learner changed", "register", "pid", lambda value, book: value + 1)
_field("reason of a lost lease changed", "lost", "why", lambda value, book: "stopping!")


@kind("rewards of a group changed alike")
def _(book: Book) -> bool:
    story = book.story()
    for event in story["score"] if story is not None else ():
        event["reward"] = 1.0 - event["reward"] / 2
    return story is not None


@kind("producer of a lease and its samples changed")
def _(book: Book) -> bool:
    story = book.story()
    for event in [*story["lease"], *story["sample"]] if story is not None else ():
        event["producer"] = "producer-9"
    return story is not None


@kind("token of a lease and its samples changed")
def _(book: Book) -> bool:
    story = book.story()
    for event in [*story["lease"], *story["sample"]] if story is not None else ():
        event["token"] += 1 << 20
    return story is not None


@kind("sample longer, with its spans")
def _(book: Book) -> bool:
    event = book.pick("sample")
    if event is None or not event["runs"]:
        return False
    event["length"] += 1
    event["runs"][-1][1] += 1
    return True


def _aged(by: int) -> Edit:
    """All spans of a sample are of another version, with its right digest."""

    def edit(book: Book) -> bool:
        digests = {event["version"]: event["digest"] for event in book.events if event["e"] == "commit"}
        newest, found = 0, []
        for event in book.events[: book.limit]:
            newest = max(newest, event["version"]) if event["e"] == "commit" else newest
            if event["e"] != "sample" or len(event["runs"]) != 1:
                continue
            if 0 < event["runs"][0][0] + by <= newest and event["runs"][0][0] + by in digests:
                found.append(event)
        if not found:
            return False
        event = book.random.choice(found)
        version = event["runs"][0][0] + by
        event["runs"], event["digests"] = [[version, event["length"]]], {str(version): digests[version]}
        return True

    return edit


kind("sample made younger, with its digest")(_aged(1))
kind("sample made older, with its digest")(_aged(-1))


@kind("digest of a version changed everywhere")
def _(book: Book) -> bool:
    commit = book.pick("commit")
    if commit is None or not commit["digest"]:
        return False
    old = commit["digest"]
    text = msgspec.json.encode(book.events).replace(old.encode(), b"fedcba9876543210" * 2)
    book.events = msgspec.json.decode(text)
    return True


@kind("two groups swapped in their steps")
def _(book: Book) -> bool:
    """In claims and commits alike."""
    claims = [book.events[place] for place in book.places("claim") if book.events[place]["groups"]]
    pairs = [(a, b) for a, b in itertools.pairwise(claims) if not set(a["groups"]) & set(b["groups"])]
    if not pairs:
        return False
    first, second = book.random.choice(pairs)
    swap = {first["groups"][-1]: second["groups"][-1], second["groups"][-1]: first["groups"][-1]}
    for event in book.events:
        if event["e"] in ("claim", "commit"):
            event["groups"] = [swap.get(number, number) for number in event["groups"]]
    return True


@kind("a group called reusable")
def _(book: Book) -> bool:
    event = book.pick("issue")
    if event is not None:
        event["uses"] = event.get("uses", 1) + 1
    return event is not None


# ---------------------------------------------------------------- bytes and seals


def _damage(name: str, change: Callable[[bytes, Book], bytes]) -> None:
    def edit(book: Book) -> bool:
        book.damage = lambda data: change(data, book)
        return True

    kind(name, raw=True)(edit)


def _flip(data: bytes, book: Book) -> bytes:
    place = book.random.randrange(sum(len(line) for line in data.splitlines(keepends=True)[: book.limit]))
    return data[:place] + bytes([data[place] ^ (1 << book.random.randrange(7))]) + data[place + 1 :]


def _line(change: Callable[[bytes], bytes]) -> Callable[[bytes, Book], bytes]:
    def edit(data: bytes, book: Book) -> bytes:
        lines = data.splitlines(keepends=True)
        place = book.random.randrange(book.limit)
        lines[place] = change(lines[place])
        return b"".join(lines)

    return edit


_damage("one bit flipped", _flip)
_damage("blank line added", _line(lambda line: line + b"\n"))
_damage("space added", _line(lambda line: line.replace(b",", b", ", 1)))
_damage("line damaged", _line(lambda line: line[: len(line) // 2] + b"\n"))


def _seal(name: str, change: Callable[[Event, Book], None]) -> None:
    def edit(book: Book) -> bool:
        sealed = [event for event in book.events[: book.limit] if "chain" in event]
        change(book.random.choice(sealed), book)
        return True

    kind(name, raw=True)(edit)


_seal("a seal removed", lambda event, book: event.__delitem__("chain"))
_seal("a seal changed", lambda event, book: event.update(chain=event["chain"][::-1]))
_seal("a seal copied from another line", lambda event, book: event.update(chain=book.events[-1]["chain"]))


@kind("all seals removed", raw=True)
def _(book: Book) -> bool:
    for event in book.events:
        event.pop("chain", None)
    return True


@kind("all seals from here removed", raw=True)
def _(book: Book) -> bool:
    for event in book.events[book.random.randrange(book.limit) :]:
        event.pop("chain", None)
    return True
