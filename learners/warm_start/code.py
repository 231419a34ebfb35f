"""Warm start and prompts of the demonstration task of code (`asyncrl.demo.code`).

Command line (under a minute on one core)::

    python -m learners.warm_start.code --out runs/models/code --data runs/data/code.jsonl
"""

from __future__ import annotations

import random

from asyncrl.demo import code
from learners.warm_start.training import Recipe, Rows, Stage, main_with_prompts


def draw(stage: Stage, rng: random.Random) -> Rows:
    """One program."""
    steps = code.draw_steps(rng)
    return [(code.prompt_text(steps), code.demonstration(steps, noise=stage.noise, rng=rng))]


RECIPE = Recipe(
    task="code",
    stages=(Stage(steps=120, lr=3e-3, noise=0.0), Stage(steps=40, lr=5e-4, noise=0.28, warmup=5)),
    draw=draw,
    characters=code.CHARACTERS,
)

if __name__ == "__main__":
    raise SystemExit(main_with_prompts(RECIPE, code.prompt_rows, None))
