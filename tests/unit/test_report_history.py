"""What the report reads from a history: lags by step, and the times from a fault to progress."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import good_history, issue, register, train, write_history

from asyncrl.report.events import Lags, Recovery, read_events, recoveries, story


def timed(events: list[dict[str, object]], *, every_s: float = 1.0) -> list[dict[str, object]]:
    return [{"t": number * every_s, **event} for number, event in enumerate(events)]


def test_lags_are_those_of_the_groups_of_a_step() -> None:
    lags = Lags()
    for group, version in ((0, 0), (1, 1), (2, 3), (3, 3)):
        for event in issue(group, version=version, bound=4):
            lags.take(event)
    lags.take({"e": "sample", "g": 3, "i": 0, "runs": [[1, 2], [3, 3]]})  # made anew, begun by older weights
    for event in train(4, [0, 1, 2, 3]):
        lags.take(event)
    found = lags.steps[4]
    assert (found.low, found.median, found.upper, found.high, found.bound) == (0, 2.0, 3, 3, 4)


def test_steps_that_a_restart_took_back_are_counted_anew() -> None:
    events = good_history(4)[:-4]
    again = [register(2, 2), *train(3, [0, 1], epoch=2)]
    found = story([*events, *again], [], [])
    assert [one.step for one in found.lags] == [1, 2, 3]
    assert found.lags[-1].high == 2 and found.lags[0].high == 0


def test_a_killed_producer_is_timed_to_its_next_sample_and_the_run_to_its_next_step() -> None:
    launched = [
        {"t": 0.0, "event": "start", "name": "producer-0", "role": "producer"},
        {"t": 10.0, "event": "exit", "name": "producer-0", "role": "producer", "code": 137},
        {"t": 10.0, "event": "restart", "name": "producer-0", "role": "producer", "wait_s": 0.5},
        {"t": 10.6, "event": "start", "name": "producer-0", "role": "producer"},
        {"t": 90.0, "event": "stop", "code": 0},
        {"t": 91.0, "event": "exit", "name": "producer-0", "role": "producer", "code": 143},
    ]
    events = [
        {"t": 1.0, "e": "commit", "step": 1, "groups": []}, {"t": 9.0, "e": "commit", "step": 2, "groups": []},
        {"t": 11.0, "e": "sample", "g": 1, "producer": "producer-1", "runs": [[0, 1]]},
        {"t": 12.0, "e": "commit", "step": 2, "groups": []},  # once more
        {"t": 13.5, "e": "commit", "step": 3, "groups": []},
        {"t": 15.0, "e": "sample", "g": 1, "producer": "producer-0", "runs": [[0, 1]]},
    ]  # fmt: skip
    found = story(events, launched, []).recoveries
    assert len(found) == 1, "an exit while the run is ended is no fault"
    one = found[0]
    assert (one.reached, one.start_s, one.work_s, one.progress_s) == (2, pytest.approx(0.6), 5.0, 3.5)


@pytest.mark.parametrize(
    ("role", "event", "work_s"),
    [
        ("reward", {"e": "score", "worker": "x"}, 2.0),
        ("learner", {"e": "commit", "step": 7, "groups": []}, 2.0),
        ("buffer", {"e": "service"}, 2.0),
        ("producer", {"e": "score", "worker": "x"}, None),
        ("weightsync", {"e": "commit", "step": 7, "groups": []}, 3.0),
    ],
)
def test_each_role_works_again_in_its_own_way(role: str, event: dict[str, object], work_s: float | None) -> None:
    launched = [{"t": 5.0, "event": "exit", "name": "x", "role": role, "code": 1}]
    found = story([{"t": 7.0, **event}], launched, [{"t": 4.0}, {"t": 8.0}]).recoveries[0]
    assert found.work_s == work_s


def test_what_never_came_back_has_no_time() -> None:
    launched = [
        {"t": 5.0, "event": "exit", "name": "x", "role": "producer", "code": 1},
        {"t": 5.0, "event": "given up", "name": "x", "code": 1},
    ]
    assert recoveries(launched) == [Recovery(5.0, "x", "producer", 1, given_up=True)]
    assert story([], launched, []).recoveries[0].progress_s is None


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = write_history(tmp_path / "history.jsonl", good_history(2))
    with path.open("ab") as file:
        file.write(b'{"e": "commit", "st\n[1]\n\xff\xfe\n')
    assert len(list(read_events(path))) == len(good_history(2))
    assert list(read_events(tmp_path / "none.jsonl")) == []
