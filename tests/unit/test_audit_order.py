"""The audit: what came in the wrong order, under another bound than the setting, or is cut off at the end."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import Event, good_history, issue, register, train, write_history, write_run

from asyncrl.audit.prove import Audit, Log, audit, audit_file, audit_run, render
from asyncrl.config import parse
from asyncrl.runtime.run_dir import format_json
from buffers.groups.machine import GroupMachine
from buffers.main import settings_of


def kinds(found: Audit) -> set[str]:
    return {violation.partition(":")[0] for violation in found.violations}


def find(events: list[Event], kind: str, **wanted: object) -> Event:
    return next(event for event in events if event["e"] == kind and all(event[k] == v for k, v in wanted.items()))


def moved(events: list[Event], event: Event, after: Event) -> list[Event]:
    """The events with one of them right after another."""
    rest = [one for one in events if one is not event]
    place = next(place for place, one in enumerate(rest) if one is after)
    return [*rest[: place + 1], event, *rest[place + 1 :]]


@pytest.mark.parametrize(("what", "kind"), [("ready", "ready"), ("score", "score"), ("sample", "sample")])
@pytest.mark.parametrize("after", ["claim", "commit"])
def test_what_a_training_needs_came_after_it(what: str, kind: str, after: str) -> None:
    events = good_history()
    found = audit(moved(events, find(events, what, g=3), find(events, after, step=2)))
    assert kind in kinds(found), found.violations


def test_recorded_batch_is_handed_out_again_after_its_store_went_back() -> None:
    """The groups of a replayed batch had been ready when it was recorded."""
    events = good_history(steps=3)
    claim = find(events, "claim", step=3)
    place = events.index(claim)
    lost: list[Event] = [{"e": "service", "service_epoch": 2}, dict(claim, replayed=True)]
    assert audit([*events[: place + 1], *lost, *events[place + 1 :]]).ok


@pytest.mark.parametrize("change", [{"length": 6}, {"runs": [[1, 4]]}, {"runs": []}])
def test_spans_cover_the_tokens(change: dict[str, Any]) -> None:
    events = good_history()
    find(events, "sample", g=4).update(change)
    assert kinds(audit(events)) == {"sample"}


def with_setting(events: list[Event], bound: int) -> list[Event]:
    return [dict(event, max_staleness=bound) if event["e"] == "service" else event for event in events]


def test_leases_have_a_bound_that_was_in_force() -> None:
    events = with_setting(good_history(), 2)
    assert audit(events).ok
    for event in events:
        if event["e"] == "lease":
            event["bound"] = 100
    found = audit(events)
    assert kinds(found) == {"bound"} and "max_staleness was 2" in found.violations[0]


def test_bounds_of_tuned_settings_and_of_an_older_log() -> None:
    tune: Event = {
        "e": "tune",
        "n": 1,
        "author": "me@here",
        "key": "buffer.max_staleness",
        "old": 2,
        "new": 4,
    }
    head = with_setting([{"e": "service", "service_epoch": 1}, register(1, 0)], 2)
    tail = [*issue(0, version=0, bound=2), *issue(1, version=0, bound=4)]
    assert audit([*head, tune, *tail]).ok
    assert kinds(audit([*head, *tail])) == {"bound"}
    assert audit([{"e": "service", "service_epoch": 1}, register(1, 0), *tail]).ok


def test_the_service_says_its_setting(tmp_path: Path) -> None:
    config = parse(
        '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "m:r"\n[buffer]\nmax_staleness = 3'
    )
    groups = GroupMachine(settings_of(config), epoch=1, wall_offset=0.0)
    groups.note_start(0.0)
    [event] = groups.take().events
    assert isinstance(event, dict) and event["e"] == "service" and event["max_staleness"] == 3
    assert (event["batch_groups"], event["on_late"]) == (config.buffer.batch_groups, "wait")


@pytest.mark.parametrize("when", [0, 2, 5])
def test_training_over_the_bound_is_allowed_from_the_change_on(when: int) -> None:
    """`on_late = train` of step 3 says nothing for step 2."""
    tune: Event = {
        "e": "tune",
        "n": 1,
        "author": "me@here",
        "key": "buffer.on_late",
        "old": "wait",
        "new": "train",
    }
    events: list[Event] = [{"e": "service", "service_epoch": 1}, register(1, 0)]
    for step in range(1, 7):
        events += [tune] if step == when + 1 else []
        events += [*issue(step, version=0, bound=2), *train(step, [step])]  # the lag of step 4 is 3
    found = audit(events)
    assert found.over_bound == 3 and found.ok == (when < 3)
    assert sum(text.startswith("lag:") for text in found.violations) == (2 if when == 5 else 0)


def test_step_without_the_digest_of_its_weights() -> None:
    events = good_history()
    find(events, "commit", step=2)["digest"] = ""
    found = audit(events)
    assert found.violations == ["digest: step 2 was committed without the digest of its weights"]
    again = audit([*events[:-2], register(2, 4), *events[-2:]])  # a learner that came back may not know it
    assert again.ok and again.notes == ["step 2 was committed without the digest of its weights"]


def test_end_of_the_log_is_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8)
    run.result.write_text('{"done": true, "steps": 8}')
    assert audit_run(run.root).ok
    lines = run.history.read_bytes().splitlines(keepends=True)
    for left in (len(lines) - 1, len(lines) // 2):
        run.history.write_bytes(b"".join(lines[:left]))
        assert kinds(audit_run(run.root)) == {"log"}
    run.result.unlink()  # it goes on
    assert audit_run(run.root).ok


@pytest.mark.parametrize(
    "event",
    [
        "service",
        "register",
        "tune",
        "issue",
        "lease",
        "lost",
        "cancel",
        "sample",
        "score",
        "ready",
        "claim",
        "commit",
        "retire",
        "drop",
        "dead",
        "end",
        "fenced",
        "prompts",
        "choose",
        "outcome",
    ],
)
def test_no_garbled_event_ends_the_audit(event: str) -> None:
    events = good_history(steps=2)
    tune = {"t": 1.0, "e": "tune", "n": 1, "author": "me@here", "key": "buffer.on_late", "old": "wait", "new": "drop"}
    lost = {"e": "lost", "g": 4, "token": 5, "producer": "producer-0", "why": "silent"}
    dead = {"e": "dead", "g": 4, "reason": "late"}
    events[-2:-2] = [tune, lost, dead, dict(lost, e="cancel"), {"e": "fenced"}]
    events[2:2] = [
        {"e": "prompts", "rows": 3, "seed": 1, "fresh": True},
        {"e": "choose", "g": 0, "row": 0},
        {"e": "outcome", "g": 0, "row": 0, "mixed": True},
    ]
    place = events.index(find(events, event))
    for key in {"t": 0, **events[place]}:
        for value in (None, "x", -99, 1e300, [], [None], {"a": None}, 1 << 70, 10**400):
            if key != "e":
                told([*events[:place], {**events[place], key: value}, *events[place + 1 :]])
        told([*events[:place], {k: v for k, v in events[place].items() if k != key}, *events[place + 1 :]])


def told(events: list[Event]) -> Audit:
    """The audit, printed in both forms."""
    found = audit(events)
    assert render(found) and format_json(found)
    return found


@pytest.mark.parametrize("key", ["length", "runs"])
def test_no_sample_of_impossible_size_is_in_a_mean(key: str) -> None:
    events = good_history(steps=2)
    find(events, "sample", g=1)[key] = {"length": 10**400, "runs": [[10**400, 5]]}[key]
    assert "log" in kinds(told(events))


def test_time_of_an_impossible_size() -> None:
    for t in (10**400, -(10**400)):
        assert "log" in kinds(told([dict(event, t=t if event["e"] == "claim" else 1.0) for event in good_history()]))


def test_rows_that_no_table_has() -> None:
    events = good_history(steps=2)
    wrong: list[Event] = [{"e": "choose", "g": 0, "row": -1}, {"e": "outcome", "g": 0, "row": -1, "mixed": True}]
    assert kinds(audit([*events[:2], wrong[0], *events[2:]])) == {"choice"}
    found = audit([*events[:2], *wrong, *events[2:]])
    assert kinds(found) == {"choice"} and len(found.violations) == 2


def test_log_is_read_line_by_line(tmp_path: Path) -> None:
    """What is held grows with groups, not with lines: the lines of this log would be ten times as much."""
    path = write_history(tmp_path / "history.jsonl", good_history(steps=20))
    lines = path.read_bytes().splitlines(keepends=True)
    filler = lines[-1][: lines[-1].index(b",")] + b',"e":"discard","g":1,"detail":"' + b"x" * 1000 + b'"}\n'
    path.write_bytes(b"".join([*lines[:-1], filler * 20_000, lines[-1]]))
    tracemalloc.start()
    found = audit_file(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.ok and most < path.stat().st_size / 10


def test_damaged_and_torn_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"e":"service"}\n\n[1]\nnull\n{"e":\n\xff\n{"e":"end"}\n{"e":"is')
    log = Log(path)
    assert [event["e"] for event in log] == ["service", "end"]
    assert (log.damaged, log.torn, log.events) == ([3, 4, 5, 6], True, 2)
    assert list(Log(tmp_path / "none")) == []
