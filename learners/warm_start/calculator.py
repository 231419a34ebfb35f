"""Warm start of the tool demonstration: a tiny model that mostly knows how to call a calculator, and its prompts.

Command line: `python -m learners.warm_start.calculator --out runs/models/calculator --data runs/data/calculator.jsonl`.
Each turn of a demonstration is a row; earlier turns and observations are its prompt. Takes about a minute on one core.
"""

from __future__ import annotations

import random

from asyncrl.demo import calculator
from learners.warm_start.training import Recipe, Rows, Stage, main_with_prompts


def draw(stage: Stage, rng: random.Random) -> Rows:
    """Each turn of one conversation."""
    one, other = rng.randint(11, 99), rng.randint(11, 99)
    first, found, answer = calculator.demonstration(one, other, noise=stage.noise, rng=rng)
    opened = f"<bos>user\n{one}*{other}<eos>\n<bos>assistant\n"
    rows = [(opened, first)]
    if found:
        rows.append((f"{opened}{first}<eos>\n<bos>tool\n{found}<eos>\n<bos>assistant\n", answer))
    return rows


RECIPE = Recipe(
    task="calculator",
    stages=(
        Stage(steps=70, lr=3e-3, noise=0.0, tokens=3800),
        Stage(steps=30, lr=5e-4, noise=0.35, tokens=2800),
    ),
    draw=draw,
    characters=calculator.CHARACTERS,
    words=calculator.WORDS,
    chat_template=calculator.TEMPLATE,
)

if __name__ == "__main__":
    raise SystemExit(main_with_prompts(RECIPE, calculator.prompt_rows, None))
