"""Steps that `data.sampler = "difficulty"` saves on a mixture of prompts of which most teach nothing, over seeds.

    python benchmarks/prompt_choice.py [--seeds 5] [--steps 40] [--hopeless 0.7]

The pool has `POOL` rows of the demo's task. No answer to `--hopeless` of them is right, so their groups give no
gradient. Both samplers train on samples of age 1 (benchmarks/exact_age.py), with the same pool and start weights per
seed; no held-out prompt is hopeless. A seed's figure is the first step whose held-out reward (every `LOOK` steps)
reaches that of the uniform sampler at the end. Runs in benchmarks/results/prompt_choice.json are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import exact_age  # noqa: E402, RUF100
import learning  # noqa: E402, RUF100

from asyncrl.runtime.prompt_choice import PromptChoice  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "prompt_choice.json"
TASK, POOL, LOOK, AGE = "add", 128, 2, 1
NO_ANSWER = "nothing"  # of a hopeless row


class Mixture(exact_age.Task):
    """A pool of rows; `choice` None: all of them once in every epoch, in a new order."""

    def __init__(self, tokenizer: Any, *, seed: int, hopeless: float, choice: PromptChoice | None) -> None:
        super().__init__(TASK, tokenizer, seed=seed)
        rng = np.random.default_rng(seed)
        self.pool = super().rows(0, POOL)
        for number in rng.permutation(POOL)[: round(POOL * hopeless)]:
            self.pool[number] = {**self.pool[number], "truth": NO_ANSWER}
        self.choice = choice
        self.orders = [rng.permutation(POOL) for _ in range(1000)]
        self.numbers: dict[int, int] = {}  # group -> row

    def rows(self, first: int, count: int) -> list[dict[str, Any]]:
        """The rows of groups `first` and on."""
        for group in range(first, first + count):
            epoch, place = divmod(group, POOL)
            chosen = self.choice.choose(group) if self.choice is not None else self.orders[epoch][place]
            self.numbers[group] = int(chosen)
        return [self.pool[self.numbers[group]] for group in range(first, first + count)]

    def score(self, row: dict[str, Any], drawn: exact_age.Drawn) -> float:
        return 0.0 if row["truth"] == NO_ANSWER else super().score(row, drawn)


def measure(*, seed: int, steps: int, hopeless: float, chooses: bool) -> dict[str, Any]:
    """One run: held-out reward by step, and the share of groups with different rewards."""
    began = time.monotonic()
    torch.set_num_threads(1)
    config = exact_age.load(TASK, [], seed=seed, steps=steps)
    trainer = exact_age.Trainer(config)
    sampler = exact_age.Sampler(config.model.path, max_new=config.sampling.max_new_tokens)
    choice = PromptChoice(POOL, seed=seed) if chooses else None
    source = Mixture(sampler.tokenizer, seed=seed, hopeless=hopeless, choice=choice)
    prompts = exact_age.Prompts(config, sampler, source, age=AGE)
    history = deque([trainer.weights()], maxlen=AGE + 1)
    looks, mixed = {0: exact_age._look(sampler, source, seed)}, []
    for step in range(1, steps + 1):
        sampler.take(history[0])
        batch = prompts.batch(step)
        spread = [len({one.reward for one in group.samples}) > 1 for group in batch.groups]
        for group, found in zip(batch.groups, spread, strict=True):
            if choice is not None:
                choice.observe(source.numbers[group.group], mixed=found)
        mixed.append(round(float(np.mean(spread)), 3))
        trainer.train(batch)
        history.append(trainer.weights())
        if step % LOOK == 0:
            sampler.take(history[-1])
            looks[step] = exact_age._look(sampler, source, seed)
    trainer.gang.leave()
    held_out = {str(step): round(value, 4) for step, value in looks.items()}
    return {"held_out": held_out, "mixed": mixed, "seconds": round(time.monotonic() - began, 1)}


def steps_to(run: dict[str, Any], reward: float) -> int | None:
    """The first step at which the held-out reward is at least this."""
    return next((int(step) for step, value in run["held_out"].items() if value >= reward), None)


def summary(runs: dict[str, Any], *, seeds: int, steps: int) -> dict[str, Any]:
    """By seed, and the share of the steps over all seeds: of their sum."""
    found = []
    for seed in range(seeds):
        uniform, chosen = runs[f"uniform {seed}"], runs[f"difficulty {seed}"]
        final = uniform["held_out"][str(steps)]
        found.append({"seed": seed, "reward": final, "steps": steps_to(chosen, final)})
    needed = [one["steps"] or steps + LOOK for one in found]
    return {"seeds": found, "share_mean": round(statistics.fmean(needed) / steps, 3), "most": max(needed) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hopeless", type=float, default=0.7)
    given = parser.parse_args()
    learning.prepare(TASK)
    setting = {"task": TASK, "pool": POOL, "steps": given.steps, "hopeless": given.hopeless, "age": AGE}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    runs = known["runs"] if known.get("setting") == setting else {}
    for seed in range(given.seeds):
        for name in ("uniform", "difficulty"):
            if f"{name} {seed}" in runs:
                continue
            measured = {"seed": seed, "steps": given.steps, "hopeless": given.hopeless}
            runs[f"{name} {seed}"] = learning.in_child(_measure, {**measured, "chooses": name == "difficulty"})
            RESULTS.write_text(json.dumps({"setting": setting, "runs": runs}, indent=1) + "\n")
            print(f"{name} {seed}: {runs[f'{name} {seed}']}", flush=True)
    result = {"setting": setting, **summary(runs, seeds=given.seeds, steps=given.steps), "runs": runs}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, indent=1))


def _measure(given: dict[str, Any]) -> dict[str, Any]:
    return measure(**given)


if __name__ == "__main__":
    main()
