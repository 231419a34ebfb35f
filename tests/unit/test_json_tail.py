"""The reader of growing JSONL files: torn lines, rotation, cut files, a folder that is away, going on where it was."""

from __future__ import annotations

import errno
import random
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bare_config import BARE

from asyncrl.config import parse
from asyncrl.metrics import JsonTail, MetricsLog, Position, open_lines, read_lines
from asyncrl.metrics import log as metrics_log
from asyncrl.runtime.run_dir import RunDir
from buffers.service.evaluation_files import EvaluationFiles


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_torn_and_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = JsonTail(path, from_end=False)
    assert tail.poll() == []  # it does not exist yet
    append(path, '{"a": 1}\n{"a"')
    assert tail.poll() == [{"a": 1}]
    assert tail.behind_bytes == len('{"a"')
    append(path, ": 2}\nnot json\n[3]\n\n")
    with path.open("ab") as file:
        file.write(b'{"a": "\xff"}\n{"a": 4')
    assert tail.poll() == [{"a": 2}] and tail.damaged == 3
    append(path, "}\n")
    assert tail.poll() == [{"a": 4}]


def test_a_file_that_is_put_aside_is_read_to_its_end_first(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n')
    tail = JsonTail(path, from_end=False)
    assert tail.poll() == [{"a": 1}]
    append(path, '{"a": 2}\n')
    path.rename(tmp_path / "x.jsonl.1")
    append(path, '{"a": 3}\n')
    assert tail.poll() + tail.poll() == [{"a": 2}, {"a": 3}]


def test_from_the_end_a_line_that_is_being_written_is_new(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n{"a"')
    tail = JsonTail(path)
    append(path, ": 2}\n")
    assert tail.poll() == [{"a": 2}]


def test_a_file_that_was_cut_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n{"a": 2}\n')
    tail = JsonTail(path, from_end=False)
    assert len(tail.poll()) == 2
    path.write_text('{"a": 3}\n')
    assert tail.poll() == [{"a": 3}]


def test_a_folder_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "x.jsonl"
    append(path, '{"a": 1}\n')
    tail = JsonTail(path, from_end=False)
    assert len(tail.poll()) == 1
    folder.rename(tmp_path / "away")
    assert tail.poll() == [] and tail.behind_bytes == 0
    append(tmp_path / "away" / "x.jsonl", '{"a": 2}\n')
    (tmp_path / "away").rename(folder)
    assert tail.poll() == [{"a": 2}]


def test_an_error_of_the_file_system_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n')
    tail = JsonTail(path, from_end=False)

    def broken(*_: Any) -> bytes:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.pread", broken)
        assert tail.poll() == []
    assert tail.poll() == [{"a": 1}]


def test_a_position_is_the_end_of_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n{"a"')
    tail = JsonTail(path, from_end=False)
    tail.poll()
    append(path, ": 2}\n")
    position = msgspec.json.decode(msgspec.json.encode(tail.position), type=Position)
    assert JsonTail(path, from_end=False, position=position).poll() == [{"a": 2}]
    path.unlink()
    append(path, '{"b": 1}\n' * 9)
    other = JsonTail(path, from_end=False, position=Position(0, 5))  # of another file
    assert len(other.poll()) == 9
    reused = Position(path.stat().st_ino, 5)  # a new file that got the number of an old one: 5 is no line's end
    assert len(JsonTail(path, from_end=False, position=reused).poll()) == 9


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_written_in_whatever_pieces_arrives_once_and_in_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path, found, written = tmp_path / "x.jsonl", list[int](), 0
    tail = JsonTail(path, from_end=False)
    data = b""
    for _ in range(400):
        choice = rng.random()
        if choice < 0.5:
            data += msgspec.json.encode({"n": written, "text": "x" * rng.randint(0, 300)}) + b"\n"
            written += 1
        if choice > 0.3:
            cut = rng.randint(0, len(data))
            with path.open("ab") as file:
                file.write(data[:cut])
            data = data[cut:]
        if choice > 0.8:
            found += [line["n"] for line in tail.poll()]
        if choice > 0.97 and not data:
            path.rename(tmp_path / "old")  # rotation between two whole lines
        if choice > 0.9:  # another process takes over; only a whole file tells it where it was
            tail.close()
    with path.open("ab") as file:
        file.write(data)
    while lines := tail.poll():
        found += [line["n"] for line in lines]
    assert found == list(range(written)) and tail.damaged == 0


def test_it_reads_what_the_log_writes(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    tail = JsonTail(tmp_path / "m.jsonl")
    log.write({"lag_mean": 0.5, "loss": float("nan")}, role="learner")
    [line] = tail.poll()
    log.close()
    assert (line["lag_mean"], line["skipped"], line["role"]) == (0.5, ["loss"], "learner")


def test_a_log_of_guests_has_a_limited_size(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "roles.jsonl"
    log = MetricsLog(path, most_bytes=2000)
    tail = JsonTail(path, from_end=False)
    seen = []
    for step in range(200):
        log.write({"step": step})
        seen += [line["step"] for line in tail.poll()]
    log.close()
    assert seen == list(range(200)), "who follows the file misses nothing"
    assert sum(one.stat().st_size for one in path.parent.iterdir()) < 4200
    assert {one.name for one in path.parent.iterdir()} == {"roles.jsonl", "roles.jsonl.1"}


def test_what_follows_a_line_that_a_kill_cut_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"step": 2}\n'
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        known = read_lines(path)
        log = MetricsLog(path)
        log.write({}, step=3)
        log.close()
        assert [line["step"] for line in read_lines(path)] == [*(line["step"] for line in known), 3], whole[:cut]
    with open_lines(path) as file:
        file.write(b"")
    assert path.read_bytes().endswith(b"\n") and b"\n\n" not in path.read_bytes()


def test_scored_samples_and_processes_after_a_line_that_a_kill_cut(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    run.evaluations.mkdir()
    scores = run.evaluations / "step-4.jsonl"
    scores.write_bytes(b'{"step": 4, "row": 0}\n{"step": 4, "ro')
    reward = '[[reward]]\nfunction = "none:none"\n'
    config = parse(f'[run]\ndir = "{tmp_path}"\n[model]\npath = "m"\n[data]\npath = "d.jsonl"\n{reward}')
    EvaluationFiles(config).write_samples([{"step": 4, "row": 1}, {"step": 4, "row": 2}])
    assert [line["row"] for line in read_lines(scores)] == [0, 1, 2]
    run.processes.write_bytes(b'{"role": "buf')
    run.record_process("buffer", "buffer")
    assert [line["role"] for line in read_lines(run.processes)] == ["buffer"]


def run_out_of_space(log: MetricsLog) -> FileIO:
    """Every write of the log fails; its file, to give it back."""
    file, log._file = log._file, open_lines(Path("/dev/full"))
    return file


def test_a_full_disk_costs_a_service_lines_of_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.try_write({"step": 1})
    file = run_out_of_space(log)
    log.try_write({"step": 2})
    log.try_write({"step": 3})
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 3})
    log._file = file
    log.try_write({"step": 4})
    log.close()
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [1, 4] and log.lost == 2
    assert capsys.readouterr().out.count("ERROR: lines of m.jsonl are lost (1 so far)") == 1, "once per outage"
    with pytest.raises(KeyError):
        log.try_write({"no such metric": 1})


def test_a_log_is_renamed_later_if_no_new_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path, most_bytes=100)

    def refuse(path: Path) -> FileIO:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(metrics_log, "open_lines", refuse)
        for step in range(10):
            log.try_write({"step": step})
    log.try_write({"step": 10})
    log.try_write({"step": 11})
    log.close()
    assert [line["step"] for line in read_lines(path)] == [11]
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl.1")] == list(range(11))


def test_the_line_of_an_evaluation_waits_for_space(tmp_path: Path) -> None:
    RunDir(tmp_path).create()
    files = EvaluationFiles(parse(BARE, overrides=[f"run.dir={tmp_path}"]))
    files.write_ended([{"round": 1, "val-core/x/reward/mean@1": 0.5}])
    assert files._log is not None
    file = run_out_of_space(files._log)
    files.write_ended([{"round": 2, "val-core/x/reward/mean@1": 0.6}])
    files._log._file = file
    files.write_ended([{"round": 3, "val-core/x/reward/mean@1": 0.7}])
    files.close()
    assert [line["round"] for line in read_lines(tmp_path / "metrics" / "evaluation.jsonl")] == [1, 2, 3]
