"""`asyncrl top` and the form of `asyncrl status --json`: of a folder without processes, and of made-up answers."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from status_form import strangers
from synthetic_run import START, write_run

from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.errors import AsyncRLError
from asyncrl.metrics import JsonTail
from asyncrl.monitor.plain import plain, sparkline
from asyncrl.monitor.screen import screen
from asyncrl.monitor.snapshot import Snapshot, snapshot
from asyncrl.monitor.source import FileSource, Observed
from asyncrl.monitor.status_schema import Buffer, Judge, Member, Status, Tuning, WeightSync, Worker
from asyncrl.monitor.top import Looks, exit_code, top_command
from asyncrl.runtime.run_dir import RunDir
from buffers.groups.records import settings_of
from buffers.groups.tunable_settings import flatten

NOW = START + 100


def running() -> Observed:
    """What a look at a running system finds: two producers, one of them late with its weights."""
    beats = {
        name: [
            {
                "t": NOW - 10 + second,
                "role": "producer",
                "name": name,
                "pid": 11,
                "busy_share": 0.5,
                "generated_tokens": 200.0 * second,
                "engine_version": 7.0 - place,
                "samples_in_flight": 12.0,
            }
            for second in range(10)
        ]
        for place, name in enumerate(("producer-0", "producer-1"))
    }
    workers = [Worker(name, 11, "gpu1", 0.4, stats={"engine_version": 7.0 - place}) for place, name in enumerate(beats)]
    steps = [
        {
            "t": NOW - 8 + 2 * number,
            "step": number + 1,
            "reward_mean": 0.1 * number,
            "lag_mean": 1.5,
            "lag_max": 2,
            "bound_max": 2,
            "step_s": 2.0,
            "wait_s": 0.8,
            "fetch_s": 0.0,
            "publish_s": 0.1,
            "commit_s": 0.0,
            "checkpoint_s": 0.1,
            "tokens_per_s": 500.0,
            "reward/exact": 0.25,
        }
        for number in range(5)
    ]
    buffer = Buffer(
        ledger={"issued": 40, "leased": 3, "unscored": 1, "ready": 2, "claimed": 4, "trained": 30, "dropped": 2},
        version=5,
        producers=workers,
        tuning=Tuning(depth=2, batch_groups=4),
        rewards=[Worker("reward-0", 12, "gpu1", 0.2, stats={"scored_samples": 50.0, "reward_call_s": 0.004})],
        learner=Worker("learner", 13, "gpu2", 0.3, waiting_for="step 6: 2 of 4 groups are ready", waiting_s=3.0),
        waiting_for="step 6 waits for 2 groups",
        judges=[Judge("slow", workers=1, waiting=3, leased=2, scored=50, failures=1, call_s=0.25)],
    )
    sync = WeightSync(
        version=7,
        committed=7,
        members={"producer-0": Member("serving", 7), "producer-1": Member("stale", 6, why="late")},
    )
    return Observed(
        at=NOW,
        status=Status(run="/runs/my", name="my", steps=50, buffer=buffer, weightsync=sync),
        steps=steps,
        beats=beats,
        capacity=12,
        max_staleness=2,
        slots=64,
        events=[
            {"t": NOW - 50, "event": "exit", "name": "producer-1", "code": 137},
            {"t": NOW - 49, "event": "restart", "name": "producer-1", "wait_s": 0.5, "code": 137},
            {"t": NOW - 40, "event": "exit", "name": "reward-1", "code": 0},
        ],
    )


def test_a_running_system_in_numbers() -> None:
    seen = snapshot(running())
    assert (seen.step, seen.steps, seen.outstanding, seen.capacity) == (5, 50, 10, 12)
    assert seen.learner.waiting == pytest.approx(0.4) and seen.learner.other == pytest.approx(0.1)
    assert seen.learner.training == pytest.approx(0.5)
    first = seen.producers[0]
    assert first.rate == pytest.approx(200.0) and first.busy == pytest.approx(0.5) and first.seen_s == 0.4
    assert seen.parts == {"exact": 0.25}
    seldom = running()
    seldom.steps[1]["reward/code"], seldom.steps[3]["reward/code"] = 0.1, 0.5  # batches with rows of its data source
    assert snapshot(seldom).parts == {"exact": 0.25, "code": 0.5}
    assert [(one.what, one.text) for one in seen.troubles] == [
        ("restart", "producer-1 in 0.5 s"),
        ("exit", "producer-1 code 137"),
    ]


def test_the_level_of_the_weights_is_the_one_in_force() -> None:
    algorithm = settings_of(load(Path(__file__).parents[2] / "configs" / "quickstart.toml")).algorithm
    told = {f"learner.algorithm.{name}": value for name, value in flatten(algorithm).items()}
    seen = running()
    assert snapshot(seen).weight_level == ""
    for changes, level in (
        (dict[str, Any](), "token"),
        ({"learner.algorithm.correction_options": {"level": "sequence"}}, "sequence"),
        ({"learner.algorithm.correction": "none", "learner.algorithm.correction_options": {}}, ""),
        ({"learner.algorithm.loss": "vespo"}, ""),
    ):
        seen.status.buffer.tuning.settings = told | changes
        assert snapshot(seen).weight_level == level


def test_lines_and_picture_say_the_same() -> None:
    seen = snapshot(running())
    lines = plain(seen)
    text = "\n".join(lines)
    out = io.StringIO()
    Console(file=out, width=200).print(screen(seen))
    for words in (
        "my  running  step 5 of 50",
        "10 of 12 under way: leased 3 · unscored 1 · ready 2 · claimed 4",
        "mean 1.50, max 2 of 2",
        "producers generate 50 % | learner trains 50 %, waits 40 %",
        "step 6 waits for 2 groups",
        "exact 0.250",
        "slow: 3 waiting, 2 with 1 workers, 50 scored, 1 failures, 250.0 ms a call",
        "version 7, held by generators 7; producer-1 stale at 6",
        "learner (40%) and producers (50%) wait for each other",
    ):
        assert words in text, words
        assert words in out.getvalue(), words
    assert any(line.startswith("producer-0") and "200 tok/s" in line and "gpu1" in line for line in lines)
    assert lines[-1].startswith("advice")


def test_words_of_the_run_cannot_move_the_cursor() -> None:
    found = running()
    found.status.buffer.producers[0].waiting_for = "x\x1b[2J[red]y"
    found.status.buffer.waiting_for = "\x1b]0;title\x07"
    text = "\n".join(plain(snapshot(found)))
    assert "\x1b" not in text and "\x07" not in text and "x?[2J[red]y" in text
    out = io.StringIO()
    Console(file=out, width=200).print(screen(snapshot(found)))
    assert "x?[2J[red]y" in out.getvalue()


def test_nothing_known_is_shown_as_nothing() -> None:
    text = "\n".join(plain(snapshot(Observed(at=NOW, status=Status(buffer=Buffer(error="no answer"))))))
    assert "no answer" in text and "mean -, max - of -" in text and "nan" not in text.lower()


def test_sparks() -> None:
    assert sparkline([]) == "" and sparkline([0, 0]) == "▁▁" and len(sparkline(range(100), width=30)) == 30


# ---------------------------------------------------------------- a folder


def test_a_finished_run_shows_its_last_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=20)
    assert main(["top", str(run.root), "--once", "--plain"]) == 0
    text = capsys.readouterr().out
    assert "ended: done" in text and "step 20 of 20" in text and "producer-1 code 137" in text
    assert "advice    the run is over (done)" in text
    line = json.loads((run.metrics / "learner.jsonl").read_bytes().splitlines()[-1])
    assert f"reward {line['reward_mean']:.3f}" in text


def test_a_crashed_run_is_told_as_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=20)
    run.result.unlink()
    assert main(["top", str(run.root), "--once", "--plain"]) == 69
    text = capsys.readouterr().out
    assert "no answer" in text and "step 20 of 20" in text and "start the run again: it resumes" in text


def test_without_a_terminal_top_writes_lines_and_ends_with_the_run(tmp_path: Path) -> None:
    out = io.StringIO()
    run = write_run(tmp_path / "run", steps=5)
    assert top_command(run.root, connect="", key="", once=False, as_plain=False, every_s=0.1, out=out) == 0
    assert out.getvalue().count("advice") == 1


def test_steps_that_come_again_replace_the_first_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    with (run.metrics / "learner.jsonl").open("ab") as file:
        file.write(b'{"t":1760000900,"step":4,"reward_mean":0.75,"step_s":1.0,"wait_s":0.5}\n{"step": 9')
    source = FileSource(RunDir(run.root))
    assert [line["step"] for line in source.look().steps] == [1, 2, 3, 4]
    with (run.metrics / "learner.jsonl").open("ab") as file:
        file.write(b'9, "reward_mean": 0.5}\n')
    assert [line["step"] for line in source.look().steps][-2:] == [4, 99]


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f'{{"step": {number}}}\n' for number in range(1000)) + '{"step": 10')
    for last in (1, 12, 13, 14, 100, 10**6):
        tail = JsonTail(path, last_bytes=last)
        lines = [line["step"] for line in tail.poll()]
        tail.close()
        assert lines == list(range(1000 - len(lines), 1000))
    tail = JsonTail(path, last_bytes=40)
    assert len(tail.poll()) == 2
    with path.open("a") as file:
        file.write("00}\n")
    assert tail.poll() == [{"step": 1000}]
    tail.close()


def test_where_nobody_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["top"]) == 2 and "error[usage]" in capsys.readouterr().err
    assert main(["top", str(tmp_path), "--once"]) == 2 and "error[run.missing]" in capsys.readouterr().err
    assert main(["top", "--connect", f"ipc://{tmp_path}/nobody.sock", "--once", "--plain"]) == 69
    assert "no answer" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["top", str(tmp_path), "--every", "0"])


def test_looks_go_on_beside_the_keys_and_hand_over_an_error() -> None:
    seen: list[Any] = []

    def look() -> Snapshot:
        seen.append(time.monotonic())
        if len(seen) > 2:
            raise AsyncRLError("wire.decode", "no status")
        return Snapshot(at=0.0)

    looks = Looks(look, every_s=0.01)
    looks.start()
    looks.join(timeout=30)
    assert looks.newest is not None and looks.error is not None and len(seen) == 3
    assert exit_code(Snapshot(at=0.0, live=False, silent="x")) == 69


# ---------------------------------------------------------------- the form of the status


def test_status_of_a_folder_has_the_published_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=5)
    assert main(["status", str(run.root), "--json"]) == 69
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["last_step"]["step"] == 5 and set(found["workers"]) >= {"producer-0"}
    assert strangers(found, Status) == []
    assert msgspec.convert(found, Status).buffer.code == "net.unreachable"


def test_a_field_that_is_not_published_is_seen() -> None:
    found = msgspec.to_builtins(Status(buffer=Buffer(producers=[Worker("p", 1, "h")])))
    assert strangers(found, Status) == []
    found["buffer"]["producers"][0]["mood"] = 1
    found["more"] = 2
    assert strangers(found, Status) == ["buffer.producers[].mood", "more"]
