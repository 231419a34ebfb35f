"""The bias alarm: a run that loses its long answers is told so, one that loses any answers alike is not."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from synthetic_run import Event, issue, register, train, write_history, write_run

from asyncrl.audit.prove import audit, render
from asyncrl.metrics.length_bias import ENOUGH, Lengths, LengthWatch, Story, compare, ks_distance
from asyncrl.report.data import load_run
from asyncrl.report.learning import lengths as section


def stories(drop: float, *, seed: int = 0, groups: int = 200) -> list[Story]:
    """Groups of 4 samples, most short, a tail of long ones; above `drop` tokens a group is dropped."""
    rng = random.Random(seed)
    made = []
    for number in range(groups):
        mean = 200 if rng.random() < 0.2 else 40
        lengths = tuple(max(1, int(rng.gauss(mean, 10))) for _ in range(4))
        fate = "dropped" if sum(lengths) / 4 > drop else "trained"
        made.append(Story(lengths, fate, (number // 10 + 1,) if fate == "trained" else ()))
    return made


def test_distance_of_two_samples() -> None:
    assert ks_distance([1, 2, 3], [1, 2, 3]) == 0.0
    assert ks_distance([1, 2], [3, 4]) == 1.0
    assert ks_distance([], [1]) == 0.0


def test_long_answers_that_are_dropped_ring_the_alarm() -> None:
    found = compare(stories(drop=100))
    assert "shorter than all that ended" in found.alarm and "raise buffer.late_timeout_s" in found.alarm
    assert found.shift < -0.3 and found.ks > found.ks_limit and found.dropped_mean > 150
    last = found.samples[-1]
    assert last.dropped == last.made > 0 and last.trained == 0  # every bucket is counted
    assert sum(bucket.made for bucket in found.samples) == 800
    assert sum(bucket.made for bucket in found.groups) == 200


def test_short_answers_that_are_dropped_are_not_called_late() -> None:
    turned = {"trained": "dropped", "dropped": "trained"}
    found = compare(
        [
            msgspec.structs.replace(one, fate=turned[one.fate], steps=(1,) * (one.fate == "dropped"))
            for one in stories(100)
        ]
    )
    assert "longer than all that ended" in found.alarm and "buffer.filters" in found.alarm
    assert "late_timeout_s" not in found.alarm


@pytest.mark.parametrize("seed", range(10))
def test_drops_of_any_length_do_not(seed: int) -> None:
    rng = random.Random(seed)
    some = [
        msgspec.structs.replace(story, fate="dropped", steps=()) if rng.random() < 0.2 else story
        for story in stories(drop=1e9, seed=seed)
    ]
    assert compare(some).alarm == "" and compare(stories(drop=1e9, seed=seed)).alarm == ""


def test_a_few_samples_say_nothing() -> None:
    few = stories(drop=100, groups=ENOUGH // 4 - 1)
    assert any(story.fate == "dropped" for story in few) and compare(few).alarm == ""
    assert compare([]) == Lengths()


def test_samples_without_a_known_length_are_told() -> None:
    late = [Story((10,), "dropped", unfinished=3) for _ in range(40)]
    found = compare([*stories(drop=100), *late])
    assert found.unfinished == 120 and "120 more were never finished" in found.alarm


def test_what_is_under_way_is_no_bias() -> None:
    """The long ones of a run that goes on are not lost: they come later."""
    waiting = [
        msgspec.structs.replace(story, fate="in_flight") if story.fate == "dropped" else story
        for story in stories(drop=100)
    ]
    assert compare(waiting).alarm == ""


def test_the_first_steps_hold_what_finishes_first() -> None:
    first = [Story((20,) * 8, "trained", (1,), version=0) for _ in range(8)]
    later = [Story((80,) * 8, "trained", (2,), version=0) for _ in range(8)]
    grown = [Story((300,) * 8, "trained", (3,), version=1) for _ in range(8)]  # the policy changed: no early effect
    found = compare([*first, *later, *grown])
    assert (found.early_mean, found.late_mean) == (20.0, 80.0) and "what finishes first" in found.early
    assert compare([*first, *grown]).early == ""


def biased(long: int) -> list[Event]:
    """Steps of two groups; every third group is long and dropped as late."""
    events: list[Event] = [{"e": "service", "service_epoch": 1}, register(1, 0)]
    for step in range(1, 31):
        numbers = [3 * step, 3 * step + 1, 3 * step + 2]
        for number in numbers:
            made = issue(number, version=step - 1)
            for event in made:
                if event["e"] == "sample":
                    event["length"] = long if number == numbers[2] else 20
                    event["runs"] = [[step - 1, event["length"]]]
            events += made
        events += [*train(step, numbers[:2]), {"e": "drop", "g": numbers[2], "reason": "late"}]
    return [*events, {"e": "retire", "step": 30}, {"e": "end", "done": True, "reason": ""}]


def test_the_audit_and_the_report_tell_it(tmp_path: Path) -> None:
    found = audit(biased(200))
    assert found.ok and "ALARM: trained samples are 75% shorter" in render(found)  # an alarm is no violation
    assert "no bias" in render(audit(biased(21)))
    run = write_run(tmp_path / "run", steps=30)
    write_history(run.history, biased(200))
    page = section(load_run(run))
    assert "length bias</b> trained samples are 75% shorter" in page and "<td" in page and "100%" in page
    write_history(run.history, biased(21))
    assert "length bias</b>" not in section(load_run(run))


def made_again(long: int) -> list[Event]:
    """The long groups are late: their samples are discarded and their prompts issued again (`on_late = "drop"`)."""
    events: list[Event] = []
    for event in biased(long):
        if event["e"] != "drop":
            events.append(event)
            continue
        token = event["g"] + 1
        events.append({"e": "lost", "g": event["g"], "token": 0, "producer": "", "why": "late"})
        for again in issue(event["g"], version=event["g"] // 3)[1:]:
            renamed = {"token": token + 1000} if "token" in again else {}
            short = {"length": 20, "runs": [[event["g"] // 3, 20]]} if again["e"] == "sample" else {}
            events.append({**again, **renamed, **short})
        events.append(event)  # at last
    return events


def test_samples_that_are_discarded_for_their_lateness_were_dropped() -> None:
    watch = LengthWatch()
    lost: Event = {"e": "lost", "g": 0, "token": 1, "producer": "p", "why": "late"}
    watch.take([{"e": "sample", "g": 0, "length": 200}, lost, {"e": "sample", "g": 0, "length": 20}])
    watch.take([{**lost, "why": "silent"}, {"e": "commit", "groups": [0]}])  # a silent producer's samples are kept
    values = watch.values()
    assert values["trained_length_mean"] == 20.0 and values["dropped_length_mean"] == 200.0
    found = audit(made_again(200))
    assert found.ok and found.lengths.dropped_mean == pytest.approx(110.0), found.violations
    assert "trained samples are" in found.lengths.alarm


def test_live_means_follow_the_events() -> None:
    watch = LengthWatch()
    assert watch.values() == {}
    watch.take(biased(200))
    values = watch.values()
    assert values["issued_length_mean"] == pytest.approx(80.0) and values["trained_length_mean"] == 20.0
    assert values["dropped_length_mean"] == 200.0 and values["length_bias"] == pytest.approx(-0.75)
    assert watch._live == {}  # nothing is kept of what has ended
