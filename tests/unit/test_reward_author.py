"""`asyncrl test-reward`: what it finds in good and bad functions, and what it tells their authors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from asyncrl.testing import assert_reward, check_reward
from producers.rewards.contract_test import load_rows

ROOT = Path(__file__).parents[2]
REWARDS = """
import os, random, time

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def crowd(completions, answer, **columns):
    best = max(map(len, completions))
    return [float(len(text) == best) for text in completions]

def careless(sample):
    what = {0: "empty", 1: "odd"}.get(len(sample.response), "")
    if not sample.response: return 1 / 0
    if len(sample.response) > 1000: time.sleep(60)
    if "\\x00" in sample.response: os._exit(3)
    if sample.finish == "length": return float("nan")
    return random.random()

def backwards(sample):
    return -float(sample.response == sample.ground_truth)

def how_red(sample):
    return float(sample.response == str(sample.row["images"][0].getpixel((0, 0))[0]))

def hungry(sample):
    held = bytearray(600 << 20) if len(sample.response) > 1000 else b""
    return float(sample.response == sample.ground_truth)
"""
ROWS = [{"prompt": "2+2=", "answer": "4000"}, {"prompt": "3+4=", "answer": "7000"}]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "author_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))


def verdicts(report: Any, verdict: str) -> str:
    return " | ".join(f"{check.text} -> {check.remedy}" for check in report.checks if check.verdict == verdict)


def test_a_good_function_keeps_the_contract() -> None:
    report = check_reward("author_rewards:exact", ROWS, timeout_s=60.0)
    assert report.ok and not verdicts(report, "fails") and not verdicts(report, "note"), report.render()
    found = {(outcome.row, outcome.kind): outcome.result.reward for outcome in report.outcomes}
    assert found == {
        (row, kind): float(kind == "good") for row in (0, 1) for kind in ("good", "bad", "empty", "huge", "odd", "cut")
    }
    text = report.render()
    assert "form verl" in text and "good responses get 1 on average, bad ones 0" in text and "MiB at most" in text
    assert "the same values again in a new process" in text


@pytest.mark.long
def test_a_careless_function_is_told_everything_at_once() -> None:
    report = check_reward("author_rewards:careless", ROWS[:1], timeout_s=1.5)
    fails = verdicts(report, "fails")
    for words in (
        "raised for 1 of 6 responses (empty)",
        "ZeroDivisionError",
        "timeout for 1 of 6 responses (huge)",
        "killed after 1.5 s",
        "died for 1 of 6 responses (odd)",
        "do not call exit",
        "not_finite for 1 of 6 responses (cut)",
        "different values: row 0, good",
        "no random numbers",
    ):
        assert words in fails, (words, fails)
    assert not report.ok
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        assert report.ok, report.render()


def test_a_batch_function_that_compares_is_noted() -> None:
    report = check_reward("author_rewards:crowd", ROWS, timeout_s=60.0)
    assert report.ok and "alone, 0.0 in a batch" in verdicts(report, "note")


def test_good_and_bad_the_wrong_way_round_are_noted() -> None:
    report = check_reward("author_rewards:backwards", ROWS[:1], timeout_s=60.0)
    assert report.ok and "good responses get -1 on average, bad ones" in verdicts(report, "note")


def test_memory_is_measured_and_limited() -> None:
    report = check_reward("author_rewards:hungry", ROWS[:1], timeout_s=60.0, memory_bytes=400 << 20)
    assert "memory for 1 of 6 responses (huge)" in verdicts(report, "fails")
    with pytest.raises(AssertionError, match=r"reward_workers\.memory_bytes"):
        assert_reward("author_rewards:hungry", ROWS[:1], timeout_s=60.0, memory_bytes=400 << 20)


@pytest.mark.parametrize(
    ("name", "more", "code", "words"),
    [
        ("author_rewards.py:exact", (), 0, ("form verl", "it keeps the contract")),
        ("author_rewards.py:absent", (), 2, ("error[config.reward]", "has no 'absent'")),
        ("builtin:exact", ("--data", "questions.jsonl"), 0, ("it keeps the contract",)),
        ("builtin:exact", ("--data", "absent.jsonl"), 2, ("error[config.data]", "absent.jsonl")),
    ],
)
def test_the_command(tmp_path: Path, name: str, more: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    command = [
        sys.executable,
        "-m",
        "asyncrl",
        "test-reward",
        name,
        "--data",
        "rows.jsonl",
        "--samples",
        "1",
        "--timeout-s",
        "60",
        *more,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert all(word in done.stdout + done.stderr for word in words), done.stdout + done.stderr


def test_the_helpers_import_nothing_heavy() -> None:
    code = "import sys, asyncrl.testing; print([n for n in ('torch', 'numpy', 'producers', 'zmq') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_function_of_images_is_tried_with_those_of_the_rows(tmp_path: Path) -> None:
    """Rows of an author's test hold images; those of a file too."""
    rows = [
        {"prompt": [{"role": "user", "content": "<image>how red?"}], "images": [encode(red)], "answer": str(red)}
        for red in (7, 200)
    ]
    report = check_reward("author_rewards:how_red", rows, timeout_s=60.0)
    assert report.ok, report.render()
    found = {(outcome.row, outcome.kind): outcome.result.reward for outcome in report.outcomes}
    assert [found[row, kind] for row in (0, 1) for kind in ("good", "bad")] == [1.0, 0.0, 1.0, 0.0]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded, images = load_rows(str(tmp_path / "rows.parquet"), count=4, prompt_key="prompt")
    assert [row["images"] for row in loaded] == [[digest] for digest in images] and list(images.values()) == [
        encode(7),
        encode(200),
    ]


def encode(red: int) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (2, 2), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()
