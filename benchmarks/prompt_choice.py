"""Steps that `data.sampler = "difficulty"` saves on mixtures of prompts of which most teach nothing, over seeds.

    python benchmarks/prompt_choice.py [--seeds 10]

A pool has rows of the demo's task; for a share of them no answer is right, so their groups give no gradient. Both
samplers train on samples of age 1 (benchmarks/exact_age.py), with the same pool and start weights per seed; no held-out
prompt is hopeless. A seed's figure is the first step whose held-out reward reaches that of the uniform sampler at the
end, both as means over three looks (one every `LOOK` steps), as a share of all steps. Runs in
benchmarks/results/prompt_choice.json are not repeated.
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
import reports  # noqa: E402, RUF100

from asyncrl.prompt_choice import PromptChoice  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "prompt_choice.json"
TASK, LOOK, AGE = "add", 2, 1
MIXTURES = ({"pool": 256, "hopeless": 0.9, "steps": 60},)
NO_ANSWER = "nothing"  # of a hopeless row


class Mixture(exact_age.Task):
    """A pool of rows; `choice` None: all of them once in every epoch, in a new order."""

    def __init__(self, tokenizer: Any, *, seed: int, pool: int, hopeless: float, choice: PromptChoice | None) -> None:
        super().__init__(TASK, tokenizer, seed=seed)
        rng = np.random.default_rng(seed)
        self.pool = super().rows(0, pool)
        for number in rng.permutation(pool)[: round(pool * hopeless)]:
            self.pool[number] = {**self.pool[number], "truth": NO_ANSWER}
        self.choice = choice
        self.orders = [rng.permutation(pool) for _ in range(1000)]
        self.numbers: dict[int, int] = {}  # group -> row

    def rows(self, first: int, count: int) -> list[dict[str, Any]]:
        """The rows of groups `first` and on."""
        for group in range(first, first + count):
            epoch, place = divmod(group, len(self.pool))
            chosen = self.choice.choose(group) if self.choice is not None else self.orders[epoch][place]
            self.numbers[group] = int(chosen)
        return [self.pool[self.numbers[group]] for group in range(first, first + count)]

    def score(self, row: dict[str, Any], drawn: exact_age.Drawn) -> float:
        return 0.0 if row["truth"] == NO_ANSWER else super().score(row, drawn)


def measure(*, seed: int, steps: int, pool: int, hopeless: float, chooses: bool) -> dict[str, Any]:
    """One run: held-out reward by step, and the share of groups with different rewards."""
    began = time.monotonic()
    torch.set_num_threads(1)
    config = exact_age.load(TASK, [], seed=seed, steps=steps)
    trainer = exact_age.Trainer(config)
    sampler = exact_age.Sampler(config.model.path, max_new=config.sampling.max_new_tokens)
    choice = PromptChoice(pool, seed=seed) if chooses else None
    source = Mixture(sampler.tokenizer, seed=seed, pool=pool, hopeless=hopeless, choice=choice)
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


def smooth(run: dict[str, Any]) -> dict[int, float]:
    """By step, the mean held-out reward of this look and the two before."""
    looks = list(run["held_out"].items())
    return {
        int(looks[place][0]): statistics.fmean(value for _, value in looks[max(0, place - 2) : place + 1])
        for place in range(len(looks))
    }


def steps_to(curve: dict[int, float], reward: float) -> int | None:
    """The first step at which the held-out reward is at least this."""
    return next((step for step, value in curve.items() if value >= reward), None)


def summary(runs: dict[str, Any], *, seeds: int, steps: int) -> dict[str, Any]:
    """By seed, and of the mean curves: the share of the steps. A seed that never gets there counts as one look more."""
    ways = {name: [smooth(runs[f"{name} {seed}"]) for seed in range(seeds)] for name in ("uniform", "difficulty")}
    means = {name: {step: statistics.fmean(one[step] for one in curves) for step in curves[0]}
             for name, curves in ways.items()}  # fmt: skip
    found = []
    for seed, (uniform, chosen) in enumerate(zip(*ways.values(), strict=True)):
        reached = steps_to(chosen, uniform[steps])
        ends = {"uniform": round(uniform[steps], 4), "difficulty": round(chosen[steps], 4)}
        share = round((reached or steps + LOOK) / steps, 3)
        found.append({"seed": seed, "reward": ends, "steps": reached, "share": share})
    return {
        "seeds": found,
        "share_mean": round(statistics.fmean(one["share"] for one in found), 3),
        "share_of_mean_curve": round(
            (steps_to(means["difficulty"], means["uniform"][steps]) or steps + LOOK) / steps, 3
        ),
        "reward": {name: round(curve[steps], 4) for name, curve in means.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    learning.prepare(TASK)
    known = json.loads(RESULTS.read_text())["mixtures"] if RESULTS.exists() else []
    results: list[dict[str, Any]] = []
    for mixture in MIXTURES:
        [entry] = [one for one in known if one["mixture"] == mixture] or [{"mixture": mixture, "runs": {}}]
        results.append(entry)
        for seed in range(given.seeds):
            for name in ("uniform", "difficulty"):
                if f"{name} {seed}" not in entry["runs"]:
                    work = {**mixture, "seed": seed, "chooses": name == "difficulty"}
                    entry["runs"][f"{name} {seed}"] = learning.run_in_child(_measure, work)
        entry |= summary(entry["runs"], seeds=given.seeds, steps=int(mixture["steps"]))
        what = "steps that data.sampler = 'difficulty' needs for the final held-out reward of the uniform order"
        reports.write(RESULTS, what, task=TASK, age=AGE, mixtures=results)
        print({name: value for name, value in entry.items() if name != "runs"}, flush=True)


def _measure(given: dict[str, Any]) -> dict[str, Any]:
    return measure(**given)


if __name__ == "__main__":
    main()
