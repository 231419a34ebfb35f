"""The audit: a good history passes, each kind of damage is found and named."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from synthetic_run import Event, digest_of, good_history, issue, register, train, write_history

from asyncrl.audit.prove import Audit, Expected, audit, audit_file, audit_run, render


def kinds(found: Audit) -> set[str]:
    return {violation.partition(":")[0] for violation in found.violations}


def find(events: list[Event], kind: str, **wanted: object) -> Event:
    return next(event for event in events if event["e"] == kind and all(event[k] == v for k, v in wanted.items()))


def test_good_history() -> None:
    found = audit(good_history(steps=5, batch=3))
    assert found.ok and found.violations == [] and found.done
    assert (found.issued, found.trained, found.dropped, found.in_flight) == (16, 15, {"late": 1}, 0)
    assert (found.steps, found.batch_groups, found.lost, found.doubled) == (5, 3, 0, 0)
    assert found.lag_max == 1 and found.bound_max == 2 and found.lag_counts == {0: 3, 1: 12}
    assert found.spans == found.spans_matched == 30


def test_the_history_is_not_changed() -> None:
    events = good_history()
    before = copy.deepcopy(events)
    audit(events)
    assert events == before


def test_lost_group() -> None:
    events = [event for event in good_history() if event["e"] != "drop"]
    found = audit(events)
    assert not found.ok and found.lost == 1 and kinds(found) == {"lost"}


def test_unfinished_groups_of_a_run_that_goes_on_are_in_flight() -> None:
    events = [event for event in good_history() if event["e"] not in ("drop", "end")]
    found = audit(events)
    assert found.ok and found.in_flight == 1 and not found.ended
    stopped = audit([*events, {"e": "end", "done": False, "reason": "SIGTERM"}])
    assert stopped.ok and stopped.in_flight == 1 and stopped.ended and not stopped.done


def test_group_in_two_steps() -> None:
    events = good_history()
    for event in events:
        if event.get("step") == 3 and event["e"] in ("claim", "commit"):
            event["groups"] = [0, 5]  # 0 was trained in step 1; 4 is left without an ending
    found = audit(events)
    assert found.doubled == 1 and found.lost == 1 and {"doubled", "lost"} <= kinds(found)


def test_group_trained_and_dropped() -> None:
    events = good_history()
    events.insert(-1, {"e": "drop", "g": 0, "reason": "late"})
    assert audit(events).doubled == 1


def test_step_committed_twice_with_other_groups() -> None:
    events = good_history()
    events = [*events[:-1], *issue(90, version=3), *issue(91, version=3), *train(4, [90, 91]), events[-1]]
    assert "doubled" in kinds(audit(events))


def test_over_the_bound() -> None:
    events = good_history()
    find(events, "sample", g=6)["runs"] = [[2, 3], [0, 2]]  # step 4 starts from version 3: lag 3
    find(events, "sample", g=6)["digests"] = {"2": digest_of(2), "0": digest_of(0)}
    found = audit(events)
    assert kinds(found) == {"lag"} and found.over_bound == 1 and found.lag_max == 3
    allowed = audit(events, allow_over_bound=True)
    assert allowed.ok and allowed.over_bound == 1 and len(allowed.notes) == 1


def test_lag_exactly_at_the_bound_is_fine() -> None:
    events = good_history()
    for event in events:
        if event["e"] == "sample" and event["g"] == 6:
            event["runs"], event["digests"] = [[1, 5]], {"1": digest_of(1)}
    found = audit(events)
    assert found.ok and found.lag_max == 2


def test_tokens_newer_than_the_weights_of_the_step() -> None:
    events = good_history()
    find(events, "sample", g=2)["runs"] = [[2, 5]]
    find(events, "sample", g=2)["digests"] = {"2": digest_of(2)}
    find(events, "sample", g=2, i=1)["runs"] = [[2, 5]]
    find(events, "sample", g=2, i=1)["digests"] = {"2": digest_of(2)}
    assert kinds(audit(events)) == {"lag"}


@pytest.mark.parametrize("digests", [{"1": "f" * 32}, {"1": ""}, {}])
def test_digest_of_other_weights(digests: dict[str, str]) -> None:
    events = good_history()
    find(events, "sample", g=4)["digests"] = digests
    found = audit(events)
    assert kinds(found) == {"digest"} and found.spans_matched == found.spans - 1


def test_start_weights_must_agree_with_each_other() -> None:
    events = good_history()
    find(events, "sample", g=1)["digests"] = {"0": "f" * 32}
    assert kinds(audit(events)) == {"digest"}


def test_step_left_out_and_short_step() -> None:
    gap = [event for event in good_history() if not (event["e"] == "commit" and event["step"] == 2)]
    assert "steps" in kinds(audit(gap))
    events = good_history()
    find(events, "commit", step=2)["groups"] = [2]
    assert "steps" in kinds(audit(events))


@pytest.mark.parametrize(("key", "seen"), [("buffer.pipeline_depth", True), ("buffer.batch_groups", False)])
def test_short_step_of_a_run_that_was_tuned(key: str, seen: bool) -> None:
    """Changes of the depth, such as those of `pipeline_depth = "auto"`, say nothing about the size of a batch."""
    events = good_history()
    for name in ("claim", "commit"):
        find(events, name, step=2)["groups"] = [2]
    events[-2:-2] = [
        {"e": "drop", "g": 3, "reason": "late"},
        {"e": "tune", "n": 1, "author": "auto", "key": key, "old": 1, "new": 2},
    ]
    assert (audit(events).violations == ["steps: step 2 trained 1 groups of 2"]) == seen


def resumed(sizes: dict[int, int], *, on_late: tuple[str, str] = ("wait", "wait")) -> list[Event]:
    """Two services, each for two steps of as many groups as `sizes` has for the step; group 0 has lag 3 in step 4."""
    events: list[Event] = []
    number = 1
    for life in (1, 2):
        events.append({"e": "service", "service_epoch": life, "batch_groups": 2 * life, "on_late": on_late[life - 1]})
        events.append(register(life, 2 * life - 2))
        for step in (2 * life - 1, 2 * life):
            groups = list(range(number, number + sizes[step]))
            number += sizes[step]
            for group in groups:
                events += issue(group, version=step - 1)
            events += train(step, groups, epoch=life)
    return events


def test_steps_are_judged_by_the_batch_of_their_own_service() -> None:
    assert audit(resumed({1: 2, 2: 2, 3: 4, 4: 4})).ok
    assert audit(resumed({1: 2, 2: 2, 3: 3, 4: 3})).violations == [
        f"steps: step {n} trained 3 groups of 4" for n in (3, 4)
    ]
    again = resumed({1: 2, 2: 2, 3: 4, 4: 4})
    place = again.index(find(again, "commit", step=2))
    service, learner = again[place + 1], register(2, 1)
    claim = {**again[place - 1], "replayed": True, "epoch": 2}  # the batch that the service before had recorded
    events = [*again[:place], service, learner, claim, {**again[place], "epoch": 2}, *again[place + 3 :]]
    assert audit(events).ok, audit(events).violations


def test_fork_may_have_batches_that_its_parent_was_tuned_to() -> None:
    whole = resumed({1: 2, 2: 2, 3: 8, 4: 8})
    events = whole[whole.index(find(whole, "service", service_epoch=2)) :]
    assert kinds(audit(events, expected=Expected(fork_step=2))) == {"steps"}
    assert audit(events, expected=Expected(fork_of="parent", fork_step=2)).ok


@pytest.mark.parametrize(("on_late", "ok"), [("train", True), ("wait", False), ("", False)])
def test_training_over_the_bound_is_judged_by_the_setting_of_its_own_service(on_late: str, ok: bool) -> None:
    events = good_history(steps=5)
    find(events, "service").update({"on_late": on_late, "batch_groups": 2})
    find(events, "sample", g=6).update({"runs": [[0, 5]], "digests": {"0": digest_of(0)}})  # lag 3 in step 4
    place = events.index(find(events, "issue", g=8))
    later: list[Event] = [{"e": "service", "service_epoch": 2, "on_late": "wait", "batch_groups": 2}]
    assert audit([*events[:place], *later, *events[place:]]).ok == ok
    if on_late == "wait":
        assert not audit(events, allow_over_bound=True).ok, "the configuration is of a later service"


def test_store_that_was_lost_counts_changes_again() -> None:
    tune: Event = {"e": "tune", "n": 3, "author": "me@here", "key": "buffer.late_timeout_s", "old": 1, "new": 2}
    head = [event for event in good_history(steps=3) if event["e"] not in ("retire", "end", "drop")]
    service: Event = {"e": "service", "service_epoch": 2}
    found = audit([*head, tune, service, register(2, 3), {**tune, "n": 1}, {**tune, "n": 3}])
    assert found.ok and [change.n for change in found.tuned] == [3, 1, 3], found.violations
    assert kinds(audit([*head, service, register(2, 3), tune, {**tune, "n": 1}])) == {"tune"}


def test_quarantined_group_leaves_its_step() -> None:
    events = good_history()
    place = events.index(find(events, "commit", step=2))
    events[place]["groups"] = [2]
    events.insert(place, {"e": "dead", "g": 3, "reason": "sample.invalid", "detail": "nan"})
    found = audit(events)
    assert found.ok and found.dead == {"sample.invalid": 1} and found.trained == 7


def test_quarantined_group_that_an_earlier_step_had_trained() -> None:
    events = good_history()
    find(events, "issue", g=1)["uses"] = 2
    claim, commit = find(events, "claim", step=2), find(events, "commit", step=2)
    claim["groups"], commit["groups"] = [2, 1], [2]
    events.insert(events.index(commit), {"e": "drop", "g": 1, "reason": "poison:loss"})
    events.insert(events.index(commit), {**claim, "groups": [2], "replayed": True})
    assert "steps" not in kinds(audit(events)) and "claim" not in kinds(audit(events))
    events[events.index(commit) - 1]["groups"] = [3]
    assert "claim" in kinds(audit(events))


def test_group_that_was_never_issued() -> None:
    events = good_history()
    find(events, "commit", step=2)["groups"] = [2, 99]
    assert "unknown" in kinds(audit(events))


def test_replay_after_a_restart_is_no_double() -> None:
    events = good_history(steps=3)
    head = [event for event in events if event["e"] not in ("retire", "end", "drop")]
    again = [register(2, 1), *train(2, [2, 3], epoch=2, replayed=True), *train(3, [4, 5], epoch=2, replayed=True)]
    found = audit([*head, *again, *events[-3:]])
    assert found.ok and found.doubled == 0 and found.trained == 6 and found.replayed_steps == 2
    assert found.learner_starts == 2


def test_restart_takes_back_what_was_not_in_the_checkpoint() -> None:
    head = [event for event in good_history(steps=3) if event["e"] not in ("retire", "end", "drop")]
    found = audit([*head, register(2, 1)])
    assert found.ok and found.trained == 2 and found.in_flight == 5 and found.steps == 1
    lost = audit(
        [
            *head,
            register(2, 1),
            *issue(50, version=1),
            *issue(51, version=1),
            *train(2, [50, 51], epoch=2),
            *train(3, [4, 5], epoch=2),
            {"e": "drop", "g": 6, "reason": "late"},
            {"e": "end", "done": True, "reason": ""},
        ]
    )
    assert not lost.ok and lost.lost == 2  # groups 2 and 3: trained once, taken back, never seen again


def test_groups_rolled_back_by_an_older_checkpoint_are_accounted_for() -> None:
    events = good_history(steps=3)
    head = [event for event in events if event["e"] not in ("end", "drop")]
    again: list[Event] = [{"e": "drop", "g": group, "reason": "rolled_back"} for group in (2, 3)]
    again += [register(2, 1), *issue(7, version=0), *issue(8, version=0)]
    again += [*train(2, [7, 8], epoch=2), *train(3, [4, 5], epoch=2)]
    found = audit([*head, *again, *events[-3:]])
    assert found.ok and found.dropped == {"rolled_back": 2, "late": 1} and found.trained == 6


def test_store_that_was_lost_issues_again() -> None:
    head = [event for event in good_history(steps=3) if event["e"] not in ("retire", "end", "drop")]
    again = [{"e": "service", "service_epoch": 2}, register(2, 1)]
    for group in (2, 3, 4, 5):
        again += issue(group, version=1)
    again += [
        *train(2, [2, 3], epoch=2),
        *train(3, [4, 5], epoch=2),
        {"e": "retire", "step": 3},
        {"e": "end", "done": True, "reason": ""},
    ]
    found = audit([*head, *again])
    assert found.ok and found.trained == 6 and found.superseded == 1  # group 6 was forgotten with the store


def test_torn_and_damaged_lines(tmp_path: Path) -> None:
    path = write_history(tmp_path / "history.jsonl", good_history())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":1,"e":"iss')
    found = audit_file(path)
    assert found.ok and found.torn and "cut" in render(found)
    path.write_bytes(whole[:-1])  # only the newline is missing
    assert audit_file(path).ok and not audit_file(path).torn
    path.write_bytes(whole.replace(b'"e":"retire"', b'"e":', 1))
    assert "log" in kinds(audit_file(path))
    path.write_bytes(b"")
    assert not audit_file(path).ok


def test_event_with_a_missing_field_is_a_violation() -> None:
    events = good_history()
    del find(events, "commit", step=2)["groups"]
    assert "log" in kinds(audit(events))


def test_many_violations_are_cut_short() -> None:
    events = [event for event in good_history(steps=60) if event["e"] != "claim"]
    assert len(audit(events).violations) < 100


# ---------------------------------------------------------------- tampering: every trace of it is named


UNSEEN = {"end"}  # without its end a run counts as going on


def test_every_line_that_is_deleted_is_named() -> None:
    events = good_history()
    for place, event in enumerate(events):
        found = audit([*events[:place], *events[place + 1 :]])
        dropped = event["e"] == "ready" and event["g"] == 8  # may well be dropped before it is ready
        assert found.ok == (event["e"] in UNSEEN or dropped), (event, found.violations)


def test_every_line_that_is_doubled_is_named() -> None:
    """A line that stands there twice is no proof of a second time, but of a log that is not whole."""
    events = good_history()
    harmless = {"retire", "end", "claim", "commit"}  # the same said again
    for place, event in enumerate(events):
        found = audit([*events[: place + 1], event, *events[place + 1 :]])
        assert found.ok == (event["e"] in harmless), (event, found.violations)


def test_group_twice_in_a_commit() -> None:
    events = good_history()
    find(events, "commit", step=2)["groups"] = [2, 3, 3]
    assert "doubled" in kinds(audit(events))


def test_group_left_out_of_a_commit_and_claimed() -> None:
    events = good_history()
    find(events, "commit", step=2)["groups"] = [2]
    assert any(text == "steps: step 2 did not train group 3 of its batch" for text in audit(events).violations)


def test_sample_under_an_old_token_and_twice() -> None:
    events = good_history()
    find(events, "sample", g=4, i=1)["token"] = 99
    assert kinds(audit(events)) == {"lease"}
    events = good_history()
    place = events.index(find(events, "sample", g=4, i=1))
    assert kinds(audit([*events[:place], events[place], *events[place:]])) == {"sample"}


def test_lease_while_another_holds_the_group() -> None:
    events = good_history()
    place = events.index(find(events, "sample", g=4, i=0))
    again = dict(find(events, "lease", g=4), token=77)
    assert kinds(audit([*events[:place], again, *events[place:]])) == {"lease"}
    lost: Event = {"e": "lost", "g": 4, "token": 5, "producer": "producer-0", "why": "silent"}
    assert kinds(audit([*events[:place], lost, again, *events[place:]])) == {"lease"}  # the old one is over
    rest = [dict(event, token=77) if event["e"] == "sample" and event["g"] == 4 else event for event in events[place:]]
    fine = [*events[:place], lost, again, *rest]
    assert audit(fine).ok and audit(fine).lost_leases == 1


def test_group_keeps_its_bound() -> None:
    events = good_history()
    place = events.index(find(events, "sample", g=4, i=1))
    lost: Event = {"e": "lost", "g": 4, "token": 5, "producer": "producer-0", "why": "silent"}
    again = dict(find(events, "lease", g=4), token=77, bound=5)
    rest = [dict(event, token=77) if event["e"] == "sample" and event["g"] == 4 else event for event in events[place:]]
    assert kinds(audit([*events[:place], lost, again, *rest])) == {"bound"}
    late = dict(lost, why="late")  # all of its samples are given up: it begins anew
    first = dict(find(events, "sample", g=4, i=0), token=77)
    score = find(events, "score", g=4, i=0)
    assert audit([*events[:place], late, again, first, score, *rest]).ok


def test_batch_handed_out_again_with_other_groups() -> None:
    events = good_history()
    place = events.index(find(events, "claim", step=3)) + 1
    again = dict(find(events, "claim", step=3), groups=[5, 4])
    assert kinds(audit([*events[:place], again, *events[place:]])) == {"claim"}
    same = dict(find(events, "claim", step=3))
    assert audit([*events[:place], same, *events[place:]]).ok


def test_older_learner_writes_after_a_newer_one() -> None:
    events = good_history()
    place = events.index(find(events, "claim", step=3))
    found = audit([*events[:place], register(2, 2), *events[place:]])  # the commits that follow are of epoch 1
    assert kinds(found) == {"epoch"} and found.fenced == 4
    assert "epoch" in kinds(audit([*events[:place], register(1, 2), *events[place:]]))


def test_commits_that_a_checkpoint_tells_are_believed() -> None:
    """The learner was killed after its checkpoint of step 3, before the buffer heard of the commit."""
    events = good_history(steps=4)
    place = events.index(find(events, "commit", step=3))
    told = dict(events[place], digest="")
    rest = [dict(event, epoch=3) if event.get("epoch") == 1 else event for event in events[place + 1 :]]
    assert audit([*events[:place], register(2, 2), told, register(3, 3), *rest]).ok
    assert "epoch" in kinds(audit([*events[:place], register(2, 2), told, *rest]))
    agreed = {"e": "discard", "g": events[place]["groups"][0], "i": 0, "why": "abandoned", "tokens": 1}
    assert audit([*events[:place], register(2, 2), told, agreed, register(3, 3), *rest]).ok


def test_service_and_token_epochs() -> None:
    events = good_history()
    place = events.index(find(events, "claim", step=3))
    assert kinds(audit([*events[:place], {"e": "service", "service_epoch": 1}, *events[place:]])) == {"epoch"}
    assert audit([*events[:place], {"e": "service", "service_epoch": 2}, *events[place:]]).ok
    token = (7 << 24) + 1
    for event in events:
        if event["e"] in ("lease", "sample") and event["g"] == 4:
            event["token"] = token
    assert kinds(audit(events)) == {"epoch"}


def test_versions_rise_by_one() -> None:
    events = good_history()
    find(events, "commit", step=3)["version"] = 7
    assert "version" in kinds(audit(events))
    events = good_history()
    one, two = (events.index(find(events, "commit", step=step)) for step in (2, 3))
    events[one], events[two] = events[two], events[one]
    assert "version" in kinds(audit(events))


def test_log_without_its_beginning_is_named() -> None:
    assert {"log"} <= kinds(audit(good_history()[1:]))
    assert "steps" in kinds(audit([event for event in good_history() if event.get("step") != 1]))


# ---------------------------------------------------------------- reuse, tuning, forks


def test_groups_may_be_trained_as_often_as_they_may_be_used() -> None:
    events = good_history(steps=2)
    for event in events:
        if event["e"] == "issue":
            event["uses"] = 2
        if event.get("step") == 2 and event["e"] in ("claim", "commit"):
            event["groups"] = [2, 1]  # 1 was trained in step 1
    events.insert(-2, {"e": "drop", "g": 3, "reason": "late"})
    found = audit(events)
    assert found.ok and (found.trained, found.trainings) == (3, 4)
    for event in events:
        event.pop("uses", None)
    assert kinds(audit(events)) == {"doubled"}


def test_tuning_is_listed_with_the_lags_before_and_after() -> None:
    """max_staleness 1 -> 4 -> 0: three parts of the run with lags of their own, each under the bound of its leases."""
    parts = [(1, [(1, 0), (2, 0), (3, 1)]), (4, [(4, 0), (5, 1), (6, 2)]), (0, [(7, 6), (8, 7), (9, 8)])]
    events: list[Event] = [{"e": "service", "service_epoch": 1}, register(1, 0)]
    old = 1
    for number, (bound, steps) in enumerate(parts):
        if number:
            events.append(
                {
                    "e": "tune",
                    "n": number,
                    "author": "me@here",
                    "key": "buffer.max_staleness",
                    "old": old,
                    "new": bound,
                }
            )
        for step, version in steps:
            events += [*issue(step, version=version, bound=bound), *train(step, [step])]
        old = bound
    found = audit(events)
    assert found.ok and found.lag_before_tuning == {0: 1, 1: 2}
    assert [(change.n, change.step, change.steps) for change in found.tuned] == [(1, 3, 3), (2, 6, 3)]
    assert [change.lag_counts for change in found.tuned] == [{3: 3}, {0: 3}]
    assert found.tuned[0].changed == {"buffer.max_staleness": (1, 4)}
    text = render(found)
    assert "before tuning: groups by lag: 0: 1, 1: 2" in text and "tune 1 after step 3" in text
    assert "by me@here: buffer.max_staleness 4 -> 0; 3 steps since, groups by lag: 0: 3" in text
    find(events, "lease", g=6).update(bound=2, deadline=4)  # lag 3: its own bound counts, not the one in force
    assert kinds(audit(events)) == {"lag"}


def test_one_change_of_several_settings_is_one_entry() -> None:
    change: Event = {
        "t": 1.0,
        "e": "tune",
        "n": 3,
        "author": "me@here",
        "key": "buffer.on_late",
        "old": "wait",
        "new": "drop",
    }
    events = [*good_history(), change, dict(change, key="buffer.batch_groups", old=4, new=8), dict(change, n=2)]
    found = audit(events)
    assert [change.n for change in found.tuned] == [3, 2] and kinds(found) == {"tune"}
    assert found.tuned[0].changed == {"buffer.on_late": ("wait", "drop"), "buffer.batch_groups": (4, 8)}


def test_fork_begins_after_its_parents_step(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    write_history(parent / "history.jsonl", good_history(steps=3))
    events: list[Event] = [{"e": "service", "service_epoch": 2}, register(2, 2)]
    events += [*issue(4, version=2), *issue(5, version=2), *train(3, [4, 5], epoch=2)]
    write_history(child / "history.jsonl", events)
    assert kinds(audit_run(child)) == {"steps"}  # where are steps 1 and 2?
    (child / "fork.json").write_text('{"parent": "../parent", "step": 2}')
    found = audit_run(child)
    assert found.ok and found.first_step == 3 and "fork of ../parent" in render(found)
    for event in events:
        if event["e"] == "sample":
            event["digests"] = {"2": "f" * 32}  # not what the parent committed as version 2
    write_history(child / "history.jsonl", events)
    assert kinds(audit_run(child)) == {"digest"}
    events = [*events[:2], *issue(2, version=2), *issue(5, version=2), *train(3, [2, 5], epoch=2)]
    write_history(child / "history.jsonl", events)
    assert kinds(audit_run(child)) == {"doubled"}  # group 2 was trained by the parent's step 2


def test_payloads_that_an_older_store_misses_after_their_step() -> None:
    """A store that went back says that payloads are lost which a surviving step had trained: that step stands."""
    events = good_history()
    at = events.index(find(events, "commit", step=2))
    group = events[at]["groups"][0]
    lost = {"e": "lost", "g": group, "token": 0, "producer": "", "why": "payload_lost"}
    assert audit([*events[: at + 1], lost, *events[at + 1 :]]).ok
    # Taken back by a learner that starts before it, it must be made again: the same commit is not believed then.
    again = register(2, 1)
    found = audit(
        [*events[: at + 1], lost, again, {**find(events, "claim", step=2), "epoch": 2}, {**events[at], "epoch": 2}]
    )
    assert "sample" in kinds(found)
