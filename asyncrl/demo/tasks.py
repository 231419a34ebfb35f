"""The demonstration's tasks of arithmetic: prompts, noisy teachers and rewards.

Pure Python and cheap to import. Everything is a function of ``(task, split, seed, index)``, so two processes
that share nothing draw the same rows.

`add`
    ``12+07=`` -> ``19``. Two operands in 0..99, written with two digits; the answer is the plain sum. An answer
    takes 2 to 4 tokens, the end-of-sequence token included.
`running_sum`
    ``a3b5c2=`` -> ``a3:3b5:8c2:0#0``. Each term has a letter; the answer repeats letter and term, gives the running
    sum modulo 10 after the colon, and closes with ``#`` and the total modulo 10. An answer of ``n`` terms takes
    ``4 n + 3`` tokens, the end-of-sequence token included; ``n`` follows a capped Pareto law, so lengths are
    strongly long-tailed (median 15 tokens, mean about 27, 90th percentile 67, maximum 107).
`long_sum`
    The same prompts with 18 to 26 terms, and every addition written out: ``a7:0+7=07-7b5:7+5=12-2#2``. An answer
    takes ``11 n + 3`` tokens: 201 to 289.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

TASKS: tuple[str, ...] = ("add", "running_sum", "long_sum")
SPLITS: tuple[str, ...] = ("train", "heldout")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
CHARACTERS = DIGITS + "+=:# -" + LETTERS
"""Every character that a prompt or an answer may hold, in the order of the tokenizer's entries."""
MAX_TERMS = len(LETTERS)
PARETO_SCALE = 2.0
PARETO_SHAPE = 1.1
MAX_OPERAND = 99
MIN_LONG_TERMS = 18


def _check(task: str, split: str = "train") -> None:
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")


def row_random(task: str, *, seed: int, index: int, split: str = "train") -> random.Random:
    """The private random stream of a row: another one for each split, the same on every platform. Raises ValueError."""
    _check(task, split)
    return random.Random(f"asyncrl.recipes.tasks/{task}/{split}/{seed}/{index}")


def draw_terms(task: str, rng: random.Random) -> int:
    """A number of terms by the task's own law: 18..26, each as likely; for `running_sum` the capped Pareto law with
    shape 1.1 (2..26).
    """
    if task == "long_sum":
        return rng.randint(MIN_LONG_TERMS, MAX_TERMS)
    uniform = 1.0 - rng.random()
    return min(MAX_TERMS, int(PARETO_SCALE * uniform ** (-1.0 / PARETO_SHAPE)))


def draw_operands(task: str, rng: random.Random, *, terms: int | None = None) -> tuple[int, ...]:
    """The operands of a prompt: for `add` two numbers in 0..99, for the others `terms` digits in 0..9 (None: as many as
    the task's own law draws). Raises ValueError for an unknown task, or `terms` out of range.
    """
    _check(task)
    if task == "add":
        if terms not in (None, 2):
            raise ValueError(f"task add has 2 terms, got {terms}")
        return rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    count = draw_terms(task, rng) if terms is None else terms
    if not 1 <= count <= MAX_TERMS:
        raise ValueError(f"task {task} has 1..{MAX_TERMS} terms, got {count}")
    return tuple(rng.randint(0, 9) for _ in range(count))


def operands(task: str, *, seed: int, index: int, split: str = "train") -> tuple[int, ...]:
    """The operands of row `index`; see `draw_operands`."""
    return draw_operands(task, row_random(task, seed=seed, index=index, split=split))


def prompt_text(task: str, values: Sequence[int], *, first: int = 0) -> str:
    """Operands as a prompt: ``12+07=`` or ``a3b5c2=``. `first`: index of the first letter (not for `add`); the
    task's own prompts start at ``a``, a warm start may use later ones. Raises ValueError if the letters do not suffice.
    """
    _check(task)
    if task == "add":
        return "+".join(f"{value:02d}" for value in values) + "="
    return "".join(f"{letter}{value}" for letter, value in _pair_letters(values, first)) + "="


def _pair_letters(values: Sequence[int], first: int) -> Iterable[tuple[str, int]]:
    if first < 0 or first + len(values) > len(LETTERS):
        raise ValueError(f"{len(values)} terms from letter {first} on do not fit {len(LETTERS)} letters")
    return zip(LETTERS[first : first + len(values)], values, strict=True)


def ground_truth(task: str, values: Sequence[int]) -> str:
    """What a correct answer must state: the sum (`add`) or the sum modulo 10 (the others)."""
    _check(task)
    return str(sum(values)) if task == "add" else str(sum(values) % 10)


def expected_answer(task: str, values: Sequence[int]) -> str:
    """The full answer of a teacher that makes no mistake."""
    return demonstration(task, values, noise=0.0, rng=random.Random(0))


def demonstration(task: str, values: Sequence[int], *, noise: float, rng: random.Random, first: int = 0) -> str:
    """The answer of a teacher that makes mistakes, without an end-of-sequence mark; its format is always right.

    `noise` (0..1) is the probability, per digit of the sum (`add`) or per running sum (the others), that a digit
    drawn uniformly from 0..9 is written instead; a wrong running sum is carried on. `first`: as in `prompt_text`.
    Raises ValueError for an unknown task, another `noise`, or not enough letters.
    """
    _check(task)
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"noise must lie in 0..1, got {noise}")
    if task == "add":
        return "".join(_noisy_digit(int(digit), noise, rng) for digit in str(sum(values)))
    total = "0"
    steps = []
    for letter, value in _pair_letters(values, first):
        before, total = total, _noisy_digit((int(total) + value) % 10, noise, rng)
        written = "" if task == "running_sum" else f"{before}+{value}={int(before) + value:02d}-"
        steps.append(f"{letter}{value}:{written}{total}")
    return "".join(steps) + f"#{total}"


def _noisy_digit(digit: int, noise: float, rng: random.Random) -> str:
    return str(rng.randint(0, 9)) if noise > 0.0 and rng.random() < noise else str(digit)


def max_answer_tokens(task: str) -> int:
    """Length in tokens of the longest correct answer, end-of-sequence token included."""
    _check(task)
    return 4 if task == "add" else (4 if task == "running_sum" else 11) * MAX_TERMS + 3


def add_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 if the whole answer equals the sum, else 0.0. White space at the ends does not count."""
    return float(solution_str.strip() == str(ground_truth))


def running_sum_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 if the answer has exactly one ``#`` and what follows it is the total modulo 10, else 0.0."""
    _, mark, stated = solution_str.partition("#")
    return float(bool(mark) and stated.strip() == str(ground_truth))


long_sum_reward = running_sum_reward


def prompt_rows(task: str, size: int, seed: int, *, split: str = "train") -> list[dict[str, Any]]:
    """`size` rows with verl's column names; row i depends only on (task, split, seed, i).

    The `heldout` split uses another random stream. Short prompts are few in number, so both splits can still hold an
    equal short prompt by chance. Raises ValueError for an unknown task or split, or a negative size.
    """
    _check(task, split)
    if size < 0:
        raise ValueError(f"size must not be negative, got {size}")
    drawn = [operands(task, seed=seed, index=index, split=split) for index in range(size)]
    return [
        {
            "data_source": task,
            "prompt": prompt_text(task, values),
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": ground_truth(task, values)},
            "extra_info": {"index": index, "terms": len(values), "split": split},
        }
        for index, values in enumerate(drawn)
    ]


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as UTF-8 JSON lines, replacing the file at once; the number of rows. Creates the folder."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
            count += 1
    partial.replace(target)
    return count


NOISE = 0.34  # of the teacher of rejected answers: about that of the warm start
TRIES = 100  # attempts to draw a mistake


def answer_rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` rows with the answer of a teacher that makes no mistake in column `response`."""
    rows = prompt_rows(task, size, seed)
    return [{**row, "response": _right(task, seed, index)} for index, row in enumerate(rows)]


def pair_rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` rows with a right answer in column `chosen` and a wrong one in column `rejected`."""
    rows = prompt_rows(task, size, seed)
    return [
        {**row, "chosen": _right(task, seed, index), "rejected": _wrong(task, seed, index)}
        for index, row in enumerate(rows)
    ]


def label_rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` rows with one answer in column `completion`, in turn a right one (`label` true) and a wrong one."""
    rows = pair_rows(task, size, seed)
    return [
        {key: row[key] for key in row if key not in ("chosen", "rejected")}
        | {"completion": row["rejected" if index % 2 else "chosen"], "label": index % 2 == 0}
        for index, row in enumerate(rows)
    ]


def _right(task: str, seed: int, index: int) -> str:
    return expected_answer(task, operands(task, seed=seed, index=index))


def _wrong(task: str, seed: int, index: int) -> str:
    """A wrong answer, from its own random stream."""
    values = operands(task, seed=seed, index=index)
    stream = row_random(task, seed=seed, index=index, split="heldout")
    truth = ground_truth(task, values)
    for _ in range(TRIES):
        answer = demonstration(task, values, noise=NOISE, rng=stream)
        if answer.rpartition("#")[2] != truth:
            return answer
    raise ValueError(f"no wrong answer of {task} row {index} in {TRIES} tries")
