"""The timeline of a run: the format that ui.perfetto.dev reads, and what it says of groups, weights and faults.

What Perfetto's own trace processor makes of it is asked in tests/trackers/test_perfetto_ui.py.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_run import START, good_history, issue, register, train, write_history, write_run

from asyncrl.errors import ConfigError
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.perfetto import step_parts, weights_flow, write_trace
from asyncrl.trace.perfetto_groups import group_flow
from asyncrl.trace.perfetto_writer import Drawing, Lanes, Out, note

ROOT = Path(__file__).parents[2]
Fields = dict[int, list[Any]]
Event = dict[str, Any]


def fields(data: bytes) -> Fields:
    """A protobuf message: the values of its fields, bytes where a text or another message stands."""
    found: Fields = defaultdict(list)
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place, value, shift = place + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        if key & 7 == 0:
            found[key >> 3].append(varint())
        else:
            size = 8 if key & 7 == 1 else varint()
            assert key & 7 in (1, 2) and place + size <= len(data)
            found[key >> 3].append(data[place : place + size])
            place += size
    return found


def held(data: bytes) -> tuple[str, Any]:
    """An annotation: its name and its value."""
    one = fields(data)
    name = one.pop(10)[0].decode()
    if 11 in one:
        return name, dict(held(entry) for entry in one[11])
    [(number, [value])] = one.items() or [(11, [{}])]
    signed = value - 2**64 if number == 4 and value >= 2**63 else value
    return name, {2: bool, 4: lambda _: signed, 5: lambda raw: struct.unpack("<d", raw)[0], 6: bytes.decode, 11: dict}[
        number
    ](value)


def read(path: Path) -> list[Event]:
    """Events in the order of their packets: kind, time (us), role, track, lane, name, flows, args, value."""
    with gzip.open(path) as file:
        packets = [fields(data) for data in fields(file.read())[1]]
    tracks: dict[int, tuple[str, str]] = {}
    events: list[Event] = []
    for packet in packets:
        assert packet.keys() in ({8, 10, 60}, {8, 10, 11}) and packet[10] == [1]
        if 60 in packet:
            about = fields(packet[60][0])
            [uuid], [name] = about[1], about[2]
            assert uuid not in tracks and uuid > 0 and (5 in about) == (12 in about) != (11 in about)
            tracks[uuid] = (tracks[about[5][0]][0], name.decode()) if 5 in about else (name.decode(), "")
            continue
        event = fields(packet[11][0])
        [kind], [uuid] = event[9], event[11]
        events.append(
            {
                "kind": {1: "begin", 2: "end", 3: "mark", 4: "count"}[kind],
                "at": packet[8][0] // 1000,
                "lane": uuid,
                "role": tracks[uuid][0],
                "track": tracks[uuid][1],
                "name": b"".join(event[23]).decode(),
                "flows": [int.from_bytes(flow, "little") for flow in event[47]],
                "args": dict(held(data) for data in event[4]),
                "value": struct.unpack("<d", event[44][0])[0] if 44 in event else None,
            }
        )
    return events


def check_format(events: Iterable[Event]) -> None:
    """That slices of a lane nest, in the order in which the trace processor takes them (by time, then as they stand),
    that curves have numbers, and that no flow stands at an end or a mark."""
    lanes: dict[int, list[int]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event["at"]):
        assert event["at"] >= 0 and event["track"]
        assert (event["value"] is not None) == (event["kind"] == "count")
        assert bool(event["name"]) == (event["kind"] in ("begin", "mark"))
        assert event["kind"] == "begin" or not event["flows"]
        if event["kind"] == "begin":
            lanes[event["lane"]].append(event["at"])
        elif event["kind"] == "end":
            assert lanes[event["lane"]], f"an end without a beginning in {event['role']} {event['track']}"
            assert lanes[event["lane"]].pop() < event["at"]
    assert not any(lanes.values()), "a slice without an end"


def slices(events: list[Event], track: str) -> list[Event]:
    return [event for event in events if event["kind"] == "begin" and event["track"] == track]


def marks(events: list[Event]) -> set[str]:
    return {event["name"] for event in events if event["kind"] == "mark"}


def stages(events: list[Event], flow: int) -> list[tuple[str, str]]:
    """What a flow passes, by time: role and name."""
    passed = sorted((event["at"], event["role"], event["name"]) for event in events if flow in event["flows"])
    return [(role, name) for _, role, name in passed]


def with_history(folder: Path, events: list[Event], *, steps: int) -> RunDir:
    run = write_run(folder, steps=max(steps, 1))
    write_history(run.history, events)
    lines = []
    for event in [json.loads(line) for line in run.history.read_bytes().splitlines()]:
        if event["e"] == "commit":
            parts = {"wait_s": 0.01, "train_s": 0.03, "publish_s": 0.005, "commit_s": 0.005}
            lines.append({"t": event["t"] + 0.001, "step": event["step"], "step_s": 0.05, "lag_mean": 1.0, **parts})
    (run.metrics / "learner.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    rounds = [{"t": line["t"] + 0.01, "version": line["step"], "round_s": 0.008} for line in lines]
    (run.metrics / "weightsync.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in rounds))
    (run.metrics / "buffer.jsonl").write_bytes(b"")
    return run


def test_a_whole_run(tmp_path: Path) -> None:
    run = with_history(tmp_path / "run", good_history(steps=6), steps=6)
    target = tmp_path / "t.pftrace.gz"
    write_trace(run, target)
    events = read(target)
    check_format(events)
    assert {event["role"] for event in events} == {
        "buffer",
        "producer-0",
        "reward-0",
        "learner",
        "weightsync",
        "producer-1",
        "launch",
    }
    assert stages(events, group_flow(3)) == [
        ("producer-0", "group 3"),
        ("reward-0", "score 3"),
        ("buffer", "unscored 3"),
        ("buffer", "ready 3"),
        ("learner", "train"),
    ]
    assert stages(events, weights_flow(1)) == [("learner", "publish"), ("weightsync", "version 1")]
    trained = {flow for event in events if event["name"] == "train" for flow in event["flows"]}
    assert trained == {group_flow(group) for group in range(12)}
    steps = [event["name"] for event in slices(events, "steps")]
    assert [name for name in steps if name.startswith("step ")] == [f"step {number}" for number in range(1, 7)]
    assert {"wait", "train", "publish", "commit"} <= set(steps)
    assert {"group 12 drop: late", "exit with code 137", "the log begins"} <= marks(events)
    assert {event["track"] for event in events if event["kind"] == "count"} == {"lag_mean", "busy_share"}


def test_the_tokens_of_a_producer_become_a_speed(tmp_path: Path) -> None:
    """A producer that starts again counts from 0: that is no speed."""
    run = with_history(tmp_path / "run", good_history(steps=1), steps=1)
    told = [(10, 100.0), (12, 500.0), (14, 0.0), (15, 50.0)]
    lines = [{"t": START + t, "role": "producer", "name": "producer-1", "generated_tokens": n} for t, n in told]
    (run.metrics / "roles.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    write_trace(run, tmp_path / "t.gz")
    speeds = [event for event in read(tmp_path / "t.gz") if event["track"] == "tokens_per_s"]
    assert [(event["role"], event["value"]) for event in speeds] == [("producer-1", 200.0), ("producer-1", 50.0)]


def test_faults_leave_the_format_whole(tmp_path: Path) -> None:
    """A lost lease and its second attempt, a dead group, a learner that restarts and trains a step again, a log that
    ends while groups are under way."""
    lost = [*issue(1, version=0)[:3], {"e": "lost", "g": 1, "token": 2, "producer": "producer-0", "why": "silent"}]
    again = [
        {"e": "lease", "g": 1, "token": 9, "attempt": 1, "producer": "producer-1", "w": 0, "deadline": 2, "bound": 2},
        *issue(1, version=0)[2:],
    ]
    history = [
        {"e": "service", "service_epoch": 1}, register(1, 0), *issue(0, version=0), *lost,
        *issue(2, version=0)[:2], {"e": "dead", "g": 2, "reason": "prompt", "detail": "too long"}, *again,
        *train(1, [0, 1]), register(2, 0), *train(1, [0, 1], epoch=2, replayed=True), *issue(3, version=1)[:4],
        *issue(4, version=1)[:2], "torn",
    ]  # fmt: skip
    run = with_history(tmp_path / "run", [event for event in history if event != "torn"], steps=1)
    with run.history.open("ab") as file:
        file.write(b'{"e":"sample","g":"x"}\n{"t":1,"e":"lease"}\n{"e": "rea')
    target = tmp_path / "t.pftrace.gz"
    write_trace(run, target)
    events = read(target)
    check_format(events)
    assert [role for role, _ in stages(events, group_flow(1))][:2] == ["producer-0", "producer-1"]
    assert [event["name"] for event in events if event["name"].startswith("group 1,")] == ["group 1, attempt 2"]
    assert {"group 1 lost: silent", "group 2 dead: prompt", "registered at step 0, epoch 2"} <= marks(events)
    left = [event["args"] for event in slices(events, "groups held") if event["name"] in ("group 3", "group 4")]
    assert len(left) == 2 and "the log ends here" in [args.get("ended") for args in left]


def test_evaluations_are_drawn(tmp_path: Path) -> None:
    """One that ends, and one that is under way when the log ends."""
    begun = [{"e": "eval_begin", "step": step, "round": 7 + step, "prompts": 64, "samples": 4} for step in (0, 20)]
    ended = {"e": "eval_end", "step": 0, "round": 7, "evaluation_scored": 64, "why": ""}
    run = with_history(tmp_path / "run", [register(1, 0), begun[0], ended, begun[1], *issue(0, version=0)], steps=1)
    write_trace(run, tmp_path / "t.gz")
    events = read(tmp_path / "t.gz")
    check_format(events)
    first, second = slices(events, "evaluations")
    assert first["args"] == {"prompts": 64, "samples": 4, "scored": 64, "why": ""}
    assert (second["name"], second["args"]["ended"]) == ("evaluation of step 20", "the log ends here")


def test_no_flow_goes_back_in_time(tmp_path: Path) -> None:
    """The learner's clock is behind: its steps seem to come before the leases of their groups."""
    run = with_history(tmp_path / "run", good_history(steps=3), steps=3)
    path = run.metrics / "learner.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(msgspec.json.encode({**line, "t": line["t"] - 1000.0}) + b"\n" for line in lines))
    write_trace(run, tmp_path / "t.gz")
    events = read(tmp_path / "t.gz")
    check_format(events)
    assert len([event for event in slices(events, "steps") if event["name"] == "train"]) == 3
    assert not [event for event in slices(events, "steps") if event["name"] == "train" and event["flows"]]


@pytest.mark.parametrize("value", [True, 0, -3, 2**62, 0.25, "text", "", {"a": 1, "b": {"c": "x"}}, {}])
def test_annotations_are_what_was_told(value: object) -> None:
    assert held(fields(note("name", value))[4][0]) == ("name", value)


def test_annotations_of_other_kinds_are_json() -> None:
    assert held(fields(note("name", [1, "x"]))[4][0]) == ("name", '[1,"x"]')
    assert held(fields(note("name", 2**70))[4][0]) == ("name", str(2**70))


def test_lanes_are_used_again_and_never_shared(tmp_path: Path) -> None:
    lanes = Lanes()
    first, second = lanes.take(0), lanes.take(5)
    assert first != second
    lanes.give(first, 10)
    assert lanes.take(9) not in (first, second) and lanes.take(10) == first
    with Out(tmp_path / "x.gz") as out:
        drawing = Drawing(out, zero=START)
        one = drawing.begin("producer-0", "groups", START - 5, "before the start")  # clocks of hosts differ
        assert drawing.end(one, START - 6) == 1
    events = read(tmp_path / "x.gz")
    check_format(events)
    assert [event["at"] for event in events] == [0, 1]


def test_parts_fill_their_step_in_order() -> None:
    parts = list(step_parts({"wait_s": 0.5, "proximal_s": 0.25, "train_s": 0.25, "checkpoint_s": 1.0}, 100, 2_000_100))
    assert [name for name, _, _ in parts] == ["checkpoint", "wait", "proximal", "train"]
    assert (parts[0][1], parts[-1][2]) == (100, 2_000_100)
    assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))
    assert list(step_parts({}, 0, 10)) == []


def test_the_format_is_really_checked() -> None:
    one = {"kind": "begin", "at": 0, "lane": 1, "track": "x", "role": "r", "name": "n", "flows": [], "value": None}
    end = {**one, "kind": "end", "name": ""}
    for wrong in ([one], [end], [one, end], [{**one, "value": 1.0}], [one, {**end, "at": 5, "flows": [1]}]):
        with pytest.raises(AssertionError):
            check_format(wrong)
    check_format([one, {**end, "at": 5}])


def test_the_command_and_a_folder_without_a_history(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "asyncrl", "trace", str(run.root), "--perfetto", str(tmp_path / "trace.pftrace")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert re.match(r".*trace\.pftrace\.gz: \d+ events", done.stdout)
    check_format(read(tmp_path / "trace.pftrace.gz"))
    run.history.unlink()
    with pytest.raises(ConfigError) as found:
        write_trace(run, tmp_path / "other.gz")
    assert found.value.code == "run.missing" and not list(tmp_path.glob("*other*"))
