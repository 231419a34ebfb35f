"""The demonstration task of code: write a tiny function, graded in the sandbox.

Pure Python and cheap to import. Everything is a function of (split, seed, index). The response completes a program: `f
= lambda x: ` precedes it (`args.prefix` of `builtin:code`), and its tests call `f`; any equivalent program is correct.

Example: "add7mul4:" -> "(x+7)*4"; the tests are f(2) = 36, f(5) = 48, f(11) = 72; "x*4+28" passes them too.
"""

from __future__ import annotations

import random
from typing import Any

SPLITS = ("train", "heldout")
CHARACTERS = "0123456789+-*()x:" + "abcdefghijklmnopqrstuvwyz"
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
INPUTS = (2, 5, 11)
PREFIX = "f = lambda x: "

Step = tuple[str, int]  # a word of OPERATORS, and a digit


def function_steps(*, seed: int, index: int, split: str = "train") -> tuple[Step, Step]:
    """The two steps of a function. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return draw_steps(random.Random(f"asyncrl.recipes.code/{split}/{seed}/{index}"))


def draw_steps(rng: random.Random) -> tuple[Step, Step]:
    """Two steps from a stream."""
    first, second = ((rng.choice(list(OPERATORS)), rng.randint(2, 9)) for _ in range(2))
    return first, second


def prompt_text(steps: tuple[Step, Step]) -> str:
    return "".join(f"{word}{digit}" for word, digit in steps) + ":"


def apply_steps(steps: tuple[Step, Step], x: int) -> int:
    """The result of the function."""
    for word, digit in steps:
        x = x + digit if word == "add" else x - digit if word == "sub" else x * digit
    return x


def demonstration(steps: tuple[Step, Step], *, noise: float, rng: random.Random) -> str:
    """The expression of a teacher that replaces each digit and operator by a random one with this probability."""
    parts = []
    for word, digit in steps:
        written = rng.choice(list(OPERATORS)) if noise and rng.random() < noise else word
        number = rng.randint(2, 9) if noise and rng.random() < noise else digit
        parts.append(f"{OPERATORS[written]}{number}")
    return f"(x{parts[0]}){parts[1]}"


def prompt_rows(size: int, seed: int, *, split: str = "train") -> list[dict[str, Any]]:
    """`size` rows with verl's column names; the ground truth is what `builtin:code` tests."""
    rows = []
    for index in range(size):
        steps = function_steps(seed=seed, index=index, split=split)
        tests = {"fn_name": "f", "inputs": [[x] for x in INPUTS], "outputs": [apply_steps(steps, x) for x in INPUTS]}
        rows.append(
            {
                "data_source": "code",
                "prompt": prompt_text(steps),
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": tests},
                "extra_info": {"index": index, "split": split},
            }
        )
    return rows
