"""Rows with answers for the demonstration tasks: training data of sft, dpo and reward models.

Everything is a function of (task, seed, index); the prompts are those of `tasks.prompt_rows` with the same seed.

Example: {"prompt": "12+07=", "chosen": "19", "rejected": "18"} is a row of `pair_rows("add", ...)`.
"""

from __future__ import annotations

from typing import Any

from asyncrl.demo import tasks

NOISE = 0.34  # of the teacher of rejected answers: about that of the warm start
TRIES = 100  # attempts to draw a mistake


def answer_rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` rows with the answer of a teacher that makes no mistake in column `response`.

    Raises:
        ValueError: unknown task, or a negative size.
    """
    rows = tasks.prompt_rows(task, size, seed)
    return [{**row, "response": _right(task, seed, index)} for index, row in enumerate(rows)]


def pair_rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` rows with a right answer in column `chosen` and a wrong one in column `rejected`.

    Raises:
        ValueError: unknown task, or a negative size.
    """
    rows = tasks.prompt_rows(task, size, seed)
    return [
        {**row, "chosen": _right(task, seed, index), "rejected": _wrong(task, seed, index)}
        for index, row in enumerate(rows)
    ]


def _right(task: str, seed: int, index: int) -> str:
    return tasks.expected_answer(task, tasks.operands(task, seed=seed, index=index))


def _wrong(task: str, seed: int, index: int) -> str:
    """A wrong answer, from its own random stream."""
    values = tasks.operands(task, seed=seed, index=index)
    stream = tasks.row_random(task, seed=seed, index=index, split="heldout")
    truth = tasks.ground_truth(task, values)
    for _ in range(TRIES):
        answer = tasks.demonstration(task, values, noise=NOISE, rng=stream)
        if answer.rpartition("#")[2] != truth:
            return answer
    raise ValueError(f"no wrong answer of {task} row {index} in {TRIES} tries")
