"""What the system refuses and what a damaged run holds: a clear error or what is left, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_run import write_run

from asyncrl import cli
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.errors import file_error
from asyncrl.launcher.launch import LaunchOptions, _conclude, _print_failure
from asyncrl.launcher.process import Child
from asyncrl.launcher.progress import Progress
from asyncrl.launcher.supervisor import Supervisor
from asyncrl.metrics import JsonTail, read_lines
from asyncrl.process_plan.plan import Outcome, ProcessPlan
from asyncrl.runtime.run_dir import RunDir, launchers

ROOT = Path(__file__).resolve().parents[2]
READERS = (
    ["audit"],
    ["report"],
    ["status"],
    ["top", "--once", "--plain"],
    ["trace", "--step", "3"],
    ["tune", "--list"],
    ["metrics"],
)
FILES = (
    "history.jsonl",
    "result.json",
    "processes.jsonl",
    "samples.jsonl",
    "metrics/learner.jsonl",
    "metrics/buffer.jsonl",
    "metrics/roles.jsonl",
    "metrics/weightsync.jsonl",
    "logs/launch.jsonl",
)
ODD = (None, "x", -1, 1e300, [], {}, [None], [[1]], {"a": None})


def without_keys(data: bytes) -> bytes:
    """A key less in every third line: what a flipped bit makes of a line that can still be read."""
    rng, lines = random.Random(1), []
    for line in map(json.loads, data.splitlines()):
        if line and rng.random() < 0.3:
            line.pop(rng.choice(list(line)))
        lines.append(json.dumps(line))
    return "\n".join(lines).encode() + b"\n"


def odd_values(data: bytes) -> bytes:
    """A value of another type in every third line."""
    rng, lines = random.Random(2), []
    for line in map(json.loads, data.splitlines()):
        if line and rng.random() < 0.3:
            line[rng.choice(list(line))] = rng.choice(ODD)
        lines.append(json.dumps(line))
    return "\n".join(lines).encode() + b"\n"


def huge_values(data: bytes) -> bytes:
    """A number of impossible size in every third line."""
    rng, lines = random.Random(4), []
    for line in map(json.loads, data.splitlines()):
        names = [name for name, value in line.items() if isinstance(value, int | float)]
        if names and rng.random() < 0.3:
            line[rng.choice(["t", *names])] = rng.choice([10**400, -(10**400), 1e300, 2**70])
        lines.append(json.dumps(line))
    return "\n".join(lines).encode() + b"\n"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) * 2 // 3],
    "binary": lambda data: random.Random(3).randbytes(4000),
    "no objects": lambda data: b'null\n5\n"x"\n[1,2]\n{}\n\xff\n' + b"[" * 100_000 + b"\n",
    "keys": without_keys,
    "huge": huge_values,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "run", steps=6).root


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("names", [FILES[:1], FILES[1:]], ids=["the log", "the others"])
def test_damaged_files(
    names: tuple[str, ...], damage: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    shutil.copytree(whole, root, symlinks=True)
    for name in names:
        path = root / name
        path.write_bytes(DAMAGES[damage](path.read_bytes() if path.exists() else b""))
    told = {words[0]: main([words[0], str(root), *words[1:]]) for words in READERS}
    assert "internal" not in capsys.readouterr().err
    assert set(told.values()) <= {0, 1, 2, 69, 70}  # 70: `tune --list` names a log that does not agree
    assert (told["audit"] == 1) == (FILES[0] in names)  # also where it ends early: by result.json the run is done


@pytest.mark.parametrize("name", ["metrics/learner.jsonl", "metrics/buffer.jsonl", "metrics/roles.jsonl"])
def test_metrics_that_are_no_numbers_are_left_out(name: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(odd_values((whole / name).read_bytes()))
    lines = read_lines(path)
    assert lines == JsonTail(path, from_end=False).poll()
    for line in lines:
        assert all(isinstance(line[key], int | float) for key in ("t", "step", "reward_mean", "issued") if key in line)


@pytest.mark.parametrize("words", [["audit"], ["report"], ["tune", "--list"], ["trace", "--step", "1"]])
def test_folder_in_a_files_place(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=2)
    run.history.unlink()
    run.history.mkdir()
    assert main([words[0], str(run.root), *words[1:]]) == 2
    assert f"error[file.refused] {run.history}: Is a directory" in capsys.readouterr().err


def test_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=2)
    assert main(["report", str(run.root), "--out", str(tmp_path / "none" / "report.html")]) == 2
    assert "error[file.refused]" in capsys.readouterr().err


def test_full_disk_has_its_own_code() -> None:
    error = file_error(OSError(errno.ENOSPC, "No space left on device", "/runs/my/report.html"))
    assert (error.code, error.exit_code, error.where) == ("disk.full", 69, "/runs/my/report.html")


def test_bug_is_a_traceback_and_code_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.parser()

    def broken(_args: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "parser", lambda: parser)
    parsed = parser.parse_args(["schema"])
    parsed.run = broken
    monkeypatch.setattr(parser, "parse_args", lambda _argv: parsed)
    assert main([]) == 70
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "error[internal]" in said


@pytest.mark.parametrize("words", [["stop", "r", "--timeout"], ["doctor", "--limit"], ["top", "r", "--every"]])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon"])
def test_no_wait_is_endless(words: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, value])
    assert ended.value.code == 2 and "seconds" in capsys.readouterr().err


def test_reader_that_goes_away_is_no_error() -> None:
    words = [sys.executable, "-m", "asyncrl", "schema"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=30) == 141 and said == b""


def test_launch_goes_on_where_nobody_reads_its_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        progress = Progress(RunDir(tmp_path).create(), steps=1, plain=True, out=out)
        progress.say("launch", "one")
        progress.say("launch", "two")
        progress.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # what is left in its buffer


def test_launch_goes_on_where_its_output_fills_the_disk(tmp_path: Path) -> None:
    with open("/dev/full", "w") as out:
        progress = Progress(RunDir(tmp_path).create(), steps=1, plain=True, out=out)
        progress.say("launch", "one")
        progress.say("launch", "two")
        progress.close()
        out.flush()  # at exit, too


def test_launch_goes_on_where_its_terminal_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    before = sys.stdout, sys.stderr
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as out:
        progress = Progress(RunDir(tmp_path).create(), steps=1, out=out)
        progress.say("launch", "one")
        assert progress._live is not None and os.read(master, 1 << 16)
        os.close(master)
        progress.say("launch", "SIGHUP: stopping")
        progress.tick()
        progress.close()
        out.flush()
    assert (sys.stdout, sys.stderr) == before


def test_a_lost_terminal_shows_in_the_table_first(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as out:
        progress = Progress(RunDir(tmp_path).create(), steps=1, out=out)
        os.close(master)
        progress.tick()
        progress.close()


def test_result_and_report_are_written_though_nothing_can_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=3)
    run.result.unlink()
    failed = Outcome(code=69, reason="learner ended", wall_s=4.0, failed="learner", last_lines=("no space",))
    with open("/dev/full", "w") as out, open("/dev/full", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        _conclude(run, load(run.config), failed, LaunchOptions())
        _print_failure(failed, run)
        monkeypatch.undo()
    assert json.loads(run.result.read_bytes())["code"] == 69 and run.report.exists()


def test_events_that_cannot_be_written_do_not_end_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    plan = ProcessPlan(role="learner", name="learner", argv=(sys.executable, "-c", "pass"), env={}, restarts=0)
    (tmp_path / "launch.jsonl").mkdir()  # in place of a full disk
    outcome = Supervisor([plan], logs=tmp_path, say=lambda _, line: said.append(line)).run()
    assert outcome.code == 0 and sum("events are not noted" in line for line in said) == 1


def test_a_child_that_cannot_be_killed_keeps_no_other_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [
        ProcessPlan(
            role="learner", name=name, argv=(sys.executable, "-c", "import time; time.sleep(60)"), env={}, restarts=0
        )
        for name in ("held", "other")
    ]
    supervisor = Supervisor(plans, logs=tmp_path, say=lambda _name, _line: None)
    held, other = supervisor.children
    held.start()
    other.start()
    held_process, other_process = held.process, other.process
    assert held_process is not None and other_process is not None
    kill = Child.kill
    monkeypatch.setattr(Child, "kill", lambda child: kill(child) if child is other else None)
    monkeypatch.setattr("asyncrl.launcher.supervisor.KILL_WAIT_S", 0.3)
    try:
        supervisor._kill_rest()
        assert other_process.wait(timeout=50) == -signal.SIGKILL  # by itself it ends after 60 s
    finally:
        held_process.kill()
        held_process.wait(timeout=60)


def test_looking_for_launchers_writes_nothing_and_takes_no_lock(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    starting = run.root / "launcher-all-77.lock"  # made, and not locked yet
    starting.touch()
    held = run.lock(f"launcher-all-{os.getpid()}")
    (run.root / "launcher-all-x.lock").write_text("anything")
    stale = run.root / "launcher-all-78.lock"
    stale.write_text("pid 78 on somewhere")
    before = (run.root / f"launcher-all-{os.getpid()}.lock").read_text()
    assert launchers(run) == [("all", os.getpid())]
    assert starting.exists() and not stale.exists()
    assert (run.root / f"launcher-all-{os.getpid()}.lock").read_text() == before
    held.close()
