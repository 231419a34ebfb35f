"""The demonstration tasks: rewards, determinism, length law, rows and files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.demo import tasks


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("19", "19", 1.0),
        (" 19 ", "19", 1.0),
        ("018", "18", 0.0),
        ("18", "19", 0.0),
        ("191", "19", 0.0),
        ("19#", "19", 0.0),
        ("abc", "19", 0.0),
        ("", "19", 0.0),
        ("0", "0", 1.0),
    ],
)
def test_add_reward(answer: str, truth: str, reward: float) -> None:
    assert tasks.add_reward("add", answer, truth) == reward


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("a3:3b5:8c2:0#0", "0", 1.0),
        ("#0", "0", 1.0),
        ("a3:3b5:8c2:0# 0 ", "0", 1.0),
        ("a3:3b5:8c2:0#1", "0", 0.0),
        ("a3:3b5:8c2:0", "0", 0.0),
        ("a3:3b5:8c2:0#0#0", "0", 0.0),
        ("a3:3b5:8c2:0#00", "0", 0.0),
        ("a3:3#0b", "0", 0.0),
        ("#", "0", 0.0),
        ("", "0", 0.0),
    ],
)
def test_running_sum_reward(answer: str, truth: str, reward: float) -> None:
    assert tasks.running_sum_reward("running_sum", answer, truth, extra_info={"index": 0}) == reward


def test_texts_are_as_documented() -> None:
    assert tasks.prompt_text("add", (12, 7)) == "12+07="
    assert tasks.expected_answer("add", (12, 7)) == "19"
    assert tasks.prompt_text("running_sum", (3, 5, 2)) == "a3b5c2="
    assert tasks.prompt_text("running_sum", (3, 5), first=24) == "y3z5="
    assert tasks.expected_answer("running_sum", (3, 5, 2)) == "a3:3b5:8c2:0#0"
    assert tasks.expected_answer("long_sum", (7, 5)) == "a7:0+7=07-7b5:7+5=12-2#2"


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_expected_answer_is_rewarded_and_fits(task: str) -> None:
    reward = getattr(tasks, f"{task}_reward")
    for index in range(300):
        values = tasks.operands(task, seed=1, index=index)
        answer = tasks.expected_answer(task, values)
        assert reward(task, answer, tasks.ground_truth(task, values)) == 1.0
        assert len(answer) + 1 <= tasks.max_answer_tokens(task)
        assert set(answer + tasks.prompt_text(task, values)) <= set(tasks.CHARACTERS)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_noisy_teacher_errs_about_as_often_as_told(task: str) -> None:
    rng = random.Random(0)
    reward = getattr(tasks, f"{task}_reward")
    right = 0.0
    for _ in range(2000):
        values = tasks.draw_operands(task, rng, terms=2)
        answer = tasks.demonstration(task, values, noise=0.4, rng=rng)
        assert len(answer) == len(tasks.expected_answer(task, values))
        right += reward(task, answer, tasks.ground_truth(task, values))
    assert 0.25 < right / 2000 < 0.5


def test_a_wrong_running_sum_is_carried_on() -> None:
    answer = tasks.demonstration("running_sum", (1,) * 20, noise=0.5, rng=random.Random(3))
    assert answer != tasks.expected_answer("running_sum", (1,) * 20)
    assert answer[-1] == answer[-3]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_rows_depend_on_seed_and_index_only(task: str) -> None:
    assert tasks.prompt_rows(task, 40, 7)[:15] == tasks.prompt_rows(task, 15, 7)
    assert tasks.prompt_rows(task, 40, 7) != tasks.prompt_rows(task, 40, 8)
    assert tasks.prompt_rows(task, 0, 7) == []
    train = [row["prompt"] for row in tasks.prompt_rows(task, 40, 7)]
    heldout = [row["prompt"] for row in tasks.prompt_rows(task, 40, 7, split="heldout")]
    assert train != heldout


def test_rows_do_not_depend_on_the_process() -> None:
    code = "from asyncrl.demo import tasks; print(tasks.prompt_rows('running_sum', 5, 3))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(tasks.prompt_rows("running_sum", 5, 3))


def test_importing_the_tasks_is_cheap() -> None:
    code = "import sys, asyncrl.demo.tasks; print('torch' in sys.modules or 'transformers' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"


def test_row_columns() -> None:
    row = tasks.prompt_rows("running_sum", 3, 0)[2]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["data_source"] == "running_sum"
    assert row["reward_model"]["style"] == "rule"
    assert row["extra_info"]["index"] == 2
    assert row["prompt"].count("=") == 1
    assert len(row["prompt"]) == 2 * row["extra_info"]["terms"] + 1


def test_running_sum_answers_are_long_tailed() -> None:
    rows = tasks.prompt_rows("running_sum", 3000, 0)
    lengths = sorted(4 * row["extra_info"]["terms"] + 3 for row in rows)
    p50, p99 = lengths[1500], lengths[2970]
    assert p99 / p50 > 4
    assert 11 <= p50 <= 19
    assert lengths[0] >= 11
    assert lengths[-1] == tasks.max_answer_tokens("running_sum") == 107


def test_answers_of_long_sum_have_hundreds_of_tokens() -> None:
    lengths = [len(tasks.expected_answer("long_sum", tasks.operands("long_sum", seed=0, index=i))) for i in range(400)]
    assert min(lengths) + 1 == 201 and max(lengths) + 1 == tasks.max_answer_tokens("long_sum") == 289


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task"):
        tasks.prompt_rows("multiply", 1, 0)
    with pytest.raises(ValueError, match="unknown split"):
        tasks.prompt_rows("add", 1, 0, split="test")
    with pytest.raises(ValueError, match="negative"):
        tasks.prompt_rows("add", -1, 0)
    with pytest.raises(ValueError, match="noise"):
        tasks.demonstration("add", (1, 2), noise=1.5, rng=random.Random(0))
    with pytest.raises(ValueError, match="terms"):
        tasks.draw_operands("running_sum", random.Random(0), terms=27)
    with pytest.raises(ValueError, match="letters"):
        tasks.prompt_text("running_sum", (1, 2), first=25)


def test_write_jsonl(tmp_path: Path) -> None:
    rows = tasks.prompt_rows("add", 5, 0)
    path = tmp_path / "made" / "rows.jsonl"
    assert tasks.write_jsonl(path, rows) == 5
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows
    assert [each.name for each in path.parent.iterdir()] == ["rows.jsonl"]
