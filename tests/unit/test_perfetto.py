"""The timeline of a run: the format that ui.perfetto.dev reads, and what it says of groups, weights and faults."""

from __future__ import annotations

import gzip
import itertools
import json
import re
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
from asyncrl.perfetto import parts_of, write_trace
from asyncrl.perfetto_format import Drawing, Lanes, Out
from asyncrl.rundir import RunDir

ROOT = Path(__file__).parents[2]
Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    with gzip.open(path) as file:
        found: list[Event] = json.load(file)["traceEvents"]
    return found


def check_format(events: Iterable[Event]) -> None:
    """What the format asks of every event, that slices of a lane nest, and that flows lie in slices."""
    events = list(events)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[str, list[Event]] = defaultdict(list)
    introduced: set[int] = set()
    for event in events:
        assert event["ph"] in "MXstfiC" and event["name"] and isinstance(event["ts"], int) and event["ts"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["tid"] > 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            introduced |= {event["pid"]} if event["name"] == "process_name" else set()
        assert event["pid"] in introduced
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] > 0 and isinstance(event["args"], dict)
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
            assert (event["ph"] == "f") == (event.get("bp") == "e")
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in "tpg"
    for slices in lanes.values():
        check_nested(slices)
    for places in flows.values():
        assert "".join(place["ph"] for place in places) == f"s{'t' * (len(places) - 2)}f"
        times = [place["ts"] for place in places]
        assert times == sorted(times)
        for place in places:
            assert any(a <= place["ts"] <= b for a, b in lanes[place["pid"], place["tid"]]), place


def check_nested(slices: list[tuple[int, int]]) -> None:
    open_until: list[int] = []
    for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{start} .. {end} crosses the end of another at {open_until}"
        open_until.append(end)


def processes(events: list[Event]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def stages(events: list[Event], flow: str) -> list[str]:
    """The processes that a flow passes."""
    names = processes(events)
    return [names[event["pid"]] for event in events if event.get("id") == flow]


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
    target = tmp_path / "t.json.gz"
    written = write_trace(run, target)
    events = read(target)
    assert written == len(events)
    check_format(events)
    assert set(processes(events).values()) == {"buffer", "producer-0", "reward-0", "learner", "weightsync",
                                               "producer-1"}  # fmt: skip
    flows = {event["id"] for event in events if event["ph"] == "s"}
    assert {flow for flow in flows if flow.startswith("group-")} == {f"group-{group}" for group in range(12)}
    assert stages(events, "group-3") == ["producer-0", "reward-0", "buffer", "buffer", "learner", "learner"]
    assert stages(events, "weights-0") == ["learner", "weightsync"]
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, 7)]
    assert {"wait", "train", "publish", "commit"} <= {event["name"] for event in events if event["ph"] == "X"}
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert "group 12 drop: late" in marks and "exit with code 137" in marks


def test_faults_leave_the_format_whole(tmp_path: Path) -> None:
    """A lost lease and its second attempt, a dead group, a learner that restarts and trains a step again, a log that
    ends while groups are under way."""
    lost = [*issue(1, version=0)[:3], {"e": "lost", "g": 1, "token": 2, "producer": "producer-0", "why": "silent"}]
    again = [{"e": "lease", "g": 1, "token": 9, "attempt": 1, "producer": "producer-1", "w": 0, "deadline": 2,
              "bound": 2}, *issue(1, version=0)[2:]]  # fmt: skip
    history = [
        {"e": "service", "service_epoch": 1}, register(1, 0), *issue(0, version=0), *lost,
        *issue(2, version=0)[:2], {"e": "dead", "g": 2, "reason": "prompt", "detail": "too long"}, *again,
        *train(1, [0, 1]), register(2, 0), *train(1, [0, 1], epoch=2, replayed=True), *issue(3, version=1)[:4],
        *issue(4, version=1)[:2], "torn",
    ]  # fmt: skip
    run = with_history(tmp_path / "run", [event for event in history if event != "torn"], steps=1)
    with run.history.open("ab") as file:
        file.write(b'{"e":"sample","g":"x"}\n{"t":1,"e":"lease"}\n{"e": "rea')
    target = tmp_path / "t.json.gz"
    write_trace(run, target)
    events = read(target)
    check_format(events)
    assert stages(events, "group-1")[:2] == ["producer-0", "producer-1"]
    assert [event["name"] for event in events if event["name"].startswith("group 1,")] == ["group 1, attempt 2"]
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert {"group 1 lost: silent", "group 2 dead: prompt", "registered at step 0, epoch 2"} <= set(marks)
    left = [event["args"] for event in events if event["ph"] == "X" and event["name"] in ("group 3", "group 4")]
    assert [args["ended"] for args in left] == ["the log ends here"] * 2


def test_lanes_are_used_again_and_never_shared(tmp_path: Path) -> None:
    lanes = Lanes()
    first, second = lanes.take(0), lanes.take(5)
    assert first != second
    lanes.give(first, 10)
    assert lanes.take(9) not in (first, second) and lanes.take(10) == first
    with Out(tmp_path / "x.json.gz") as out:
        drawing = Drawing(out, zero=START)
        one = drawing.begin("producer-0", START - 5, "before the start")  # clocks of hosts differ
        assert drawing.end(one, START - 6) == 1
    check_format(read(tmp_path / "x.json.gz"))


def test_parts_fill_their_step_in_order() -> None:
    parts = list(parts_of({"wait_s": 0.5, "proximal_s": 0.25, "train_s": 0.25, "checkpoint_s": 1.0}, 100, 2_000_100))
    assert [name for name, _, _ in parts] == ["checkpoint", "wait", "proximal", "train"]
    assert (parts[0][1], parts[-1][2]) == (100, 2_000_100)
    assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))
    assert list(parts_of({}, 0, 10)) == []


def test_the_format_is_really_checked() -> None:
    one = {"ph": "X", "name": "x", "pid": 1, "tid": 1, "args": {}}
    introduced = {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 1, "args": {"name": "p"}}
    with pytest.raises(AssertionError, match="crosses"):
        check_format([introduced, {**one, "ts": 0, "dur": 10}, {**one, "ts": 5, "dur": 10}])
    with pytest.raises(AssertionError):
        check_format([introduced, {"ph": "s", "name": "f", "id": "a", "ts": 0, "pid": 1, "tid": 1}])


def test_the_command_and_a_folder_without_a_history(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "asyncrl", "trace", str(run.root), "--perfetto", str(tmp_path / "trace.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert re.match(r".*trace\.json\.gz: \d+ events", done.stdout)
    check_format(read(tmp_path / "trace.json.gz"))
    run.history.unlink()
    with pytest.raises(ConfigError) as found:
        write_trace(run, tmp_path / "other.gz")
    assert found.value.code == "run.missing" and not list(tmp_path.glob("*other*"))
