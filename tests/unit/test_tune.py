"""`asyncrl tune`: what it understands, what it asks the buffer, what it prints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from synthetic_run import START, good_history, write_history, write_run

from asyncrl import wire
from asyncrl.cli import main
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.monitor.tune import author, parse_settings
from asyncrl.net.responder import Call, Responder
from asyncrl.runtime.run_dir import RunDir, endpoint


class Buffer:
    """Answers `Tune` as the buffer would; keeps what it was asked."""

    def __init__(self, address: str) -> None:
        self.asked: list[wire.Tune] = []
        self._started, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(address)), daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    async def _serve(self, address: str) -> None:
        responder = Responder(address, self._handle)
        self._started.set()
        while not self._stopped.is_set():
            await asyncio.sleep(0.01)
        responder.close()

    def _handle(self, calls: list[Call]) -> None:
        for call in calls:
            self.asked.append(call.message)
            changes = msgspec.json.decode(call.message.changes)
            if changes.get("max_staleness") == 99:
                call.refuse(AsyncRLError("config.conflict", "pipeline_depth 4 > max_staleness 2"))
            else:
                changed = {f"buffer.{key}": [4, value] for key, value in changes.items()}
                note = "groups that are leased keep their bound"
                call.reply(wire.Tuned(len(self.asked), msgspec.json.encode(changed).decode(), note))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=60)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "run", steps=3)


@pytest.fixture
def buffer(run: RunDir) -> Iterator[Buffer]:
    from asyncrl.config import load

    made = Buffer(endpoint(load(run.config), "buffer"))
    yield made
    made.close()


def test_values_are_toml_and_bare_words_are_strings() -> None:
    words = ["max_staleness=8", "on_late = drop", 'learner.algorithm.loss="ppo"', "x=[1, 2]", "y=true", "z=1.5"]
    assert parse_settings(words) == {
        "max_staleness": 8,
        "on_late": "drop",
        "learner.algorithm.loss": "ppo",
        "x": [1, 2],
        "y": True,
        "z": 1.5,
    }
    for wrong in (["max_staleness"], ["=4"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(ConfigError):
            parse_settings(wrong)


def test_a_change_is_asked_with_its_author_and_told(
    run: RunDir, buffer: Buffer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(run.root), "max_staleness=8", "on_late=drop"]) == 0
    asked = buffer.asked[0]
    assert msgspec.json.decode(asked.changes) == {"max_staleness": 8, "on_late": "drop"}
    assert asked.author == author() and "@" in asked.author and asked.undo_to == -1
    text = capsys.readouterr().out
    assert "change 1 is in force" in text and "buffer.max_staleness: 4 -> 8" in text
    assert 'buffer.on_late: 4 -> "drop"' in text and "note: groups that are leased keep their bound" in text
    assert main(["tune", str(run.root), "--undo", "0"]) == 0
    assert buffer.asked[1].undo_to == 0 and buffer.asked[1].changes == "{}"


def test_an_address_instead_of_a_folder(run: RunDir, buffer: Buffer, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncrl.config import load

    address = endpoint(load(run.config), "buffer")
    assert main(["tune", "--connect", address, "max_staleness=3"]) == 0
    assert msgspec.json.decode(buffer.asked[0].changes) == {"max_staleness": 3}
    assert main(["tune", "--connect", address, "--list"]) == 2  # the history is in the folder
    assert "error[usage]" in capsys.readouterr().err


def test_a_refusal_comes_with_its_arithmetic(run: RunDir, buffer: Buffer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(run.root), "max_staleness=99"]) == 2
    assert "pipeline_depth 4 > max_staleness 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["RUN"], 2, "give key=value"),
        (["RUN", "max_staleness"], 2, "is not key=value"),
        (["RUN", "a=1", "--undo", "1"], 2, "give key=value"),
        (["RUN", "--undo", "-1"], 2, "counted from 1"),
        (["RUN", "a=1", "--list"], 2, "--list takes a run folder"),
        (["a=1"], 2, "give key=value"),
        (["RUN", "max_staleness=8"], 69, "the run is not running"),
        (["RUN-none", "max_staleness=8"], 2, "run.missing"),
    ],
)
def test_mistakes_are_one_clear_error(
    run: RunDir, capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    assert main(["tune", *(word.replace("RUN", str(run.root)) for word in words)]) == code
    error = capsys.readouterr().err
    assert text in error and error.startswith("error[") and "Traceback" not in error


def test_the_list_of_changes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(run.root), "--list"]) == 0
    assert "nothing was tuned" in capsys.readouterr().out
    change = {"t": START, "e": "tune", "n": 1, "author": "me@here", "key": "buffer.max_staleness", "old": 4, "new": 1}
    back = {**change, "n": 2, "old": 1, "new": 4, "undo": True}
    write_history(run.history, [*good_history(), change, back])
    assert main(["tune", str(run.root), "--list"]) == 0
    one, two = capsys.readouterr().out.splitlines()
    assert one.split()[0] == "1" and one.endswith("me@here  buffer.max_staleness: 4 -> 1")
    assert two.split()[0] == "2" and two.endswith("1 -> 4 (undo)")


def test_changes_at_no_time(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    change = {
        "t": 1e300,
        "e": "tune",
        "n": 1,
        "author": "me@here",
        "key": "buffer.on_late",
        "old": "wait",
        "new": "drop",
    }
    write_history(run.history, [*good_history(), change])
    assert main(["tune", str(run.root), "--list"]) == 0
    assert "   1  1e+300  me@here" in capsys.readouterr().out
    change["t"] = 10**400
    write_history(run.history, [*good_history(), change])
    assert main(["tune", str(run.root), "--list"]) == 70
    assert "error[store.corrupt]" in capsys.readouterr().err
