"""`asyncrl samples`: the newest texts, those of a step, and nothing in them that steers a terminal."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.cli import main
from asyncrl.images.folder import ImageFolder
from asyncrl.monitor.samples import plain


def line(step: int, reward: float, response: str, **more: Any) -> str:
    sample = {
        "step": step,
        "group": step,
        "index": int(reward * 10),
        "lag": 1,
        "prompt": "1+1=",
        "response": response,
        "reward": reward,
        "parts": {"exact": reward},
        "length": 3,
        "finish": "stop",
    }
    return json.dumps(sample | more) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("")
    texts = [line(1, 0.0, "first"), line(2, 0.0, "bad"), line(2, 1.0, "old"), line(2, 1.0, "good")]
    (tmp_path / "samples.jsonl").write_text("".join(texts))
    return tmp_path


def test_the_newest_step_the_best_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run)]) == 0
    said = capsys.readouterr().out
    assert "first" not in said and "old" not in said  # step 2 was trained again: the last line of a sample counts
    assert said.index("good") < said.index("bad") and "reward 1  lag 1  3 tokens, stop" in said
    assert main(["samples", str(run), "--last", "2"]) == 0
    assert "first" in capsys.readouterr().out


def test_samples_of_a_history_that_was_rolled_back_are_not_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "samples.jsonl").open("a") as file:
        file.write(line(3, 1.0, "lost") + line(2, 0.5, "again", group=7))
    assert main(["samples", str(run), "--last", "9"]) == 0
    said = capsys.readouterr().out
    assert "first" in said and "again" in said
    assert "good" not in said and "bad" not in said and "lost" not in said


def test_a_step_without_samples_says_which_have_some(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--step", "1"]) == 0
    assert "first" in capsys.readouterr().out
    assert main(["samples", str(run), "--step", "9"]) == 2
    assert "there are those of steps 1 to 2" in capsys.readouterr().err
    (run / "samples.jsonl").unlink()
    assert main(["samples", str(run)]) == 2
    assert "no step was trained yet" in capsys.readouterr().err


def test_texts_are_cut_and_cannot_steer_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples.jsonl").write_text(line(1, 0.5, "\x1b[2J" + "x" * 5000, parts={"a": 0.25, "b\x1b": 0.25}))
    assert main(["samples", str(run)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b[2J" in said and "3004 characters more" in said
    assert "(a 0.25, b\\x1b 0.25)" in said
    assert main(["samples", str(run), "--full"]) == 0
    assert "x" * 5000 in capsys.readouterr().out
    assert plain("a\nb\tc\u202e") == "a\nb\\tc\\u202e"


def test_images_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = BytesIO()
    Image.new("RGB", (30, 20)).save(buffer, "PNG")
    digest = ImageFolder(run / "images").put(buffer.getvalue())
    (run / "samples.jsonl").write_text(line(3, 1.0, "seen", images=[digest, "0" * 64], shown=[digest]))
    assert main(["samples", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"  images of later turns\n    image 30x20 {digest[:8]}\n" in said
    assert f"image 30x20 {digest[:8]}, image: 00000000 is missing" in said
